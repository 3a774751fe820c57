"""How many tokens a text has at least, by its size alone: what can not fit is refused before tokenising."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import pre_tokenizers

# How much shorter a normaliser can make a text, in UTF-8 bytes; others (those that drop accents, say) have
# no bound. A Hangul syllable has 3 bytes, its parts 9; a mathematical letter 4, the letter it stands for 1.
_SHRINKING = {"NFC": 4, "NFD": 2, "NFKC": 12, "NFKD": 4, "Prepend": 1, "ByteLevel": 1}
# Pre-tokenisers that lose nothing, and those that lose white space.
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts", "Split"}
_DROPPING_SPACE = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}


@dataclass(frozen=True)
class TextSize:
    """Filled by `of` from a tokenizer's description."""

    # Longest text one token stands for, UTF-8 bytes; None: the tokenizer gives no bound.
    longest: int | None
    counts_space: bool  # whether white space takes tokens

    @classmethod
    def of(cls, backend: BackendTokenizer) -> TextSize:
        """Reads vocabulary, normaliser, pre-tokeniser and added tokens."""
        described: dict[str, Any] = json.loads(backend.to_str())
        shrinking = 1
        for stage in _stages(described["normalizer"], "normalizers"):
            factor = _shrinking(stage)
            if factor is None:
                return cls(None, True)
            shrinking *= factor
        counts_space = not any(token["lstrip"] or token["rstrip"] for token in described["added_tokens"])
        splits = _stages(described["pre_tokenizer"], "pretokenizers")
        for stage in splits:
            if stage["type"] in _DROPPING_SPACE:
                counts_space = False
            elif stage["type"] not in _KEEPING or stage.get("behavior") == "Removed":
                return cls(None, True)
        pieces = backend.get_vocab(with_added_tokens=False)
        in_bytes = any(stage["type"] == "ByteLevel" for stage in splits)
        if not _has_every_byte(pieces, in_bytes, bool(described["model"].get("byte_fallback"))):
            return cls(None, True)  # unknown text becomes one token, or none
        lengths = [len(piece) if in_bytes else len(piece.encode()) for piece in pieces]
        lengths += [len(token["content"].encode()) for token in described["added_tokens"]]
        return cls(max(lengths) * shrinking, counts_space)

    def least_tokens(self, text: str) -> int:
        """Tokens that `text` has at least."""
        if self.longest is None:
            return 0
        if self.counts_space:
            size = len(text) if text.isascii() else len(text.encode())
        else:
            size = sum(len(word.encode()) for word in text.split())
        return -(-size // self.longest)


def _stages(described: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The stages of a normaliser or pre-tokeniser, sequences opened."""
    if described is None:
        return []
    if described["type"] == "Sequence":
        return [stage for part in described[key] for stage in _stages(part, key)]
    return [described]


def _shrinking(stage: dict[str, Any]) -> int | None:
    """How much shorter this normaliser can make a text; None: no bound is known."""
    if stage["type"] == "Replace":
        pattern = stage["pattern"].get("String")
        if pattern and len(stage["content"].encode()) >= len(pattern.encode()):
            return 1
        return None
    return _SHRINKING.get(stage["type"])


def _has_every_byte(pieces: Mapping[str, int], in_bytes: bool, byte_fallback: bool) -> bool:
    """Whether any text has tokens; `in_bytes`: pieces spell bytes as byte-level vocabularies do."""
    if in_bytes:
        return all(letter in pieces for letter in pre_tokenizers.ByteLevel.alphabet())
    return byte_fallback and all(f"<0x{byte:02X}>" in pieces for byte in range(256))
