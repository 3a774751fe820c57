"""Invariant: ranks that stream their experts say what one engine says that asks expert servers for all.

Real rank processes, expert servers and segments; the host is the device here, so that what is launched has
ended. tests/equality/test_prefill_lane.py has devices of unequal speed, tests/gpu real ones.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gpu_service.assembly.build
from gpu_service.core.request import Request
from gpu_service.device.stream import HostDeviceStream
from gpu_service.engine.prefill_lane import PrefillLane
from gpu_service.experts.adaptive import agreed, placement
from gpu_service.experts.costs import ExpertCosts
from gpu_service.experts.streaming import routing
from gpu_service.experts.streaming.plan import SHARES, Piece
from gpu_service.experts.streaming.ring import BufferRing
from gpu_service.experts.streaming.share import ShareChooser
from gpu_service.experts.streaming.streamed_step import StreamedStep
from gpu_service.experts.streaming.streamer import ExpertStreamer
from moebius.config import MoebiusConfig
from tests.helpers.expert_cluster import Cluster, running_cluster
from tests.helpers.ports import free_port
from tests.helpers.rank_group import Outcome, Script, run_group
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.waiting import wait_until

READY_S = 60.0
LENGTHS = (5, 70, 12, 41)
# Steps of the main lane stream nothing, where there is a lane.
LANE = {"prefill_chunk_max": 48, "prefill_lane_min_tokens": 20, "stream_min_rows": 1000}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two servers of a tiny checkpoint, with segments."""
    root = tmp_path_factory.mktemp("ranks")
    model, memory = root / "model", root / "memory"
    model.mkdir()
    memory.mkdir()
    make_tiny_model("qwen3_moe", model)
    experts: dict[str, Any] = {
        "split_count": 2,
        "expert_weights_dir": str(memory),
        "expert_transport": "grpc",
    }
    with running_cluster(model, root / "servers", dtype="float32", **experts) as cluster:
        yield cluster


def settings(cluster: Cluster, tp: int, whole_experts: float = 0.0, **gpu: Any) -> MoebiusConfig:
    """Returns the ranks of the cluster's model and servers, which meet at a free port.

    `whole_experts`: the share of experts that are resident, each on one rank; servers have these, too.
    """
    small = {"num_pages": 96, "page_size": 4, "max_num_seqs": 6, "device": "cpu", "gpu_threads": 1}
    small |= {"prefix_caching": False, "max_num_batched_tokens": 32, "overlap_scheduling": False}
    address = f"127.0.0.1:{free_port()}"
    document = cluster.config.model_dump()
    document["gpu"] |= small | gpu
    document["parallel"] |= {"tensor_parallel_size": tp, "rank_address": address, "rank_timeout_s": 60}
    if whole_experts:
        document["parallel"]["gpu_expert_split"] = "expert"
        document["placement"] |= {"gpu_experts_ratio": whole_experts, "placement_strategy": "uniform"}
        document["placement"]["drop_resident"] = "keep"
    return MoebiusConfig.model_validate(document)


def lane_on_the_host() -> None:
    """Changes this process: the lane's stream is one of the host's."""
    build: Any = gpu_service.assembly.build
    build.make_lane_stream = lambda *_: HostDeviceStream()


