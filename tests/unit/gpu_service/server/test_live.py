"""Guards what a live view gets: counts of the right experts, nothing made up, no wait for silent servers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

import gpu_service.server.live as live_module
from expert_service.host import calibrated_rate
from gpu_service.core.interface import NullObserver
from gpu_service.engine.step_check import StepCheck, StepFacts
from gpu_service.experts.adaptive.placement import LayerFigures
from gpu_service.experts.client import ExpertClientStats
from gpu_service.experts.costs import ExpertCosts
from gpu_service.experts.fetching.fetcher import FetchFigures
from gpu_service.memory.shares import MemoryShares
from gpu_service.server.live import LiveExperts
from gpu_service.telemetry.metrics import EngineMetrics, EngineTelemetry
from moebius.kernels import PlanRow
from moebius.kernels.weight_formats import expert_layout
from moebius.models.geometry import MoeGeometry
from protos import engine_pb2 as pb
from protos import expert_pb2, expert_pb2_grpc
from tests.helpers.engine_harness import make_request, prompt_of, running_engine

GEOMETRY = MoeGeometry("qwen3_moe", 64, 3, (1, 2), 4, 2, 32, "silu", "float32")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of a busy machine have answered within a minute."""
    monkeypatch.setattr(live_module, "_ANSWER_S", 60.0)


class Server(expert_pb2_grpc.ExpertServicer):
    """An expert server that has computed what it is given."""

    def __init__(self, rows: dict[int, list[int]], silent: bool = False, busy_s: float = 0.5) -> None:
        """`busy_s`: of each layer."""
        self.rows = rows
        self.busy_s = busy_s
        self.silent = silent
        self.calls = 0

    async def Info(self, request: Any, context: Any) -> expert_pb2.InfoResponse:
        """Returns what it holds."""
        self.calls += 1
        if self.silent:
            await asyncio.sleep(60)
        return expert_pb2.InfoResponse(
            instance_id=7, calibrated_bytes_per_second=5e9, weight_format="int8", num_threads=2, numa_node=1
        )

    async def Stats(self, request: Any, context: Any) -> expert_pb2.StatsResponse:
        """Returns what it computed."""
        layers = [
            expert_pb2.LayerStats(
                layer=n, expert_rows=rows, busy_seconds=self.busy_s, calls=6, experts=sum(map(bool, rows))
            )
            for n, rows in self.rows.items()
        ]
        return expert_pb2.StatsResponse(busy_seconds=2.0, weight_bytes=10**9, layers=layers)


@asynccontextmanager
async def experts_of(
    directory: Path, servers: Sequence[Server | None], resident: dict[int, list[int]], client: Any = None
) -> AsyncIterator[LiveExperts]:
    """The view of servers at unix sockets; None: nothing listens there."""
    addresses, running = [], []
    for index, servicer in enumerate(servers):
        addresses.append(f"unix:{directory}/{index}.sock")
        if servicer is not None:
            server = grpc.aio.server()
            expert_pb2_grpc.add_ExpertServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
            server.add_insecure_port(addresses[-1])
            await server.start()
            running.append(server)
    view = LiveExperts(GEOMETRY, lambda layer: resident.get(layer, ()), addresses, None, None, client)
    try:
        yield view
    finally:
        await view.close()
        for server in running:
            await server.stop(None)


def described(directory: Path, servers: Sequence[Server | None], resident: dict[int, list[int]]) -> Any:
    """Returns what `describe` says of them."""

    async def run() -> pb.GetLiveResponse:
        live = pb.GetLiveResponse()
        async with experts_of(directory, servers, resident) as view:
            await view.describe(live)
        return live

    return asyncio.run(run())


