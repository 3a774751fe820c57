"""When an engine reads the tokenizer that it enforces constraints with."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_service.core.constraint import make_compiler
from moebius.errors import UserError
from moebius.grammar.errors import GrammarError
from protos.engine_pb2 import Constraint
from tests.helpers.tiny_tokenizer import byte_level_tokenizer

DIGITS = Constraint(regex="[0-9]+")


def test_a_tokenizer_that_may_wait_is_read_for_the_first_constraint(tmp_path: Path) -> None:
    """With `confirm` nothing is read at the start; the first constraint reads, and enforces the same; files
    that have changed by then are refused with what `confirm` says, and asked about again the next time."""
    byte_level_tokenizer(300).save(str(tmp_path / "tokenizer.json"))
    changes = ["tokenizer.json has changed"]

    def confirm() -> None:
        if changes:
            raise UserError(changes.pop())

    waiting = make_compiler(tmp_path, 300, {2}, confirm)
    at_once = make_compiler(tmp_path, 300, {2})
    assert waiting is not None
    assert at_once is not None
    assert "_tokenizer" not in vars(waiting)
    assert "_tokenizer" in vars(at_once)
    with pytest.raises(GrammarError, match=r"no tokenizer: .*tokenizer\.json has changed"):
        waiting.make(DIGITS)
    (later,), (now,) = waiting.make(DIGITS), at_once.make(DIGITS)
    assert later.num_words == now.num_words
    assert later.matcher is not None
    assert now.matcher is not None
    assert later.matcher.compute_bitmask() == now.matcher.compute_bitmask()


def test_without_a_tokenizer_there_is_no_compiler(tmp_path: Path) -> None:
    """Whether it may wait or not: what a request is answered does not depend on the device."""
    assert make_compiler(tmp_path, 300, {2}) is None
    assert make_compiler(tmp_path, 300, {2}, lambda: None) is None
