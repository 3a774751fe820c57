"""Invariant: an engine that streams its experts from running servers' segments says what one without says.

The host is the device here: copies are synchronous; tests/gpu has the same on a GPU.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import pytest

from gpu_service.core.request import Request, SamplingParams
from gpu_service.device.stream import HostDeviceStream
from gpu_service.experts.streaming.plan import SHARES
from gpu_service.experts.streaming.streamed_step import StreamedStep
from gpu_service.speculation.mtp import MtpDrafter
from moebius.config import MoebiusConfig, PlacementConfig
from tests.helpers.built_engine import RunningEngine, running_engine
from tests.helpers.expert_cluster import Cluster, running_cluster
from tests.helpers.mtp_models import write_mtp_model
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.waiting import wait_until

READY_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny checkpoint."""
    found = tmp_path_factory.mktemp("streamed")
    make_tiny_model("qwen3_moe", found)
    return found


def settings(cluster: Cluster, **gpu: Any) -> MoebiusConfig:
    """Returns an engine of the cluster's model and servers."""
    small = {"num_pages": 96, "page_size": 4, "max_num_seqs": 6, "device": "cpu", "gpu_threads": 1}
    small |= {"prefix_caching": False}
    document = cluster.config.model_dump()
    document["gpu"] |= small | {"max_num_batched_tokens": 32} | gpu
    return MoebiusConfig.model_validate(document)


def requests() -> list[Request]:
    """Returns the prompts of several steps, which decode meanwhile."""
    return [
        Request(
            f"r{i}",
            [3 + (i * 37 + k * k * 5 + k) % 200 for k in range(4 + 17 * i)],
            SamplingParams(max_tokens=6 + i, temperature=0.0, ignore_eos=True),
        )
        for i in range(4)
    ]


def wait_until_streaming(engine: RunningEngine) -> None:
    """Segments are opened in the background."""
    streamer = engine.built.streamer
    assert streamer is not None
    wait_until(lambda: streamer.can_stream)


