"""Guards what is sampled of rows' choices: those of the step's own rows, by place, in two of eight steps."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any, cast

import pytest
import torch

from gpu_service.core.step import ForwardInputs
from gpu_service.experts.choice_samples import SAMPLED_EVERY, ChoiceSamples

_EXPERTS, _TOP_K, _MOST_ROWS = 10, 2, 4


class Rows:
    """The part of a step's inputs that is asked for."""

    def __init__(self, rows: int, is_uniform_decode: bool = True) -> None:
        self.query_start_loc = list(range(rows + 1))
        self.is_uniform_decode = is_uniform_decode


def step(rows: int, **options: bool) -> ForwardInputs:
    """Returns a step of decoding rows."""
    return cast(Any, Rows(rows, **options))


def samples(*layers: int) -> ChoiceSamples:
    """Returns those of a rank with these layers."""
    return ChoiceSamples(layers, _EXPERTS, _TOP_K, _MOST_ROWS, torch.device("cpu"))


def ids(*rows: tuple[int, int]) -> torch.Tensor:
    """Returns int32 `[T, 2]`."""
    return torch.tensor(rows, dtype=torch.int32)


def test_choices_are_those_of_the_step_by_place() -> None:
    """All, those that are not resident and those left to servers, of as many rows as the step has; choices
    without weights are none. Later notes do not change what was taken."""
    found = samples(3)
    found.note(3, ids((9, 9), (9, 9), (9, 9)), None, None)
    found.note(3, ids((1, 2), (3, 12)), ids((1, -1), (3, 12)), ids((-1, -1), (3, -1)))
    taken = found.take(step(2))
    found.note(3, ids((0, 0), (0, 0)), None, None)
    assert taken is not None
    expected = [[[[1, 2], [3, -1]]], [[[1, -1], [3, -1]]], [[[-1, -1], [3, -1]]]]
    assert taken.tolist() == expected
    found.note(3, ids((4, 5)), None, None)
    for _ in range(SAMPLED_EVERY - 2):
        assert found.take(step(1)) is None
    again = found.take(step(1))
    assert again is not None
    assert again.tolist() == [[[[4, 5]]], [[[-1, -1]]], [[[-1, -1]]]]


def test_host_kernels_write_where_choices_are_read() -> None:
    """What is at the address of a layer counts as left to servers, of the rows that were written."""
    found = samples(0, 7)
    address = found.address(7, 2, _TOP_K)
    assert address is not None
    (ctypes.c_int32 * 4).from_address(address)[:] = [1, 2, 3, 4]
    found.serve(7, 2)
    taken = found.take(step(2))
    assert taken is not None
    assert taken[:, 1].tolist() == [[[1, 2], [3, 4]]] * 3
    assert taken[:, 0].tolist() == [[[-1, -1], [-1, -1]]] * 3
    assert found.address(1, 2, _TOP_K) is None
    assert found.address(7, 2, _TOP_K + 1) is None
    assert found.address(7, _MOST_ROWS + 1, _TOP_K) is None


@pytest.mark.parametrize("count", [1, 3, 4, 48])
def test_few_layers_are_sampled_all_over_the_model(count: int) -> None:
    """At most four, none twice, in order."""
    layers = samples(*range(1, 1 + count)).layers
    assert len(layers) == min(4, count)
    assert list(layers) == sorted(set(layers))
    assert layers[0] <= 1 + count / len(layers)
    assert layers[-1] > count - count / len(layers)


def test_two_of_eight_decode_steps_are_sampled_and_no_others() -> None:
    """Two that follow each other; prompts and steps of too many rows are neither sampled nor counted."""
    found = samples(0)
    taken = []
    for _ in range(2 * SAMPLED_EVERY):
        assert found.take(step(1, is_uniform_decode=False)) is None
        assert found.take(step(_MOST_ROWS + 1)) is None
        taken.append(found.take(step(_MOST_ROWS)) is not None)
    assert sum(taken) == 4
    assert any(one and other for one, other in itertools.pairwise(taken))


def test_what_does_not_fit_is_left_out() -> None:
    """Layers that are not sampled, other numbers of experts a row and large steps change nothing."""
    found = samples(0)
    found.note(0, ids((1, 2)), ids((1, 2)), ids((1, 2)))
    found.note(5, ids((8, 8)), None, None)
    found.note(0, torch.zeros((1, 3), dtype=torch.int32), None, None)
    found.note(0, torch.zeros((_MOST_ROWS + 1, _TOP_K), dtype=torch.int32), None, None)
    taken = found.take(step(1))
    assert taken is not None
    assert taken.tolist() == [[[[1, 2]]]] * 3