def test_servers_that_share_experts_count_rows_once(tmp_path: Path) -> None:
    """Servers with a slice of each expert have computed the same rows, those with whole experts their own."""
    same = [Server({1: [3, 0, 5, 0], 2: [0, 1, 1, 0]}), Server({1: [3, 0, 5, 0], 2: [0, 1, 1, 0]})]
    live = described(tmp_path, same, {1: [1, 3]})
    assert [(layer.layer, list(layer.gpu_experts), list(layer.cpu_rows)) for layer in live.layers] == [
        (1, [1, 3], [3, 0, 5, 0]),
        (2, [], [0, 1, 1, 0]),
    ]
    assert (live.num_experts, live.top_k, live.recorder_is_on) == (4, 2, False)
    assert not live.HasField("streamed_steps")
    assert [list(layer.chosen) for layer in live.layers] == [[], []]
    divided = [Server({1: [3, 4, 0, 0]}), Server({1: [0, 0, 5, 6]})]
    live = described(tmp_path, divided, {})
    assert [list(layer.cpu_rows) for layer in live.layers] == [[3, 4, 5, 6], [0, 0, 0, 0]]
    assert [(one.index, one.is_up, one.busy_seconds, one.weight_bytes) for one in live.servers] == [
        (0, True, 2.0, 10**9),
        (1, True, 2.0, 10**9),
    ]
    assert {one.calibrated_bytes_per_second for one in live.servers} == {5e9}


def test_times_are_those_of_the_server_that_takes_longest(tmp_path: Path) -> None:
    """A step waits for it; what no server computed has no time."""
    live = described(tmp_path, [Server({1: [1, 0, 0, 0]}, busy_s=3.0), Server({1: [1, 0, 0, 0]})], {})
    assert [(layer.cpu_seconds, layer.cpu_calls) for layer in live.layers] == [(3.0, 6), (0.0, 0)]
    lost = described(tmp_path, [Server({1: [1, 0, 0, 0]}), None], {})
    assert not lost.layers[0].HasField("cpu_seconds")


def test_bytes_of_a_layer_are_those_of_its_experts(tmp_path: Path) -> None:
    """What each server read, by the experts that had rows; unknown where a server does not answer."""
    servers = [Server({1: [1, 1, 1, 0], 2: [0, 1, 0, 0]}), Server({1: [1, 1, 1, 1]})]
    live = described(tmp_path, servers, {})
    assert [layer.cpu_bytes for layer in live.layers] == [1_750_000_000, 250_000_000]
    lost = described(tmp_path, [servers[0], None], {})
    assert not lost.layers[0].HasField("cpu_bytes")


def test_what_moves_is_the_streamers_and_the_placements(tmp_path: Path) -> None:
    """Moves are shown by layer, where there are such; costs and predictions are the engine's."""
    check = StepCheck(NullObserver(), ExpertCosts(4, 2), StepFacts(2, 2))
    check.costs.copied(10**6, 1e-4)
    layers = {2: LayerFigures(3, 3000, 40, 30)}
    placement = SimpleNamespace(figures=lambda: SimpleNamespace(layers=layers), copy_price=math.inf)
    streamer = SimpleNamespace(streamed_steps=2, streamed_bytes=700, streamed_of={1: (6, 500), 2: (2, 200)})

    fetcher = SimpleNamespace(by_layer={1: FetchFigures(5, 5000, 17, 40)})

    async def run(placement: Any) -> pb.GetLiveResponse:
        live = pb.GetLiveResponse()
        shares = MemoryShares(kv=5, experts=4, stream=3, fetch=2, free=1, is_shared=True)
        others: Any = streamer, None, placement, check, fetcher, lambda: shares
        view = LiveExperts(GEOMETRY, lambda layer: (), (), None, *others)
        await view.describe(live)
        return live

    live = asyncio.run(run(placement))
    memory = live.memory
    assert (memory.kv_bytes, memory.expert_bytes, memory.stream_bytes) == (5, 4, 3)
    assert (memory.fetch_bytes, memory.free_bytes, memory.is_shared) == (2, 1, True)
    own = live.layers[0]
    assert (own.fetched_experts, own.fetched_bytes, own.fetch_hits) == (5, 5000, 17)
    assert not live.layers[1].HasField("fetched_experts")
    assert [(layer.streamed_experts, layer.streamed_bytes) for layer in live.layers] == [(6, 500), (2, 200)]
    assert not live.layers[0].HasField("decode_choices")
    found = live.layers[1]
    assert (found.exchanges, found.exchange_bytes, found.decode_choices, found.decode_hits) == (
        3,
        3000,
        40,
        30,
    )
    assert live.costs.link_bytes_per_second == pytest.approx(1e10)
    for unknown in ("copy_price", "cpu_expert_seconds", "gpu_expert_seconds", "predicted_over_measured"):
        assert not live.costs.HasField(unknown)  # type: ignore[arg-type]
    check.costs.served(10, 1e-3, 0.1)
    placement.copy_price = check.costs.copy_price(10**6)
    assert asyncio.run(run(placement)).costs.copy_price == pytest.approx(1.5)


