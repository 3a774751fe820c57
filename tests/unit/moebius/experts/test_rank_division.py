"""Invariant: ranks of whole experts hold each resident one once, evenly; auto divides by shape."""

from __future__ import annotations

from typing import Any

import pytest

from moebius.config import MoebiusConfig
from moebius.experts.rank_division import chosen_split, rank_residents


def settings(ranks: int, split: str = "auto", expert_dtype: str = "keep") -> MoebiusConfig:
    """Returns the settings of a group of ranks."""
    parallel: dict[str, Any] = {"tensor_parallel_size": ranks, "gpu_expert_split": split}
    return MoebiusConfig.model_validate({"parallel": parallel, "experts": {"expert_dtype": expert_dtype}})


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_each_resident_expert_is_held_once(ranks: int) -> None:
    """The parts are disjoint, together everything, and of two ranks' totals none is larger by more than one,
    within any consecutive layers, as a pipeline stage has them."""
    resident = {0: (1, 2, 5), 2: (), 3: (4,), 7: (0, 1, 2, 3, 4, 5, 6), 9: (3, 8)}
    parts = [rank_residents(resident, rank, ranks) for rank in range(ranks)]
    for layer, experts in resident.items():
        held = [expert for part in parts for expert in part[layer]]
        assert sorted(held) == sorted(experts)
        assert all(list(part[layer]) == sorted(part[layer]) for part in parts)
    layers = sorted(resident)
    for begin in range(len(layers)):
        for end in range(begin + 1, len(layers) + 1):
            sizes = [sum(len(part[layer]) for layer in layers[begin:end]) for part in parts]
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("ranks", "size", "group", "expert_dtype", "wanted"),
    [
        (2, 768, 1, "keep", "tensor"),
        (4, 768, 128, "keep", "expert"),  # six groups
        (8, 768, 1, "keep", "expert"),  # 96 channels
        (2, 1440, 1, "keep", "tensor"),
        (4, 1440, 1, "keep", "expert"),  # 360 is no multiple of 16, so channels are uneven
        (4, 2880, 32, "keep", "expert"),  # 90 groups
        (4, 1536, 1, "int4", "tensor"),
        (8, 512, 128, "keep", "expert"),  # more ranks than groups
    ],
)
def test_auto(ranks: int, size: int, group: int, expert_dtype: str, wanted: str) -> None:
    """By the channels of a rank: equally many, whole panels, and not too few."""
    found = chosen_split(settings(ranks, expert_dtype=expert_dtype), size, group)
    assert found.parallel.gpu_expert_split == wanted


def test_what_is_set_stays() -> None:
    """Also where the other division would be chosen."""
    assert chosen_split(settings(8, "tensor"), 768, 1).parallel.gpu_expert_split == "tensor"
    assert chosen_split(settings(2, "expert"), 768, 1).parallel.gpu_expert_split == "expert"
