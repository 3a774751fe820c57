"""Invariant: GPUs that stream their experts in a prefill lane say what one says that asks servers for all."""

from __future__ import annotations

from typing import Any

import pytest

from moebius.config import MoebiusConfig
from tests.helpers.expert_cluster import Cluster
from tests.helpers.rank_group import Outcome, run_group
from tests.service.test_streaming_ranks import LANE, cluster, fetched, routing, served, settings, streamed  # type: ignore[attr-defined]

pytestmark = pytest.mark.multigpu
# Found by its name.
__all__ = ["cluster"]


def on_gpus(cluster: Cluster, tp: int, **gpu: Any) -> MoebiusConfig:
    """In float32, which FlashInfer's attention does not compute."""
    return settings(cluster, tp, device="cuda", attention_backend="triton", **gpu)


@pytest.fixture(scope="module")
def wanted_on_gpu(cluster: Cluster) -> list[Outcome]:
    """Returns what one GPU answers that streams nothing."""
    return run_group(on_gpus(cluster, 1, prefill_experts="cpu"), cases=served)["answers"]


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
def test_a_lane_of_two_gpus(overlap: bool, cluster: Cluster, wanted_on_gpu: list[Outcome]) -> None:
    """Both streams' collectives run next to each other, on communicators of their own."""
    config = on_gpus(cluster, 2, prefill_experts="stream", overlap_scheduling=overlap, **LANE)
    found = run_group(config, cases=streamed)
    assert [answer.token_ids for answer in found["answers"]] == [one.token_ids for one in wanted_on_gpu]
    assert found["steps"][0].token_ids[0] >= 2


def defer_most() -> None:
    """Changes this process: after a step few experts are copied before the layer's router has chosen them."""
    routing._LEAST_EXPECTED = 1e9


def test_a_lane_that_waits_for_its_routers(cluster: Cluster, wanted_on_gpu: list[Outcome]) -> None:
    """The lane waits within layers, with turns of the main lane, as many on each GPU."""
    config = on_gpus(cluster, 2, prefill_experts="stream", **LANE)
    found = run_group(config, defer_most, fetched)
    assert [answer.token_ids for answer in found["answers"]] == [one.token_ids for one in wanted_on_gpu]
    assert found["pieces"][0].token_ids[0] > 0
