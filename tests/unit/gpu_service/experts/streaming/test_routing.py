"""Invariant: experts that earlier steps' rows chose are streamed first; even routing changes nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from gpu_service.experts.costs import CostCurve, ExpertCosts, LayerCosts
from gpu_service.experts.streaming.plan import SHARES, chosen_experts
from gpu_service.experts.streaming.routing import Counts, RecentRouting, count_chosen, covered
from tests.unit.gpu_service.experts.test_costs import COSTS, LAYER_BYTES

LAYERS, EXPERTS, TOP_K = (3, 4, 7), 64, 4
ALL = np.ones((len(LAYERS), EXPERTS), np.bool_)
HALF = SHARES // 2


def step(random: np.random.Generator, chances: np.ndarray, rows: int = 300) -> Counts:
    """Returns the counts of a step whose rows choose by these chances `[layers, experts]`."""
    scores = np.log(chances)[:, None] + random.gumbel(size=(len(LAYERS), rows, EXPERTS))
    ids = np.argpartition(-scores, TOP_K - 1, axis=2)[:, :, :TOP_K]
    return np.stack([np.bincount(layer.reshape(-1), minlength=EXPERTS) for layer in ids])


def zipf(random: np.random.Generator, power: float) -> np.ndarray:
    """In another order in each layer."""
    chances = np.arange(1.0, EXPERTS + 1) ** -power
    return np.stack([random.permutation(chances) for _ in LAYERS])


def test_ids_are_counted() -> None:
    """Ids are counted for each layer by itself; -1 is no expert."""
    ids = [torch.randint(-1, 5, (40, 3), dtype=torch.int32) for _ in LAYERS]
    found = count_chosen(ids, 5)
    for layer, chosen in enumerate(ids):
        wanted = Counter(chosen.reshape(-1).tolist())
        assert found[layer].tolist() == [wanted[expert] for expert in range(5)]


def test_even_routing_leaves_experts_side_by_side() -> None:
    """Chance is not taken for a preference, however many steps: runs stay long, plans are kept."""
    random = np.random.default_rng(1)
    routing = RecentRouting(LAYERS, EXPERTS, {})
    even = np.ones((len(LAYERS), EXPERTS))
    assert not any(routing.add(step(random, even, rows=60), ALL) for _ in range(200))
    assert chosen_experts(range(EXPERTS), HALF, routing.counts(4)) == tuple(range(EXPERTS // 2))
    assert routing.left()[HALF] == pytest.approx(0.5, abs=0.05)


def test_uneven_routing_is_followed() -> None:
    """After two steps most pairs are those of streamed experts; and again when routing has changed."""
    random = np.random.default_rng(2)
    routing = RecentRouting(LAYERS, EXPERTS, {})
    for _ in range(2):
        chances = zipf(random, 1.2)
        changes = [routing.add(step(random, chances), ALL) for _ in range(40)]
        assert any(changes[:6])
        assert sum(changes) < 8
        fresh = step(random, chances)
        order = np.array([routing.counts(layer) for layer in LAYERS], np.float64)
        assert covered(fresh, order, ALL)[HALF] > 0.85
        assert routing.left()[HALF] == pytest.approx(1 - covered(fresh, order, ALL)[HALF], abs=0.05)
        left = routing.left()
        assert (left[0], left[SHARES]) == (1.0, 0.0)
        assert list(left) == sorted(left, reverse=True)


def test_recorded_counts_are_where_it_begins() -> None:
    """Recorded counts serve the first step; experts that are not available are neither counted nor chosen."""
    random = np.random.default_rng(3)
    chances = zipf(random, 1.2)
    known = {layer: step(random, chances)[place].tolist() for place, layer in enumerate(LAYERS)}
    routing = RecentRouting(LAYERS, EXPERTS, known)
    assert [routing.counts(layer) for layer in LAYERS] == list(known.values())
    available = ALL.copy()
    available[:, :10] = False
    routing.add(step(random, chances), available)
    assert routing.left()[0] == 1.0
    assert routing.left()[SHARES] == 0.0
    assert not routing.add(np.where(available, 0, 5), available)


def test_costs_know_what_is_left_to_servers() -> None:
    """Even routing costs as before; where few pairs are left, servers get more experts and a layer takes
    less.
    """
    even = tuple(1 - share / SHARES for share in range(SHARES + 1))
    for rows in (1, 100, 512, 4096):
        for share in (0, 1, HALF, SHARES):
            wanted = COSTS.parts(rows, share)
            assert LayerCosts(COSTS.copy, COSTS.cpu, COSTS.gpu, left=even).parts(
                rows, share
            ) == pytest.approx(wanted)
    uneven = LayerCosts(COSTS.copy, COSTS.cpu, COSTS.gpu, left=tuple(part**4 for part in even))
    share = uneven.best_share(512)
    assert 0 < share < COSTS.best_share(512)
    assert uneven.seconds(512, share) < 0.75 * COSTS.seconds(512, COSTS.best_share(512))
    # What serving corrects keeps what is known of routing.
    costs = ExpertCosts(128, 8)
    costs.measured(COSTS, LAYER_BYTES)
    costs.routed(uneven.left)
    costs.observe(512, share, 1.0, 0.1, 1e6)
    assert costs.layer is not None
    assert costs.layer.left == uneven.left
    assert CostCurve.of([(100, 1.0), (200, 2.0)]).at(150.5) == pytest.approx(1.505)


def test_who_has_had_no_rows_is_expected_to_have_none() -> None:
    """Not before a step has shown anything, nor in a step of enough more rows that it may have some; and
    experts that are resident count as chosen, though they are never streamed.
    """
    random = np.random.default_rng(4)
    routing = RecentRouting(LAYERS, EXPERTS, {})
    assert not routing.unrouted(300 * TOP_K).any()
    chances = np.ones((len(LAYERS), EXPERTS))
    chances[:, 40:] = 1e-9
    available = ALL.copy()
    available[:, :30] = False
    for _ in range(3):
        routing.add(step(random, chances), available)
    found = routing.unrouted(300 * TOP_K)
    assert not found[:, 30:40].any()
    assert found[:, 40:].all()
    assert not routing.unrouted(100 * 300 * TOP_K).any()
    # Two rows are not likely to choose one of 40 experts.
    assert routing.unrouted(2 * TOP_K)[:, 30:].all()
