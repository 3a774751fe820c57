"""Invariant: the warm-up runs every kernel and wrapper that a service can meet, on the dummy page only."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention.flashinfer_backend import FlashInferAttention
from gpu_service.attention.registry import make_attention
from gpu_service.attention.triton_backend import TritonAttention
from gpu_service.attention.warm_up import warm_up_attention, warm_up_steps
from tests.helpers import fake_attention_library
from tests.helpers.attention_cases import Geometry, make_case

CAPACITY = 40


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_only_the_dummy_page_is_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(Geometry(page_size=8), [(60, 1)])
    for layer in range(case.cache.num_layers):
        case.cache.pages(layer)[1:] = 7.0
    config = case.geometry.config()
    kinds = set()
    if name == "triton":
        attention = TritonAttention(config.layers, case.cache, min_split=16)
        partial_of = attention._partial_of
        prepare = attention._prepare

        def watch_splits(*arguments: Any) -> Any:
            found = partial_of(*arguments)
            kinds.add((True, attention._has_chunks, found is None))
            return found

        def watch(*arguments: Any) -> None:
            prepare(*arguments)
            if not attention._has_decodes:
                kinds.add((False, attention._has_chunks, True))

        monkeypatch.setattr(attention, "_partial_of", watch_splits)
        monkeypatch.setattr(attention, "_prepare", watch)
        warm_up_attention(attention, CAPACITY)
        # Decodes in one piece and in splits, alone and with chunks; chunks alone.
        assert {(True, False, True), (True, False, False), (True, True, False)} <= kinds
        assert any(chunks and not decodes for decodes, chunks, _ in kinds)
    else:
        warm_up_attention(make_attention(config.layers, case.cache, "cpu"), CAPACITY)
    assert all((case.cache.pages(layer)[1:] == 7.0).all() for layer in range(case.cache.num_layers))


def test_every_wrapper_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_attention_library)
    case = make_case(Geometry(page_size=8), [(3, 1)])
    attention = FlashInferAttention(
        case.geometry.config().layers, case.cache, events=fake_attention_library.FakeEvent
    )
    warm_up_attention(attention, CAPACITY)
    assert all(wrapper.num_plans > 1 for wrapper in (attention._decode, attention._paged, attention._ragged))
    fake_attention_library.run_copies()


@pytest.mark.parametrize("capacity", [2, 9, 5000, 40960])
def test_steps_fit_the_longest_sequence(capacity: int) -> None:
    steps = warm_up_steps(capacity)
    assert max(old + new for step in steps for old, new in step) <= capacity
    assert all(new >= 1 for step in steps for _, new in step)
    if capacity > 5000:
        assert any(old >= 4096 and new > 1 for step in steps for old, new in step)


def test_results_of_dummy_steps_are_finite() -> None:
    """A NaN here would be one that a padded row shows later."""
    case = make_case(Geometry(page_size=8), [(3, 1)])
    attention = make_attention(case.geometry.config().layers, case.cache, "cpu")
    outputs = []
    forward = attention.forward

    def keep(*arguments: torch.Tensor) -> torch.Tensor:
        outputs.append(forward(*arguments))  # type: ignore[arg-type]
        return outputs[-1]

    attention.forward = keep  # type: ignore[assignment, method-assign]
    warm_up_attention(attention, CAPACITY)
    assert len(outputs) == len(warm_up_steps(CAPACITY))
    assert all(output.isfinite().all() for output in outputs)
