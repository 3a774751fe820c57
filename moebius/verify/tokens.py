"""What is computed: the bundled text, or a user's, in the model's own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from moebius.errors import UserError

BUNDLED_TEXT = Path(__file__).with_name("text.txt")


@dataclass(frozen=True)
class Tokens:
    """Filled by `read_tokens`."""

    ids: torch.Tensor  # int64 [T]
    # "tokenizer", or "bytes": the checkpoint has none, and its perplexity means nothing.
    source: str


def read_tokens(directory: Path, text_file: Path | None, limit: int, vocab_size: int) -> Tokens:
    """The text's first `limit` tokens by the checkpoint's tokenizer.json.

    Without one, its UTF-8 bytes modulo the vocabulary stand for tokens: enough to compare formats. Raises
    UserError naming a file that can not be read, or that gives fewer than two tokens.
    """
    path = text_file or BUNDLED_TEXT
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--text {path}: can not be read as UTF-8 text: {error}") from None
    vocabulary = directory / "tokenizer.json"
    if vocabulary.is_file():
        ids, source = _encode(vocabulary, text), "tokenizer"
    else:
        ids, source = [byte % vocab_size for byte in text.encode()], "bytes"
    ids = ids[:limit]
    if len(ids) < 2:
        raise UserError(f"--text {path}: {len(ids)} tokens; allowed: 2 or more")
    if max(ids) >= vocab_size:
        raise UserError(
            f"{vocabulary} gives token {max(ids)}, but the model's vocabulary has {vocab_size} tokens"
        )
    return Tokens(torch.tensor(ids, dtype=torch.int64), source)


def _encode(vocabulary: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(vocabulary))
    except Exception as error:  # the library raises no narrower one
        raise UserError(f"{vocabulary} is not a readable tokenizer: {error}") from None
    ids: list[int] = tokenizer.encode(text).ids
    return ids
