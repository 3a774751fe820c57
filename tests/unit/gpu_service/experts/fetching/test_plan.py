"""Guards what fetch slots take and where there are none: known before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_service.experts.fetching.make import plan_fetching
from gpu_service.experts.resident.panels import layer_format
from gpu_service.experts.streaming.make import ServedPart
from moebius.config import MoebiusConfig
from moebius.models.geometry import MoeGeometry

GEOMETRY = MoeGeometry("qwen3_moe", 64, 3, (0, 1, 2), 16, 2, 32, "silu", "float32")
KIND = layer_format("int8", "int8", 64, 16, False)
PARTS = {layer: (ServedPart(16, KIND), ServedPart(16, KIND)) for layer in (0, 1)}
PARTS[2] = (ServedPart(0, KIND), ServedPart(0, KIND))


def config(split: str = "tensor", ranks: int = 1, stages: int = 1, fetch: str = "auto") -> MoebiusConfig:
    """Returns the settings that matter here."""
    document: dict[str, Any] = {
        "model": {"model": "/m"},
        "gpu": {"fetch_experts": fetch},
        "experts": {"expert_split": split},
        "parallel": {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages},
    }
    return MoebiusConfig.model_validate(document)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("split", "groups"), [("tensor", 2), ("expert", 1)])
def test_slots_hold_whole_experts(split: str, groups: int, ranks: int) -> None:
    """Every layer that is not resident as a whole has slots; a part comes from each server where they share
    experts. Each rank has slots for whole experts.
    """
    plan = plan_fetching(config(split, ranks), GEOMETRY, PARTS, "cuda", None)
    assert plan is not None
    assert plan.kinds == {0: (KIND,) * groups, 1: (KIND,) * groups}
    assert plan.num_slots == 4 * GEOMETRY.top_k
    assert plan.nbytes == 2 * groups * plan.num_slots * KIND.expert_bytes


def test_layers_that_are_copied_by_the_host_have_no_slots() -> None:
    """Beyond the limit of page-locked memory kernels read no experts: slots would only take memory."""
    plan = plan_fetching(config(), GEOMETRY, PARTS, "cuda", None, layers=[1])
    assert plan is not None
    assert list(plan.kinds) == [1]
    assert plan_fetching(config(), GEOMETRY, PARTS, "cuda", None, layers=[]) is None


def test_a_small_part_of_the_memory_is_taken() -> None:
    """Slots take at most a 24th of the memory, of small GPUs a 48th; where less than four have room there are
    none.
    """
    counts = set()
    for each in range(1, 12):
        one = 4 * KIND.expert_bytes
        plan = plan_fetching(config(), GEOMETRY, PARTS, "cuda", 48 * each * one)
        counts.add(0 if plan is None else plan.num_slots)
        assert plan is None or plan.nbytes <= each * one
    assert counts == {0, 4, 5, 6, 7, 8}


@pytest.mark.parametrize(
    ("chosen", "device"),
    [
        (config(fetch="off"), "cuda"),
        (config(stages=2), "cuda"),
        (config(), "cpu"),
    ],
)
def test_where_nothing_is_fetched(chosen: MoebiusConfig, device: str) -> None:
    """Switched off, with pipeline stages, without a GPU."""
    assert plan_fetching(chosen, GEOMETRY, PARTS, device, None) is None
    assert plan_fetching(config(), GEOMETRY, {}, "cuda", None) is None