@pytest.mark.parametrize("seconds", [0.25, None])
def test_hand_offs_are_the_clients(tmp_path: Path, seconds: float | None) -> None:
    """Hand-offs are shown where the client measures them; a client that a GPU drives does not."""
    stats = ExpertClientStats(calls=4, wait_seconds=1.0, hand_off_seconds=seconds)

    async def run() -> pb.GetLiveResponse:
        live = pb.GetLiveResponse()
        async with experts_of(tmp_path, [], {}, SimpleNamespace(stats=lambda: stats)) as view:
            await view.describe(live)
        return live

    live = asyncio.run(run())
    assert live.HasField("hand_off") is (seconds is not None)
    if seconds is not None:
        assert (live.hand_off.calls, live.hand_off.wait_seconds, live.hand_off.seconds) == (4, 1.0, seconds)


def test_a_lost_or_silent_server_makes_counts_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not known is left out, never zero; and the caller waits no longer than for one answer."""
    monkeypatch.setattr(live_module, "_ANSWER_S", 8.0)
    for number, broken in enumerate([None, Server({}, silent=True)]):
        directory = tmp_path / str(number)
        directory.mkdir()
        live = described(directory, [Server({1: [1, 1, 1, 1]}), broken], {2: [0]})
        assert [one.is_up for one in live.servers] == [True, False]
        assert [list(layer.cpu_rows) for layer in live.layers] == [[], []]
        assert [list(layer.gpu_experts) for layer in live.layers] == [[], [0]]


def test_no_server_is_asked_without_a_viewer(tmp_path: Path) -> None:
    """Making the view connects to no server: only `describe` does."""
    server = Server({})

    async def run() -> int:
        async with experts_of(tmp_path, [server], {}) as view:
            await asyncio.sleep(0.1)
            before = server.calls
            await view.describe(pb.GetLiveResponse())
            return before

    assert (asyncio.run(run()), server.calls) == (0, 1)


def test_the_roofline_is_that_of_both_matrices() -> None:
    """Bytes of an expert over the measured time of all its panels; nothing where one was not measured."""
    layout = expert_layout("bfloat16", "bfloat16", 64, 32)
    up = layout.intermediate_blocks * layout.panels_per_column_block

    def row(matrix: Any, nanoseconds: float, rows_from: int = 1, row_type: Any = "bfloat16") -> PlanRow:
        return PlanRow(matrix, "bfloat16", row_type, rows_from, None, "k", nanoseconds)

    plan = [
        row("gate_up", 100.0),
        row("down", 50.0),
        row("down", 1.0, rows_from=2),
        row("down", 1.0, 1, "float32"),
    ]
    seconds = (up * 100 + layout.down_panels * 50) * 1e-9
    assert calibrated_rate(plan, layout) == pytest.approx(layout.expert_bytes / seconds)
    assert calibrated_rate(plan[:1], layout) == 0
    assert calibrated_rate([row("gate_up", 100.0), row("down", 0.0)], layout) == 0


def test_start_times_are_those_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """None before anything started; afterwards one wait per output, forgotten after a minute."""
    observer = EngineTelemetry(EngineMetrics("m", CollectorRegistry()))
    with running_engine(observer=observer) as harness:
        harness.run([make_request("warm-up", prompt_of(5, 9))])
        assert observer.start_times() is None
        observer.enabled = True
        harness.run([make_request(f"r{number}", prompt_of(number, 20)) for number in range(5)])
    found = observer.start_times()
    assert found is not None
    assert found.count == 5
    assert 0 < found.p50 <= found.p95 < 60
    assert observer.prompt_throughput() == pytest.approx(10.0)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert observer.start_times() is None
    assert observer.prompt_throughput() == 0
