"""Guards static placement: exact counts, no expert twice, more keeps what less had, clear errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.config import PlacementConfig
from moebius.errors import UserError
from moebius.experts.placement import (
    ExpertStatistics,
    Placement,
    format_layers,
    make_placement,
    parse_layers,
    spread,
)
from moebius.experts.slices import ExpertSlice
from moebius.models.geometry import MoeGeometry

STATIC = ("uniform", "front-loading", "random")


def geometry(moe_layers: tuple[int, ...] = (1, 2, 4, 5), num_experts: int = 12) -> MoeGeometry:
    """Returns six layers, four of them MoE."""
    return MoeGeometry("qwen3_moe", 48, 6, moe_layers, num_experts, 3, 20, "silu", "float32")


def statistics(model: MoeGeometry, seed: int = 0, **changes: Any) -> ExpertStatistics:
    """Random counts, all different."""
    shape = (len(model.moe_layers), model.num_experts)
    counts = np.random.default_rng(seed).permutation(shape[0] * shape[1]).reshape(shape).astype(np.int64)
    fields: dict[str, Any] = {
        "model_type": model.model_type,
        "num_experts": model.num_experts,
        "top_k": model.top_k,
        "layers": model.moe_layers,
        "mode": "stat",
        "steps": 4,
        "tokens": 9,
        "counts": counts,
        "distinct": counts.sum(1),
    }
    return ExpertStatistics(**(fields | changes))


def place(model: MoeGeometry, **placement: Any) -> Placement:
    """`make_placement` with settings spelled out."""
    return make_placement(PlacementConfig(**placement), model)


@settings(deadline=None)
@given(
    layers=st.sets(st.integers(0, 20), min_size=1, max_size=8),
    num_experts=st.integers(1, 40),
    ratios=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    strategy=st.sampled_from(STATIC),
)
def test_ratio_is_exact_and_grows_without_moving(
    layers: set[int], num_experts: int, ratios: tuple[float, float], strategy: Any
) -> None:
    """Any ratio gives its number of experts, twice the same ones, and a larger one contains a smaller one."""
    model = MoeGeometry("m", 8, 21, tuple(sorted(layers)), num_experts, 1, 8, "silu", "float32")
    less, more = (
        place(model, gpu_experts_ratio=ratio, placement_strategy=strategy) for ratio in sorted(ratios)
    )
    again = place(model, gpu_experts_ratio=max(ratios), placement_strategy=strategy)
    assert more == again
    assert more.count == round(max(ratios) * len(layers) * num_experts)
    for layer in model.moe_layers:
        assert len(set(more.resident[layer])) == len(more.resident[layer])
        assert set(less.resident[layer]) <= set(more.resident[layer])
        assert all(0 <= expert < num_experts for expert in more.resident[layer])
    sizes = [len(more.resident[layer]) for layer in model.moe_layers]
    if strategy == "uniform":
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("strategy", [*STATIC, "frequency"])
@pytest.mark.parametrize("count", [0, 1, 5, 12])
def test_counts_per_layer(strategy: str, count: int, tmp_path: Path) -> None:
    """`gpu_experts` holds in each layer; front-loading spends the same sum on the first layers."""
    model = geometry()
    file = tmp_path / "s.safetensors"
    file.write_bytes(statistics(model).encode("safetensors"))
    found = place(model, gpu_experts=count, placement_strategy=strategy, expert_statistics=str(file))
    assert found.count == 4 * count
    sizes = [len(found.resident[layer]) for layer in model.moe_layers]
    if strategy == "front-loading":
        assert sizes == [min(12, max(0, 4 * count - 12 * position)) for position in range(4)]
    else:
        assert sizes == [count] * 4


def test_ends_of_the_ratio() -> None:
    """0 is nothing at all and 1 everything."""
    for strategy in STATIC:
        assert place(geometry(), gpu_experts_ratio=0.0, placement_strategy=strategy).count == 0
        whole = place(geometry(), gpu_experts_ratio=1.0, placement_strategy=strategy)
        assert whole.covers_everything


def test_uniform_spreads_over_ids() -> None:
    """A quarter of a layer's experts leaves no gap wider than twice the mean."""
    found = place(geometry(num_experts=128), gpu_experts=32)
    for experts in found.resident.values():
        gaps = np.diff([*experts, experts[0] + 128])
        assert gaps.max() <= 8
    assert sorted(spread(13)) == list(range(13))