def submit(script: Script, name: str = "r") -> list[Request]:
    """Returns the prompts of several steps, which decode meanwhile."""
    prompts = [[3 + (i * 37 + k * k * 5 + k) % 200 for k in range(n)] for i, n in enumerate(LENGTHS)]
    return [
        script.submit(f"{name}{i}", prompt, max_tokens=6 + i, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]


def streamer_of(script: Script) -> ExpertStreamer:
    """Once it can stream: segments are opened in the background."""
    streamer = script.built.streamer
    assert streamer is not None
    wait_until(lambda: streamer.can_stream, lambda: "segments were not opened")
    # So long the engine believes an earlier answer.
    time.sleep(0.05)
    return streamer


def served(script: Script) -> dict[str, list[Outcome]]:
    """Nothing is streamed."""
    assert script.built.streamer is None
    return {"answers": script.outcomes(submit(script))}


def streamed(script: Script) -> dict[str, list[Outcome]]:
    """Returns all prompts, and in how many steps experts were streamed."""
    streamer = streamer_of(script)
    before = streamer.streamed_steps
    answers = script.outcomes(submit(script))
    return {"answers": answers, "steps": [Outcome([streamer.streamed_steps - before], "", 0)]}


@pytest.fixture(scope="module")
def wanted(cluster: Cluster) -> list[Outcome]:
    """Returns what one rank answers that asks servers for every expert."""
    return run_group(settings(cluster, 1, prefill_experts="cpu"), cases=served)["answers"]


@pytest.mark.parametrize("chunk", [40, pytest.param(64, marks=pytest.mark.full)])
def test_a_lane_of_two_ranks(chunk: int, cluster: Cluster, wanted: list[Outcome]) -> None:
    """Long prompts have steps of their own on both ranks, each of which copies half of the experts; others
    decode and are computed meanwhile, by servers.
    """
    config = settings(cluster, 2, prefill_experts="stream", **LANE | {"prefill_chunk_max": chunk})
    found = run_group(config, lane_on_the_host, streamed)
    assert found["answers"] == wanted
    # Of 70 and 41 tokens: at least two steps of at most 64.
    assert found["steps"][0].token_ids[0] >= 2


@pytest.mark.parametrize("chunk", [pytest.param(32, marks=pytest.mark.full), 48])
def test_steps_that_stream_without_a_lane(chunk: int, cluster: Cluster, wanted: list[Outcome]) -> None:
    """Usual steps, and long ones in turns with them, which the first rank tells all about."""
    config = settings(cluster, 2, prefill_experts="stream", prefill_chunk_max=chunk)
    found = run_group(config, cases=streamed)
    assert found["answers"] == wanted
    assert found["steps"][0].token_ids[0] >= 2


def test_ranks_of_whole_experts_stream_the_others(cluster: Cluster, wanted: list[Outcome]) -> None:
    """With drafts: what is resident on any rank is neither streamed nor asked for, by the lane and beside it.

    Each expert is computed once, wherever it is.
    """
    drafts = {"speculative_method": "ngram", "num_draft_tokens": 3, "adaptive_drafts": False}
    config = settings(cluster, 2, 0.4, prefill_experts="stream", **LANE | drafts)
    found = run_group(config, lane_on_the_host, streamed)
    assert [answer.token_ids for answer in found["answers"]] == [answer.token_ids for answer in wanted]
    assert found["steps"][0].token_ids[0] >= 2


def exchange_often(cache: Path, has_lane: bool) -> None:
    """Changes this process: any gain is worth an exchange, every other step may make some; its records are in
    `cache`.
    """
    if has_lane:
        lane_on_the_host()
    os.environ["XDG_CACHE_HOME"] = str(cache)
    ExpertCosts.copy_price = lambda costs, nbytes: 0.0  # type: ignore[assignment, method-assign]
    placement.READ_EVERY_S, agreed.TURN_STEPS = 0.0, 2


def exchanged(script: Script) -> dict[str, list[Outcome]]:
    """Returns what each round of prompts gave, until some experts have been exchanged and one round more."""
    streamer_of(script)
    followed, found = script.built.placement, dict[str, list[Outcome]]()
    assert followed is not None
    end, most = time.monotonic() + READY_S, 1 << 30
    while len(found) < most:
        assert time.monotonic() < end, "no experts were exchanged"
        found[str(len(found))] = script.outcomes(submit(script, f"{len(found)}-"))
        if followed.figures().exchanges and most > len(found) + 1:
            most = len(found) + 1
    assert script.built.resident is not None
    script.built.resident.check_integrity()
    return found


@pytest.mark.parametrize(
    ("split", "pp"),
    [
        ("expert", 1),
        pytest.param("tensor", 1, marks=pytest.mark.full),
        pytest.param("expert", 2, marks=pytest.mark.full),
    ],
)
def test_residents_of_ranks_follow_what_requests_choose(
    split: str, pp: int, cluster: Cluster, wanted: list[Outcome], tmp_path: Path
) -> None:
    """All ranks change the same experts before the same step, whole ones on one rank or a part on each: with
    drafts and streaming the answers stay what they were, and every expert is computed once."""
    drafts = {"speculative_method": "ngram", "num_draft_tokens": 3, "adaptive_drafts": False}
    config = settings(cluster, 2, 0.4, prefill_experts="stream", **(LANE if pp == 1 else {}) | drafts)
    changes = {"gpu_expert_split": split, "pipeline_parallel_size": pp}
    parallel = config.parallel.model_copy(update=changes)
    placed = config.placement.model_copy(update={"placement_strategy": "adaptive"})
    config = config.model_copy(update={"parallel": parallel, "placement": placed})
    found = run_group(config, partial(exchange_often, tmp_path, pp == 1), exchanged)
    for answers in found.values():
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in wanted]


