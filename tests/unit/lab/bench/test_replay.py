"""Guards `moebius bench replay`: the choices it draws and reads, its strategies, and what it counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from app.cli import app
from gpu_service.experts.fetching.kernels import TorchFetchKernels
from gpu_service.experts.fetching.slots import IN_SLOTS, LEFT, make_state
from gpu_service.experts.resident.panels import layer_format
from lab.bench.replay.fetch_slots import FetchSlots
from lab.bench.replay.routing import Counts, RandomRouting, Routing, recorded_routing, rows_that_chose
from lab.bench.replay.run import STATIC, STRATEGIES, Point, ReplayOptions, make_strategy, run
from lab.bench.replay.simulate import recovery, replay
from lab.bench.replay.strategies import Costs
from lab.random_model.topics import Topics
from lab.random_model.values import wanted_shares
from moebius.errors import UserError
from moebius.experts.placement import ExpertStatistics

COSTS = Costs(125e9, 50e9, 2_650_000, 72e-6, 4.0)
# Of 6 layers, with as much time between two looks at the counts as with 48.
SLOW = Costs(125e9 / 8, 50e9, 2_650_000, 8 * 72e-6, 4.0)
SMALL = RandomRouting(layers=3, num_experts=32, top_k=4, exponents=(1.0,))


def test_random_choices_have_their_skew_and_overlap() -> None:
    """Shares follow the law that routers of `models random` are fitted to, neighbours share as asked."""
    counts = RandomRouting(2, 64, 4, (1.0,)).counts(6000, 1)
    assert (counts.sum(axis=2) == 4).all()
    shares = np.sort(counts.mean(axis=0), axis=1)[:, ::-1].mean(axis=0)
    assert shares[:8] == pytest.approx(wanted_shares(64, 4, 1.0)[:8], rel=0.1)
    for overlap in (20, 40):
        chosen = RandomRouting(2, 64, 4, (0.0,), Topics(overlap, 32)).counts(6000, 1) > 0
        assert (chosen[1:] & chosen[:-1]).sum() / chosen[1:].sum() == pytest.approx(overlap / 100, abs=0.03)


def test_streams_have_topics_of_their_own_and_changes_other_favourites() -> None:
    """Rows of a step add up; after a change other experts are chosen most."""
    counts = RandomRouting(2, 64, 4, (1.2,), phases=2).counts(2000, 3)
    assert (counts.sum(axis=2) == 12).all()
    first, second = (np.argsort(-part.sum(axis=0), axis=1)[:, :6] for part in (counts[:1000], counts[1000:]))
    assert all(len(set(a) & set(b)) < 5 for a, b in zip(first.tolist(), second.tolist(), strict=True))


def test_recorded_choices_are_replayed(tmp_path: Path) -> None:
    """A file of `experts record` in its order; streams are consecutive parts. Others are refused by name."""
    ids = np.random.default_rng(1).permuted(np.tile(np.arange(8, dtype=np.int16), (11, 2, 1)), axis=2)[
        ..., :2
    ]
    counts = np.stack([np.bincount(ids[:, layer].ravel(), minlength=8) for layer in range(2)])
    distinct = (counts > 0).sum(axis=1)
    path = tmp_path / "trace.safetensors"
    made = ExpertStatistics("m", 8, 2, (0, 1), "per_token", 11, 11, counts, distinct, token_ids=ids)
    path.write_bytes(made.encode("safetensors"))
    routing = recorded_routing(path)
    one, two = routing.counts(1), routing.counts(2)
    assert (one.shape, two.shape) == ((11, 2, 8), (5, 2, 8))
    assert set(np.flatnonzero(one[3, 1])) == set(ids[3, 1].tolist())
    assert (two[4] == one[4] + one[9]).all()
    with pytest.raises(UserError, match="11 tokens, too few for --streams 8"):
        routing.counts(8)
    path.write_bytes(
        ExpertStatistics("m", 8, 2, (0, 1), "stat", 11, 11, counts, distinct).encode("safetensors")
    )
    with pytest.raises(UserError, match="has no choices of tokens"):
        recorded_routing(path)


def test_ids_that_are_no_experts_are_left_out() -> None:
    """Padding of a record is no choice."""
    assert rows_that_chose(np.array([[[0, 2]], [[2, -1]]]), 3).tolist() == [[1, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ratio", [0, 30, 100])
def test_strategies_keep_to_their_slots(name: str, ratio: int) -> None:
    """Whatever is exchanged, no more experts are resident than slots are paid for; time follows reads."""
    counts = SMALL.counts(1500, 2)
    strategy = make_strategy(name, ratio, counts, 300, 4, COSTS, 42)
    slots = strategy.resident.sum()
    assert slots == round(ratio / 100 * strategy.resident.size) or name == "lru"
    found = replay(counts, strategy, COSTS, 300, 4)
    assert strategy.resident.sum() <= slots
    if ratio == 0:
        distinct = (counts[300:] > 0).sum() / 1200
        seconds = 3 * COSTS.layer_s + distinct * COSTS.read_s
        assert found.tokens_per_second == pytest.approx(2 / seconds)
    elif ratio == 100:
        assert (found.hit_rate, found.exchanges_per_step) == (1.0, 0.0)
    elif name not in ("uniform", "random", "front-loading"):
        assert found.hit_rate > 0.5


def speeds_of(names: Sequence[str], ratio: int, counts: Counts, top_k: int, costs: Costs) -> dict[str, float]:
    """Returns the tokens per second by strategy; a quarter of the steps does not count."""
    settle = len(counts) // 4
    return {
        name: replay(
            counts, make_strategy(name, ratio, counts, settle, top_k, costs, 42), costs, settle, top_k
        ).tokens_per_second
        for name in names
    }


def test_the_list_of_the_very_steps_bounds_other_lists() -> None:
    """`frequency` knows what comes: no list that stays is faster."""
    counts = SMALL.counts(3000, 1)
    speeds = {
        name: replay(
            counts, make_strategy(name, 25, counts, 600, 4, COSTS, 42), COSTS, 600, 4
        ).tokens_per_second
        for name in STATIC
    }
    assert max(speeds, key=lambda name: speeds[name]) == "frequency"


@pytest.mark.parametrize(
    ("exponent", "overlap"), [pytest.param(1.2, 0, marks=pytest.mark.full), (1.2, 45), (0.0, 45)]
)
def test_adaptive_loses_to_no_list(exponent: float, overlap: int) -> None:
    """The engine's policy is as fast as the best list that stays, within what the list gains from knowing so
    few steps in advance; where neighbours share experts without a skew, it is faster.
    """
    counts = RandomRouting(6, 128, 8, (exponent,), Topics(overlap, 64), seed=3).counts(6000, 1)
    for ratio in (10, 50):
        speeds = speeds_of(("uniform", "recorded", "frequency", "adaptive"), ratio, counts, 8, SLOW)
        assert speeds["adaptive"] > 0.96 * speeds["frequency"]
        assert speeds["adaptive"] > 0.98 * max(speeds["uniform"], speeds["recorded"])
        if exponent == 0.0:
            assert speeds["adaptive"] > 1.02 * speeds["frequency"]


@pytest.mark.parametrize(("exponent", "streams"), [(0.0, 1), (0.0, 8), (1.2, 1), (1.2, 8)])
def test_adaptive_loses_little_where_steps_fetch(exponent: float, streams: int) -> None:
    """Fetch slots hold what neighbours share: copies for it would bring nothing, and hardly any are made."""
    costs = replace(SLOW, fetch_slots=32)
    counts = RandomRouting(6, 128, 8, (exponent,), Topics(45, 64), seed=3).counts(3000, streams)
    for ratio in (10, 30):
        speeds = speeds_of(("uniform", "recorded", "adaptive"), ratio, counts, 8, costs)
        assert speeds["adaptive"] > 0.97 * speeds["uniform"]
        if streams == 8:
            assert speeds["adaptive"] > 1.02 * speeds["uniform"]


def test_fetch_slots_follow_the_rule_of_the_kernels() -> None:
    """Random steps leave the same experts in slots as the kernels' reference, which copies as many."""
    rng, rows, experts, slots = np.random.default_rng(7), 16, 32, 6
    kind = layer_format("int8", "int8", 32, 32, False)
    layer = make_state({0: [kind]}, slots, experts, {0: 0.0}, torch.device("cpu")).layers[0]
    layer.addresses.fill_(1)
    # 1.2 copies beside servers take as long as 3 reads.
    layer.prices.copy_(torch.tensor([1.0, 3.0]))
    kernels, simulated = TorchFetchKernels(), FetchSlots(1, experts, slots, 1.0, 2.5)
    for _ in range(20):
        ids = np.array([rng.choice(experts // 2, 3, replace=False) for _ in range(rows)], np.int32)
        ids[rng.random(ids.shape) < 0.7] = -1
        chosen = np.bincount(ids[ids >= 0], minlength=experts)
        kernels.choose(layer, torch.from_numpy(ids))
        copied, seconds = simulated.step(chosen[None], rows)
        held = layer.slot_of_expert.numpy() >= 0
        assert (simulated._held[0] == held).all()
        assert copied == int(layer.coming[0])
        assert seconds == pytest.approx(max(np.count_nonzero(chosen[~held]), 3.0 * copied))
    in_slots, left = int(layer.counters[IN_SLOTS]), int(layer.counters[LEFT])
    assert 0.2 < simulated.share < 1.0
    assert simulated.share == pytest.approx(in_slots / (in_slots + left), abs=0.1)


def test_adaptive_recovers_from_a_change() -> None:
    """Other experts become the favourites: the hit rate is back within the tokens of 30 s."""
    counts = RandomRouting(6, 128, 8, (1.2,), phases=2, seed=3).counts(8000, 1)
    found = replay(counts, make_strategy("adaptive", 20, counts, 1500, 8, SLOW, 42), SLOW, 1500, 8, 2)
    assert found.recovery_tokens is not None
    assert found.recovery_tokens < 3000
    static = replay(counts, make_strategy("recorded", 20, counts, 1500, 8, SLOW, 42), SLOW, 1500, 8, 2)
    assert static.hit_rate < found.hit_rate


def test_layers_of_unequal_skew_share_slots_by_what_they_save() -> None:
    """A start that knows the last run's choices serves faster than one with equal numbers, from then on."""
    counts = RandomRouting(6, 128, 8, (0.0, 1.6), seed=3).counts(6000, 1)
    speeds = speeds_of(("adaptive", "adaptive-warm"), 30, counts, 8, SLOW)
    assert speeds["adaptive-warm"] > 1.02 * speeds["adaptive"]


def test_recovery_is_found_in_hit_rates() -> None:
    """From the change until a window's mean is at 95 % of what the phase ends with."""
    rates = np.concatenate([np.full(1000, 0.8), np.full(300, 0.1), np.full(700, 0.6)])
    found = recovery(rates, 2)
    assert found is not None
    assert 280 <= found <= 300
    assert recovery(rates, 1) is None


def test_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line per share; each point's ratio is to the best list."""
    routing = Routing("small", 4, lambda streams: SMALL.counts(600, streams))
    path = tmp_path / "points.json"
    points = run(ReplayOptions([routing], (1,), ("uniform", "frequency", "lru"), (0, 50)), COSTS, path)
    assert "small, streams: 1, steps: 600" in (printed := capsys.readouterr().out)
    assert "| 50 % |" in printed
    assert len(points) == len(json.loads(path.read_text())["points"]) == 6
    best: dict[int, list[Point]] = {
        ratio: [p for p in points if p.ratio_percent == ratio and p.strategy != "lru"] for ratio in (0, 50)
    }
    assert all(max(p.of_best_static for p in each) == 1.0 for each in best.values())
    with pytest.raises(UserError, match="--strategies: lru is not allowed"):
        run(ReplayOptions([routing], strategies=("lru",)), COSTS)


def test_the_command_line_draws_and_refuses(tmp_path: Path) -> None:
    """Options become routers and costs; what cannot be is one line that says what is allowed."""
    small = ["replay", "--layers", "2", "--experts", "16", "--top-k", "2", "--steps", "256", "--streams", "1"]
    path = tmp_path / "points.json"
    arguments = [
        *small,
        "--ratios",
        "0,50",
        "--overlap",
        "0",
        "--skew",
        "zipf:0.5,zipf:1",
        "--copy-reads",
        "2",
    ]
    result = CliRunner().invoke(app, ["bench", *arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert len(document["points"]) == 2 * len(STRATEGIES)
    assert document["costs"]["copy_price"] == 2.0
    assert document["points"][0]["routing"].startswith("skew zipf:0.5,zipf:1, overlap 0 %")
    for changed, message in (
        (["--overlap", "99"], "--overlap: 99 is not allowed"),
        (["--top-k", "17"], "--top-k: 17 is not allowed; allowed: 1 to 16"),
        (["--ratios", "101"], "--ratios: '101' is not allowed"),
        (["--strategies", "best"], "--strategies: best is not allowed"),
        (["--trace", str(tmp_path / "none")], "none cannot be read"),
    ):
        refused = CliRunner().invoke(app, ["bench", *small, *changed])
        assert isinstance(refused.exception, UserError)
        assert message in str(refused.exception)
