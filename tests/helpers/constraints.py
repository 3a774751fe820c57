"""Constraints on the fake model: a tokenizer of its 97 tokens, each a character, and constrained requests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gpu_service.core.constraint import ConstraintCompiler
from gpu_service.core.request import Request
from moebius.checkpoint.byte_level import bytes_to_piece
from protos.engine_pb2 import Constraint
from tests.helpers.engine_harness import make_request
from tests.helpers.fake_model import VOCAB
from tests.helpers.tiny_tokenizer import byte_level_tokenizer

EOS = 0
# Token 1 is a space, 95 is `~`, 96 a line break.
_CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]


def character_tokenizer() -> Tokenizer:
    """Token 0 ends outputs, each other one is a character."""
    vocabulary = {"<eos>": EOS} | {
        bytes_to_piece(character.encode()): 1 + number for number, character in enumerate(_CHARACTERS)
    }
    assert len(vocabulary) == VOCAB
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    return tokenizer


def new_compiler() -> ConstraintCompiler:
    """For the fake model; it has compiled nothing, and a test may set its attributes."""
    return ConstraintCompiler(character_tokenizer, VOCAB, frozenset({EOS}))


@functools.cache
def compiler() -> ConstraintCompiler:
    """Returns the one that all tests of a process share."""
    return new_compiler()


def ids_of(text: str) -> list[int]:
    """Returns the tokens of a text."""
    return [1 + _CHARACTERS.index(character) for character in text]


def text_of(token_ids: list[int]) -> str:
    """Returns what tokens spell; the end of the output spells nothing."""
    return "".join(_CHARACTERS[token - 1] for token in token_ids if token != EOS)


def constrained(name: str, prompt: list[int], constraint: Constraint, **params: Any) -> Request:
    """Returns a request whose output follows a constraint."""
    request = make_request(name, prompt, **{"max_tokens": 40, "ignore_eos": False, **params})
    (request.constraint,) = compiler().make(constraint)
    return request


@functools.cache
def byte_compiler(vocab_size: int) -> ConstraintCompiler:
    """For a tiny model, whose tokens are bytes and a few words."""
    return ConstraintCompiler(lambda: byte_level_tokenizer(300), vocab_size, frozenset({2}))


def constrain_some(requests: Sequence[Request], vocab_size: int) -> list[Request]:
    """Returns the same requests, every other one with a constraint: an endless text, or one after a short
    thought.
    """
    thought: dict[str, Any] = {"after_token_ids": [9], "max_reasoning_tokens": 3}
    sources = [Constraint(regex="[a-z ]{2,90}"), Constraint(regex="([A-F]{3}-)+", **thought)]
    for number, request in enumerate(requests[::2]):
        (request.constraint,) = byte_compiler(vocab_size).make(sources[number % 2])
    return list(requests)
