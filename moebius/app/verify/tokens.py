"""What is computed: the bundled text, or a user's, in the model's own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from moebius.checkpoint.gguf.files import companion_directory, gguf_files, is_gguf
from moebius.checkpoint.gguf.header import read_header
from moebius.checkpoint.gguf.tokenizer import read_tokenizer
from moebius.checkpoint.tiktoken_vocabulary import has_vocabulary, read_vocabulary
from moebius.errors import UserError

BUNDLED_TEXT = Path(__file__).with_name("text.txt")


@dataclass(frozen=True)
class Tokens:
    """Filled by `read_tokens`."""

    ids: torch.Tensor  # int64 [T]
    # "tokenizer", or "bytes": the checkpoint has none, and its perplexity means nothing.
    source: str


def read_tokens(model: Path, text_file: Path | None, limit: int, vocab_size: int) -> Tokens:
    """The text's first `limit` tokens by the checkpoint's own tokenizer.

    Without one, its UTF-8 bytes modulo the vocabulary stand for tokens: enough to compare formats. Raises
    UserError naming a file that can not be read or gives fewer than two tokens, CheckpointError as
    `read_tokenizer` and `read_vocabulary`.
    """
    path = text_file or BUNDLED_TEXT
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--text {path}: can not be read as UTF-8 text: {error}") from None
    tokenizer = _tokenizer(model)
    if tokenizer is not None:
        ids, source = tokenizer.encode(text).ids, "tokenizer"
    else:
        ids, source = [byte % vocab_size for byte in text.encode()], "bytes"
    ids = ids[:limit]
    if len(ids) < 2:
        raise UserError(f"--text {path}: {len(ids)} tokens; allowed: 2 or more")
    if max(ids) >= vocab_size:
        raise UserError(
            f"the tokenizer of {model} gives token {max(ids)}, but the vocabulary has {vocab_size} tokens"
        )
    return Tokens(torch.tensor(ids, dtype=torch.int64), source)


def _tokenizer(model: Path) -> Tokenizer | None:
    """As the gateway looks for it: beside the weights, else in a GGUF file; None: there is none."""
    path = companion_directory(model) / "tokenizer.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower one
            raise UserError(f"{path} is not a readable tokenizer: {error}") from None
    if not is_gguf(model):
        return read_vocabulary(model) if has_vocabulary(model) else None
    if "tokenizer.ggml.model" not in read_header(gguf_files(model)[0]).metadata:
        return None
    return read_tokenizer(model).backend