class Watched:
    """Steps that streamed, and what share of each layer."""

    def __init__(self, engine: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shares: list[int] = []
        streamer = engine.built.streamer
        assert streamer is not None
        begin = streamer.begin

        def watched(rows: int, is_decode: bool = False) -> Any:
            step = begin(rows, is_decode)
            if step is not None:
                self.shares.append(step.plan.share)  # type: ignore[attr-defined]
            return step

        monkeypatch.setattr(streamer, "begin", watched)


@pytest.mark.parametrize(("split", "drop"), [("tensor", "drop"), ("expert", "drop"), ("tensor", "keep")])
def test_streamed_prompts(
    split: str, drop: Literal["drop", "keep"], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole layers streamed, and a part of each with the rest on the servers, one expert resident, which is
    never streamed, whether servers hold it, too, or not.
    """
    memory = tmp_path / "memory"
    memory.mkdir()
    experts: dict[str, Any] = {"split_count": 2, "expert_split": split, "expert_weights_dir": str(memory)}
    resident = PlacementConfig(gpu_experts=1, drop_resident=drop)
    servers = running_cluster(model, tmp_path / "servers", dtype="float32", placement=resident, **experts)
    with servers as cluster:
        with running_engine(settings(cluster, prefill_experts="cpu")) as engine:
            assert engine.built.streamer is None
            wanted = engine.run(requests())
        with running_engine(settings(cluster, prefill_experts="stream")) as engine:
            wait_until_streaming(engine)
            watched = Watched(engine, monkeypatch)
            assert engine.run(requests()) == wanted
            assert set(watched.shares) == {SHARES}
            streamer = engine.built.streamer
            assert streamer is not None
            monkeypatch.setattr(streamer.chooser, "share", lambda rows: 20)
            assert engine.run([*requests()]) == wanted
            assert 20 in watched.shares


def test_long_prompts_stream_in_a_lane_of_their_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The assembled lane on the host's stream: whole layers streamed, while servers compute for the others;
    prompts go on while a server is away, and say the same.
    """
    memory = tmp_path / "memory"
    memory.mkdir()
    servers = running_cluster(model, tmp_path / "servers", dtype="float32", expert_weights_dir=str(memory))
    with servers as cluster:
        with running_engine(settings(cluster, prefill_experts="cpu")) as engine:
            wanted = engine.run(requests())
        monkeypatch.setattr("gpu_service.assembly.build.make_lane_stream", lambda *_: HostDeviceStream())
        lane = {"prefill_chunk_max": 48, "prefill_lane_min_tokens": 20, "overlap_scheduling": False}
        # Steps of the main lane stream nothing.
        config = settings(cluster, prefill_experts="stream", stream_min_rows=1000, **lane)
        with running_engine(config) as engine:
            wait_until_streaming(engine)
            streamer = engine.built.streamer
            assert streamer is not None
            # So long the engine believes an earlier answer.
            time.sleep(0.05)
            before = streamer.streamed_steps
            assert engine.run(requests()) == wanted
            assert streamer.streamed_steps >= before + 2
            cluster.processes[0].kill()
            cluster.processes[0].wait()
            prompt = requests()[2]
            engine.built.engine.submit([prompt])
            wait_until(lambda: prompt.output_token_ids, lambda: "the prompt asked a server that is dead")
            cluster.start(0)
            assert engine.wait([prompt]) == [wanted[2]]


@pytest.mark.parametrize("in_lane", [False, True], ids=["main", "lane"])
def test_layers_of_prediction_are_streamed_with_the_others(
    in_lane: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's own layers first, MTP's once its tokens are sampled: tokens and draft tokens are the same."""
    model, memory = tmp_path / "model", tmp_path / "memory"
    write_mtp_model("glm4_moe", model)
    memory.mkdir()
    drafts = {"speculative_method": "mtp", "num_draft_tokens": 3, "adaptive_drafts": False}
    streamed, draft_ids = set[int](), dict[tuple[int, ...], int]()
    forward, propose = StreamedStep.forward, MtpDrafter.propose

    def watched_forward(step: StreamedStep, layer: int, *given: Any) -> Any:
        streamed.add(layer)
        return forward(step, layer, *given)

    def watched_propose(drafter: MtpDrafter, context: Any, plan: Any, *given: Any) -> Any:
        """Notes the first draft after the known tokens; later ones share memory with other requests'."""
        found = propose(drafter, context, plan, *given)
        for row, ids in zip(given[2].tolist(), [] if found is None else found.tolist(), strict=False):
            known = drafter._pool.tokens[plan.token_slots[row], : plan.positions[row] + 2]
            draft_ids[tuple(known.tolist())] = ids[0]
        return found

    monkeypatch.setattr(StreamedStep, "forward", watched_forward)
    monkeypatch.setattr(MtpDrafter, "propose", watched_propose)
    servers = running_cluster(
        model, tmp_path / "servers", dtype="float32", gpu=drafts, expert_weights_dir=str(memory)
    )
    changes: dict[str, Any] = {"prefill_experts": "stream"}
    if in_lane:
        monkeypatch.setattr("gpu_service.assembly.build.make_lane_stream", lambda *_: HostDeviceStream())
        changes |= {"prefill_chunk_max": 48, "prefill_lane_min_tokens": 20, "overlap_scheduling": False}
        changes |= {"stream_min_rows": 1000}
    with servers as cluster:
        with running_engine(settings(cluster, prefill_experts="cpu")) as engine:
            wanted, expected = engine.run(requests()), dict(draft_ids)
        assert not streamed
        draft_ids.clear()
        with running_engine(settings(cluster, **changes)) as engine:
            wait_until_streaming(engine)
            time.sleep(0.05)  # so long the engine believes an earlier answer
            assert engine.run(requests()) == wanted
    assert streamed == set(cluster.geometry.moe_layers)
    both = draft_ids.keys() & expected.keys()
    assert len(both) > 10
    assert {known: draft_ids[known] for known in both} == {known: expected[known] for known in both}


def test_servers_that_load_again_are_streamed_from_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed server's segment is streamed while it is away; what is loaded again is opened again."""
    memory = tmp_path / "memory"
    memory.mkdir()
    servers = running_cluster(model, tmp_path / "servers", dtype="float32", expert_weights_dir=str(memory))
    with (
        servers as cluster,
        running_engine(settings(cluster, prefill_experts="stream", stream_min_rows=1)) as engine,
    ):
        wait_until_streaming(engine)
        wanted = engine.run(requests())
        cluster.processes[0].kill()
        cluster.processes[0].wait()
        # No step needs a server.
        assert engine.run(requests()) == wanted
        (memory / "expert-0.weights").unlink()
        cluster.start(0)
        assert engine.run(requests()) == wanted
        wait_until_streaming(engine)
        watched = Watched(engine, monkeypatch)
        assert engine.run(requests()) == wanted
        assert watched.shares
