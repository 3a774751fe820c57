"""Invariant: ranks whose decode steps fetch experts, each others, say what one rank says that fetches none.

Real rank processes, expert servers and segments; the host is the device here.
"""

from __future__ import annotations

import itertools
import os
import signal
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import gpu_service.assembly.build
from gpu_service.engine.device_runner import DeviceRunner
from gpu_service.experts.client import ExpertUnavailable
from gpu_service.experts.fetching import make
from gpu_service.experts.fetching.fetcher import ExpertFetcher
from gpu_service.experts.fetching.slots import COPIED, IN_SLOTS
from gpu_service.experts.fetching.step import FetchedStep
from gpu_service.experts.streaming.segments import ExpertSegments
from tests.helpers.expert_cluster import Cluster
from tests.helpers.rank_group import Outcome, Script, run_group
from tests.service.test_streaming_ranks import (  # type: ignore[attr-defined]
    cluster,
    settings,
    streamer_of,
    submit,
    wanted,
)

assert cluster
assert wanted


def cheap_copies(fetcher: ExpertFetcher, segments: ExpertSegments | None) -> None:
    """In place of what was measured: an expert's copy takes half as long as a server, and the ranks' hosts do
    not agree.
    """
    assert fetcher._agreement is not None
    rank = next(iter(fetcher.state.layers.values())).rank
    price = (0.0, 0.0) if segments is None else (16e-6, 8e-6 * (1 + rank))
    fetcher._priced = dict.fromkeys(fetcher.state.layers, price)
    fetcher._offer(fetcher._agreement, is_changed=False)


def fetch_on_the_host() -> None:
    """Changes this process: it fetches as a GPU would, into few slots."""
    make.fetches = lambda config, _: config.gpu.fetch_experts == "auto"  # type: ignore[assignment]
    make._TOKENS_KEPT = 2
    ExpertFetcher._set_prices = cheap_copies  # type: ignore[assignment, method-assign]


def copied(script: Script) -> list[Outcome]:
    """Returns how many experts were copied, and how many choices were computed where they are."""
    fetcher = script.built.fetcher
    assert fetcher is not None
    counts = fetcher.state.counters.sum(0)
    return [Outcome([int(counts[COPIED]), int(counts[IN_SLOTS])], "", 0)]


def fetching(script: Script) -> dict[str, list[Outcome]]:
    """Returns two rounds of the prompts, of which the second finds slots full."""
    streamer_of(script)
    answers = script.outcomes(submit(script))
    return {"answers": answers, "again": script.outcomes(submit(script, "again")), "copied": copied(script)}


@pytest.mark.parametrize(
    ("residents", "split"),
    [(0.0, "tensor"), (0.4, "expert"), pytest.param(0.4, "tensor", marks=pytest.mark.full)],
)
def test_ranks_fetch_other_experts_each(
    residents: float, split: str, cluster: Cluster, wanted: list[Outcome]
) -> None:
    """Beside residents that are whole on one rank, or a part on each, and with none."""
    config = settings(cluster, 2, residents, prefill_experts="stream", stream_min_rows=1000)
    parallel = config.parallel.model_copy(update={"gpu_expert_split": split})
    found = run_group(config.model_copy(update={"parallel": parallel}), fetch_on_the_host, fetching)
    for answers in (found["answers"], found["again"]):
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in wanted]
    copies, in_slots = found["copied"][0].token_ids
    assert in_slots > copies > 0


def run_as_a_gpu_does() -> None:
    """Changes this process: its steps are a device's, which are checked when they have ended. The sixth of
    rank 1 finds that a server has replaced its experts.
    """
    fetch_on_the_host()
    build: Any = gpu_service.assembly.build
    build.make_step_runner = lambda config, runner, stream, *_: DeviceRunner(runner, stream)
    check, checks = FetchedStep.check, itertools.count(1)

    def checking(step: FetchedStep) -> None:
        number, rank = next(checks), next(iter(step._layers.values())).rank
        if number == 6 and rank == 1:
            step._segments = SimpleNamespace(problem=lambda: "experts are others")  # type: ignore[assignment]
        try:
            check(step)
        except ExpertUnavailable as error:
            UNDONE.append(str(error))
            raise

    FetchedStep.check = checking  # type: ignore[assignment, method-assign]


# Of this process, why its steps were run again.
UNDONE: list[str] = []


def undone(script: Script) -> dict[str, list[Outcome]]:
    """Returns what `fetching` does, and how often rank 0 ran steps again."""
    return fetching(script) | {"undone": [Outcome([len(UNDONE)], "; ".join(UNDONE), 0)]}


def test_a_step_that_one_rank_finds_wrong_is_run_again_by_all(
    cluster: Cluster, wanted: list[Outcome]
) -> None:
    """Devices' steps, which overlap: the rank that saw nothing runs again what the other has to."""
    config = settings(cluster, 2, prefill_experts="stream", stream_min_rows=1000, overlap_scheduling=True)
    found = run_group(config, run_as_a_gpu_does, undone)
    for answers in (found["answers"], found["again"]):
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in wanted]
    assert found["copied"][0].token_ids[0] > 0
    assert found["undone"][0].token_ids == [1]
    assert "another rank" in found["undone"][0].finish_reason


def lost_while_fetching(pid: int, script: Script) -> dict[str, list[Outcome]]:
    """A server dies while requests decode, and comes back with another segment. All experts are in slots
    then, of which the ranks have enough together.
    """
    streamer_of(script)
    script.outcomes(submit(script, "first"))
    before = copied(script)[0].token_ids[0]
    requests = submit(script)
    os.kill(pid, signal.SIGKILL)
    answers = script.outcomes(requests)
    streamer_of(script)
    again = script.outcomes(submit(script, "again"))
    after = copied(script)[0].token_ids[0]
    return {"answers": answers, "again": again, "copied": [Outcome([before, after - before], "", 0)]}


def test_a_server_that_is_lost(cluster: Cluster, wanted: list[Outcome]) -> None:
    """All ranks forget what they have copied at the same step, and copy again once the server is back."""
    config = settings(cluster, 2, prefill_experts="stream", stream_min_rows=1000)
    with cluster.started_again(1) as pid:
        found = run_group(config, fetch_on_the_host, partial(lost_while_fetching, pid))
    for answers in (found["answers"], found["again"]):
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in wanted]
    before, after = found["copied"][0].token_ids
    assert before > 0
    assert after > 0, "what was copied from the server that is lost was not forgotten"
