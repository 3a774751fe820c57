"""Tokenizers of checkpoints that hold `tiktoken.model` and no tokenizer.json: Kimi-K2 and Kimi-K2.5.

A line of the file is a token's bytes in base64 and its rank, which is its id. Text is cut as the family's
code says (tokenization_kimi.py); a piece that is a token is taken whole, else its bytes are joined by rank.
After the ranks come special tokens, named in tokenizer_config.json or reserved.
"""

from __future__ import annotations

import base64
import binascii
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from moebius.checkpoint.byte_level import bytes_to_piece
from moebius.checkpoint.config_file import read_config_file
from moebius.checkpoint.errors import CheckpointError, refuse_pointer
from moebius.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS

FILE = "tiktoken.model"
# By model_type: a row of `PRE_TOKENIZERS`.
_CUTS: Mapping[str, str] = {"kimi_k2": "kimi-k2", "kimi_k25": "kimi-k2"}
# Special tokens after the ranks, whether they have names or not; the family's code counts two more than its
# models have rows for.
_NUM_SPECIAL = 258


def has_vocabulary(directory: Path) -> bool:
    """Returns whether the checkpoint has such a file."""
    return (directory / FILE).is_file()


def read_vocabulary(directory: Path) -> Tokenizer:
    """Returns the tokenizer of a checkpoint that has one.

    Raises CheckpointError naming the file and what is wrong with it, or the family if its way of cutting text
    is not known.
    """
    config = read_config_file(directory)
    model_type = str(config.get("model_type"))
    if model_type not in _CUTS:
        raise CheckpointError(
            f"{directory / FILE}: how model_type {model_type!r} cuts text is not known (allowed: "
            f"{', '.join(_CUTS)}); put a tokenizer.json next to it"
        )
    ranks = _read_ranks(directory / FILE)
    pieces = {bytes_to_piece(token): rank for token, rank in ranks.items()}
    merges = [(bytes_to_piece(left), bytes_to_piece(right)) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[_CUTS[model_type]].splitter
    tokenizer.decoder = decoders.ByteLevel()
    last = min(len(ranks) + _NUM_SPECIAL, int(config.get("vocab_size") or sys.maxsize))
    special = _special_tokens(directory / "tokenizer_config.json", range(len(ranks), last))
    tokenizer.add_tokens(list(special.values()))
    for number, token in special.items():
        if tokenizer.token_to_id(token.content) != number:
            raise CheckpointError(f"{directory}: special token {token.content!r} cannot have id {number}")
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Returns the ids by token. Raises CheckpointError for a line that is none, or ids with a gap."""
    refuse_pointer(path)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines()):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(f"{path}, line {number + 1}: not a token and its rank ({error})") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path}: ranks are not the numbers from 0 to {len(ranks) - 1}, each once")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yields all pairs of tokens that make a token, those of the lowest rank first."""
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _special_tokens(path: Path, numbers: range) -> dict[int, AddedToken]:
    """Returns the tokens by id, ascending, for each of `numbers`. Raises CheckpointError naming the file."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        named = {int(number): token for number, token in content.get("added_tokens_decoder", {}).items()}
        return {
            number: AddedToken(
                named[number]["content"] if number in named else f"<|reserved_token_{number}|>",
                special=bool(named.get(number, {}).get("special", True)),
                normalized=False,
            )
            for number in numbers
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} does not name special tokens by id: {error}") from error
