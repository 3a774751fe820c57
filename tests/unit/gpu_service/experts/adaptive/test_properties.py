"""Invariant: whatever happens while experts change slots, a step computes each expert that a row chose once,
on the GPU from its own weights or on an expert server, and no slot is written while a step may read it.

Exchanges by random wishes and by the engine's own placement, evictions after damage, requests that end in
between, steps of a prefill lane, expert servers that are lost with steps in flight and come back with other
segments; on a simulated device whose streams advance at random. 10^4 steps, 10^5 with --full.
"""

from __future__ import annotations

import pytest

from gpu_service.experts.adaptive import placement as placement_module
from gpu_service.experts.costs import ExpertCosts
from gpu_service.experts.resident.experts import check_slots
from tests.helpers.exchanging_engine import Engine

STEPS, WORLDS, FULL_WORLDS = 500, 10, 200


@pytest.mark.parametrize(
    "seed",
    [
        *range(WORLDS),
        *(pytest.param(seed, marks=pytest.mark.full) for seed in range(WORLDS, FULL_WORLDS)),
    ],
)
def test_every_expert_is_computed_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expert is computed once in every step, also one that was launched again; and all slots are whole
    in the end.
    """
    monkeypatch.setattr(ExpertCosts, "copy_price", lambda costs, nbytes: 0.1)
    monkeypatch.setattr(placement_module, "READ_EVERY_S", 0.0)
    monkeypatch.setattr(placement_module, "_CAREFUL_S", 0.01)
    engine = Engine(seed)
    for _ in range(STEPS):
        engine.step()
        assert engine.wrong == []
    engine.end()
    assert engine.ended > STEPS // 2
    assert engine.exchanges.count > 5
    for layer, slots in engine.resident.slots.items():
        check_slots(layer, slots)