def test_frequency_takes_the_most_chosen(tmp_path: Path) -> None:
    """A number per layer takes them from each layer, a ratio from all layers together; either file form
    works.
    """
    model = geometry()
    recorded = statistics(model, seed=3)
    for form in ("safetensors", "json"):
        file = tmp_path / f"s.{form}"
        file.write_bytes(recorded.encode(form))
        common = {"placement_strategy": "frequency", "expert_statistics": str(file)}
        per_layer = place(model, gpu_experts=3, **common)
        for row, layer in enumerate(model.moe_layers):
            assert set(per_layer.resident[layer]) == set(np.argsort(-recorded.counts[row])[:3])
        overall = place(model, gpu_experts_ratio=0.25, **common)
        smallest = np.sort(recorded.counts.reshape(-1))[-12]
        for row, layer in enumerate(model.moe_layers):
            assert set(overall.resident[layer]) == set(np.flatnonzero(recorded.counts[row] >= smallest))


def test_random_follows_its_seed() -> None:
    """42 unless set otherwise; another seed gives other experts."""
    default = place(geometry(), gpu_experts=4, placement_strategy="random")
    assert default == place(geometry(), gpu_experts=4, placement_strategy="random", placement_seed=42)
    assert default != place(geometry(), gpu_experts=4, placement_strategy="random", placement_seed=43)


def test_whole_layers_and_the_rest() -> None:
    """`gpu_layers` are whole, everything else follows the number."""
    found = place(geometry(), gpu_layers="1-2,5", gpu_experts=2)
    assert [len(found.resident[layer]) for layer in (1, 2, 4, 5)] == [12, 12, 2, 12]
    assert found.is_whole(5)
    assert not found.is_whole(4)
    assert place(geometry(), gpu_layers="1-2,4-5").covers_everything
    assert parse_layers("", (1, 2), 3) == ()
    assert parse_layers("1,4-", (1, 2, 4, 5), 6) == (1, 4, 5)
    assert parse_layers("6-", (1, 2, 4, 5), 6) == ()
    assert format_layers((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (
            {"gpu_layers": "1-2,x"},
            r"gpu_layers: 'x' is not allowed; allowed: layers and ranges, as in 0-1,9,20-",
        ),
        ({"gpu_layers": "2-1"}, "a range begins with its smaller layer"),
        ({"gpu_layers": "6"}, "layer 6 does not exist; the model has layers 0-5"),
        ({"gpu_layers": "2-3"}, "layer 3 has no routed experts; allowed: 1-2,4-5"),
        ({"gpu_layers": "-1"}, "'-1' is not allowed"),
        ({"gpu_experts": 1, "gpu_experts_ratio": 0.5}, "both set"),
        ({"gpu_experts": 13}, "gpu_experts: 13 is not allowed; there are 12 per layer"),
        ({"gpu_experts": 1, "placement_strategy": "frequency"}, "expert_statistics is empty"),
        (
            {"gpu_experts": 1, "placement_strategy": "frequency", "expert_statistics": "/nowhere"},
            "/nowhere cannot be read",
        ),
    ],
)
def test_bad_settings_are_named(settings_: dict[str, Any], message: str) -> None:
    """Nothing is assumed and nothing is clipped."""
    with pytest.raises(UserError, match=message):
        place(geometry(), **settings_)


def test_statistics_of_another_model_or_no_statistics_are_refused(tmp_path: Path) -> None:
    """The file says what it was recorded of; damaged and foreign files are named."""
    file = tmp_path / "s.safetensors"
    wanted = {"gpu_experts": 1, "placement_strategy": "frequency", "expert_statistics": str(file)}
    others: dict[str, Any] = {"model_type": "glm4_moe", "layers": (0, 2, 4, 5)}
    for name, value in others.items():
        file.write_bytes(statistics(geometry(), **{name: value}).encode("safetensors"))
        with pytest.raises(UserError, match=f"another model: {name} is"):
            place(geometry(), **wanted)
    whole = statistics(geometry()).encode("safetensors")
    for content in (
        b"",
        b"{}",
        b"[1]",
        whole[: len(whole) // 2],
        whole.replace(b"expert_statistics", b"e" * 17),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"s\.safetensors is (not a file of|damaged)"):
            place(geometry(), **wanted)


def test_pairs_that_the_model_lacks_are_refused() -> None:
    """A placement made by other code is checked likewise."""
    for pairs in ([(0, 1)], [(1, 12)], [(1, 3), (1, 3)]):
        with pytest.raises(ValueError, match=r"layer 0|expert 12|twice"):
            Placement.of(geometry(), pairs)


@pytest.mark.parametrize("resident", [(), (3,), (0, 4, 7, 11), tuple(range(12))])
def test_a_server_counts_what_it_lists(resident: tuple[int, ...]) -> None:
    """Plans count a server's experts, which loads those that are listed; others' residents change nothing."""
    part = ExpertSlice(4, 8, 0, 20)
    assert part.num_held(resident) == len(part.held(resident))
