"""Small tokenizers as metadata of GGUF files, and files that hold nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer

from tests.helpers.tiny_tokenizer import BOS, CHAT_TEMPLATE, EOS, PAD


def _describe(
    writer: GGUFWriter, model: str, tokens: list[str], types: list[int], values: dict[str, Any]
) -> None:
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_chat_template(CHAT_TEMPLATE)


def _write(path: Path, model: str, tokens: list[str], types: list[int], values: dict[str, Any]) -> Path:
    writer = GGUFWriter(path, "qwen3moe")
    _describe(writer, model, tokens, types, values)
    for name, token in (("bos", BOS), ("eos", EOS), ("pad", PAD)):
        if token in tokens:
            getattr(writer, f"add_{name}_token_id")(tokens.index(token))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _byte_level(tokenizer: Tokenizer) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their kinds, and merges."""
    content = json.loads(tokenizer.to_str())
    added = {entry["content"]: entry["special"] for entry in content["added_tokens"]}
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=lambda token: ids[token])
    kinds: dict[bool | None, int] = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED}
    types = [kinds.get(added.get(token), TokenType.NORMAL) for token in tokens]
    return tokens, types, [" ".join(pair) for pair in content["model"]["merges"]]


def write_byte_level(path: Path, tokenizer: Tokenizer, pre: str, **values: Any) -> Path:
    """Returns the vocabulary and merges of a byte-level tokenizer under the name of a way to cut text."""
    tokens, types, merges = _byte_level(tokenizer)
    return _write(path, "gpt2", tokens, types, {"tokenizer_pre": pre, "token_merges": merges} | values)


def add_byte_level(writer: GGUFWriter, tokenizer: Tokenizer, pre: str, vocab_size: int) -> None:
    """The same with a model's other metadata, which names the special tokens; unused ones fill up."""
    tokens, types, merges = _byte_level(tokenizer)
    unused = [f"[PAD{number}]" for number in range(len(tokens), vocab_size)]
    types += [TokenType.UNUSED] * len(unused)
    _describe(writer, "gpt2", tokens + unused, types, {"tokenizer_pre": pre, "token_merges": merges})


def write_sentencepiece(path: Path, words: list[str], **values: Any) -> Path:
    """Pieces with scores, bytes for what they do not cover; longer pieces score better."""
    characters = sorted(set("".join(words)) | {"\u2581"})
    starts = {word[:end] for word in words for end in range(2, len(word) + 1)}
    tokens = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    tokens += sorted(starts, key=lambda word: (len(word), word))
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    types = [*kinds, *[TokenType.NORMAL] * (len(tokens) - len(kinds))]
    scores = [float(-number) for number in range(len(tokens))]
    return _write(path, "llama", tokens, types, {"token_scores": scores, "unk_token_id": 0} | values)