def defer_most() -> None:
    """Changes this process: after a step few experts are copied before the layer's router has chosen them."""
    lane_on_the_host()
    routing._LEAST_EXPECTED = 1e9


def fetched(script: Script) -> dict[str, list[Outcome]]:
    """Returns what `streamed` does, and how many pieces were copied within a layer."""
    fetch, pieces = BufferRing.fetch, []

    def noting(ring: BufferRing, piece: Piece) -> int:
        pieces.append(piece)
        return fetch(ring, piece)

    BufferRing.fetch = noting  # type: ignore[assignment, method-assign]
    return streamed(script) | {"pieces": [Outcome([len(pieces)], "", 0)]}


def test_a_lane_that_copies_what_its_router_chose(cluster: Cluster, wanted: list[Outcome]) -> None:
    """Ranks wait for their routers within layers, with turns of the main lane meanwhile, as many on each."""
    config = settings(cluster, 2, prefill_experts="stream", **LANE)
    found = run_group(config, defer_most, fetched)
    assert found["answers"] == wanted
    assert found["pieces"][0].token_ids[0] > 0


def aborted_in_the_lane(script: Script) -> dict[str, list[Outcome]]:
    """The longest prompt is given up between two layers of the lane's step that it is in."""
    streamer_of(script)
    between_layers: Callable[[PrefillLane], None] = PrefillLane._between_layers
    aborts = []

    def abort(lane: PrefillLane) -> None:
        scheduler = script.built.engine.scheduler
        if not aborts and any(request.request_id == "r1" for request in scheduler.running if request.in_lane):
            aborts.append(1)
            script.built.engine.abort("r1")
            lane._last_turn = 0.0
        between_layers(lane)

    lane = script.built.engine._lane
    assert lane is not None
    lane.runner.between_layers = partial(abort, lane)
    requests = submit(script)
    outcomes = script.outcomes(requests)
    assert aborts == [1], "the prompt was in no step of the lane"
    return {"answers": outcomes, "again": script.outcomes(submit(script, "again"))}


def test_a_request_that_is_aborted_in_the_lane(cluster: Cluster, wanted: list[Outcome]) -> None:
    """It ends on both ranks, keeps what it holds until the step has ended, and touches no other."""
    config = settings(cluster, 2, prefill_experts="stream", **LANE)
    found = run_group(config, lane_on_the_host, aborted_in_the_lane)
    assert [answer.finish_reason for answer in found["answers"]] == ["length", "abort", "length", "length"]
    assert [answer for i, answer in enumerate(found["answers"]) if i != 1] == [
        answer for i, answer in enumerate(wanted) if i != 1
    ]
    assert found["again"] == wanted


def stream_a_part() -> None:
    """Changes this process: a third of every layer is streamed, by steps of prompts, and servers have the
    rest.
    """
    ShareChooser.share = lambda chooser, rows: SHARES // 3  # type: ignore[assignment, method-assign]


def lost_while_streaming(pid: int, script: Script) -> dict[str, list[Outcome]]:
    """A server dies between two layers of a step that streams, and comes back with another segment."""
    streamer_of(script)
    forward, calls = StreamedStep.forward, itertools.count()

    def killing(step: StreamedStep, layer: int, *given: Any) -> Any:
        if next(calls) == 4:
            os.kill(pid, signal.SIGKILL)
        return forward(step, layer, *given)

    StreamedStep.forward = killing  # type: ignore[assignment, method-assign]
    answers = script.outcomes(submit(script))
    assert next(calls) > 4, "no step streamed"
    streamer_of(script)
    return {"answers": answers, "again": script.outcomes(submit(script, "again"))}


def test_a_server_that_is_lost_in_a_step_that_streams(cluster: Cluster, wanted: list[Outcome]) -> None:
    """Both ranks run the step again, whichever of them noticed, once the server is back."""
    config = settings(cluster, 2, prefill_experts="stream")
    with cluster.started_again(1) as pid:
        found = run_group(config, stream_a_part, partial(lost_while_streaming, pid))
    assert found["answers"] == wanted
    assert found["again"] == wanted
