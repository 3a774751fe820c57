"""Guards `moebius profile`'s parts: one clock, one profile at a time, bounds, the document."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

import gpu_service.server.profiler as profiler_module
from app.profile import check_output, chrome_trace, summary, write_trace
from app.supervisor.lines import ForwardedLines
from expert_service.servicer import ExpertServicer
from gpu_service.server.profiler import (
    MOST_OPERATIONS,
    EngineProfiler,
    ProfileRunning,
    boot_id,
    clock_offset,
    profile_seconds,
    unix_offset_ns,
)
from moebius.errors import UserError
from moebius.kernels import ExpertEngine
from protos import engine_pb2 as pb
from protos import expert_pb2, expert_pb2_grpc
from tests.helpers.moe_golden import load_layer, random_expert

TORCH = '{"baseTimeNanoseconds": 1000000, "traceEvents": [\n{"ph": "X", "name": "op", "ts": 1}]}'


def small_engine() -> ExpertEngine:
    rng = np.random.default_rng(0)
    engine = ExpertEngine(32, 32, 2, 1, weight_format="float32", num_threads=1)
    load_layer(engine, 0, {expert: random_expert(rng, 32, 32) for expert in (0, 1)})
    return engine


def compute(engine: ExpertEngine) -> None:
    ids = np.array([[0, 1]], np.int32)
    engine.forward(0, np.ones((1, 32), np.float32), ids, np.ones((1, 2), np.float32))


@asynccontextmanager
async def expert_server(directory: Path, engine: ExpertEngine | None) -> AsyncIterator[str]:
    """The real servicer around an engine; None: nothing is loaded yet. Yields its address."""
    loaded = None if engine is None else SimpleNamespace(engine=engine)
    servicer = ExpertServicer(SimpleNamespace(loaded=loaded), None, lambda timeout: True)  # type: ignore[arg-type]
    server = grpc.server(ThreadPoolExecutor(8))
    expert_pb2_grpc.add_ExpertServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    address = f"unix:{directory}/expert.sock"
    server.add_insecure_port(address)
    server.start()
    try:
        yield address
    finally:
        await asyncio.to_thread(server.stop(None).wait)


async def soon(question: Callable[[], Awaitable[bool]]) -> None:
    """Returns once the answer is yes."""
    for _ in range(3000):
        if await question():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


def spans_of(server: pb.ExpertSpans) -> np.ndarray:
    return np.frombuffer(server.spans, "<i8").reshape(-1, 7)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own profiler takes seconds to load where the machine is busy; one test uses it."""
    monkeypatch.setattr(profiler_module, "_start_torch", lambda: None)


@pytest.mark.usefixtures("without_torch")
async def test_servers_and_calls_are_noted_for_that_time(tmp_path: Path) -> None:
    """What is computed meanwhile is there, on this process's clock; nothing before or after."""
    engine, client = small_engine(), SimpleNamespace(call_log=None, is_device_driven=False)
    async with expert_server(tmp_path, engine) as address:
        profiler = EngineProfiler([address, f"unix:{tmp_path}/nobody"], client, 1, lambda: 0)  # type: ignore[arg-type]
        compute(engine)
        before = time.monotonic_ns()
        running = asyncio.create_task(profiler.run(0.5))

        async def has_begun() -> bool:
            return client.call_log is not None

        await soon(has_begun)
        assert client.call_log is not None
        client.call_log.append((3, 2, before, before + 5, before + 9))
        while not running.done():
            await asyncio.to_thread(compute, engine)
        answer = await running
        assert client.call_log is None
        assert engine.stop_trace()[0].size == 0
    (server,) = answer.servers
    spans = spans_of(server)
    assert len(spans) >= 3
    assert spans[:, 5].min() > before
    assert (server.clock_offset_ns, server.num_threads) == (0, 1)
    assert np.frombuffer(answer.calls, "<i8").tolist() == [3, 2, before, before + 5, before + 9]
    assert [note.startswith("expert server 1: UNAVAILABLE") for note in answer.notes] == [True]


@pytest.mark.usefixtures("without_torch")
async def test_one_profile_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused, here and by the server; when a caller leaves, its profile ends at once."""
    engine, begun = small_engine(), threading.Event()
    start_trace = engine.start_trace

    def noted(most: int) -> None:
        start_trace(most)
        begun.set()

    monkeypatch.setattr(engine, "start_trace", noted)
    async with expert_server(tmp_path, engine) as address:
        profiler = EngineProfiler([address], None, 1, lambda: 0)
        running = asyncio.create_task(profiler.run(50))
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = expert_pb2_grpc.ExpertStub(channel)  # type: ignore[no-untyped-call]

            async def ask(seconds: float) -> grpc.StatusCode:
                try:
                    async for _ in stub.Profile(expert_pb2.ProfileRequest(seconds=seconds)):
                        pass
                except grpc.aio.AioRpcError as error:
                    return error.code()
                return grpc.StatusCode.OK

            async def is_answered() -> bool:
                return await ask(0.01) is grpc.StatusCode.OK

            assert await asyncio.to_thread(begun.wait, 30)
            assert await ask(0.01) is grpc.StatusCode.FAILED_PRECONDITION
            assert await ask(61) is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(ProfileRunning, match="another profile is running"):
                await profiler.run(1)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await soon(is_answered)
        assert len((await profiler.run(0.01)).servers) == 1


async def test_a_server_that_still_loads_refuses(tmp_path: Path) -> None:
    """There is nothing to watch."""
    async with expert_server(tmp_path, None) as address, grpc.aio.insecure_channel(address) as channel:
        stub: Any = expert_pb2_grpc.ExpertStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError, match="no experts are loaded"):
            async for _ in stub.Profile(expert_pb2.ProfileRequest(seconds=1)):
                pass


@pytest.mark.usefixtures("without_torch")
async def test_own_part_ends_when_it_is_large_enough() -> None:
    """Steps bound the size of torch's trace; the note says so."""
    steps = iter(range(0, 10**9, 10**6))
    answer = await EngineProfiler([], None, 4, lambda: next(steps)).run(50)
    assert "steps are what a trace may hold" in answer.notes[0]


@pytest.mark.usefixtures("without_torch")
async def test_streamed_prompts_bound_a_trace() -> None:
    """A step that streams experts fills a trace many times as fast: what it launches counts before it ends.

    A reader of the trace sees what was left out, at the time from which on it is missing.
    """
    streamed = itertools.count(0, MOST_OPERATIONS // 3)
    before = time.monotonic_ns()
    answer = await EngineProfiler([], None, 4, lambda: 7, lambda: next(streamed)).run(50)
    (note,) = answer.notes
    assert note.startswith("the engine's part ends after 0.0")
    assert "of 50 s: 0 steps, with experts streamed for prompts, are what a trace may hold" in note
    document = json.loads(chrome_trace(answer))
    (mark,) = document["traceEvents"]
    assert (mark["ph"], mark["s"], mark["name"]) == ("i", "g", note)
    at = document["baseTimeNanoseconds"] + 1000 * mark["ts"] - answer.unix_offset_ns
    assert before < at < time.monotonic_ns()


class _Stopped:
    """A profiler of torch's whose trace is `content`."""

    def __init__(self, content: str) -> None:
        self.content, self.stopped, self.exported = content, 0, 0

    def stop(self) -> None:
        self.stopped += 1

    def export_chrome_trace(self, path: str) -> None:
        self.exported += 1
        Path(path).write_text(self.content)


async def test_a_caller_who_leaves_costs_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine stands still while one is written; torch's profiler ends without it, too."""
    torchs, looked = _Stopped(TORCH), threading.Event()
    monkeypatch.setattr(profiler_module, "_start_torch", lambda: torchs)
    profiler = EngineProfiler([], None, 1, lambda: looked.set() or 0)  # type: ignore[func-returns-value]
    running = asyncio.create_task(profiler.run(50))
    assert await asyncio.to_thread(looked.wait, 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (torchs.stopped, torchs.exported) == (1, 0)
    assert (await profiler.run(0.01)).torch_trace
    assert (torchs.stopped, torchs.exported) == (2, 1)


@pytest.mark.parametrize("has_kernels", [True, False])
async def test_kernels_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, has_kernels: bool) -> None:
    """CUPTI that gives nothing, as next to another tool, is no error of torch's; the command says it."""
    kernel = '{"ph": "X", "cat": "kernel", "name": "k", "ts": 2}'
    content = TORCH.replace("]}", f", {kernel}]}}") if has_kernels else TORCH
    monkeypatch.setattr(profiler_module, "_start_torch", lambda: _Stopped(content))
    monkeypatch.setattr(profiler_module, "_has_gpu", lambda: True)
    lines = summary(await EngineProfiler([], None, 1, lambda: 0).run(0.01))
    assert any("no GPU kernels" in line for line in lines) is not has_kernels
    assert any("engine: 1 GPU kernels, " in line for line in lines) is has_kernels


def test_unix_time_is_read_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that loses the processor between two clocks does not move the expert servers' times."""
    true = time.time_ns() - time.monotonic_ns()
    late, read_unix = iter([True, True, True]), time.time_ns

    def interrupted() -> int:
        unix = read_unix()
        if next(late, False):
            time.sleep(0.1)
        return unix

    monkeypatch.setattr(time, "time_ns", interrupted)
    assert abs(unix_offset_ns() - true) < 30_000_000


async def test_torch_watches_all_threads() -> None:
    """Operations of a thread that existed before are in the trace, in nanoseconds since 1970."""
    stop = threading.Event()

    def work() -> None:
        import torch

        while not stop.wait(0.001):
            torch.ones(4).cumsum(0)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        begin = time.time_ns()
        answer = await EngineProfiler([], None, 1, lambda: 0).run(1.0)
        end = time.time_ns()
    finally:
        stop.set()
        thread.join()
    document = json.loads(chrome_trace(answer))
    found = [event for event in document["traceEvents"] if event["name"] == "aten::cumsum"]
    assert found
    times = [document["baseTimeNanoseconds"] + 1000 * event["ts"] for event in found]
    assert begin - 10**9 < min(times)
    assert max(times) < end + 10**9


class _Clock:
    """A server on another host, whose clock is behind by `offset` and whose answers take a while."""

    def __init__(self, offset: int, boot: str) -> None:
        self.offset, self.boot, self.asked = offset, boot, 0

    async def GetClock(self, request: Any, **_: float) -> expert_pb2.GetClockResponse:
        self.asked += 1
        await asyncio.sleep(0.02 if self.asked != 3 else 0.0)
        now = time.monotonic_ns() - self.offset
        if self.asked != 3:
            await asyncio.sleep(0.1)
        return expert_pb2.GetClockResponse(monotonic_nanoseconds=now, boot_id=self.boot)


async def test_clocks_of_other_hosts_are_set_by_the_quickest_answer() -> None:
    """Clocks agree to within that answer's time; under the same kernel it is the same clock, without any
    error.
    """
    assert abs(await clock_offset(_Clock(10**12, "another")) - 10**12) < 20_000_000
    same = _Clock(0, boot_id())
    assert await clock_offset(same) == 0
    assert same.asked == 1


def test_seconds_are_checked() -> None:
    """Nothing, less than nothing, not a number, too long."""
    assert profile_seconds(60) == 60
    for wrong in (0, -1, float("nan"), 61):
        with pytest.raises(UserError, match="allowed: above 0, at most 60"):
            profile_seconds(wrong)


def answered(torch_trace: str) -> pb.ProfileResponse:
    """Server 1's clock is 4 us behind the engine's, Unix time 5 000 000 ns before its."""
    spans = np.array([[2, 0, 3, 17, 4, 2_000, 3_000], [0, 1, 3, -1, 6, 1_000, 5_000]], "<i8")
    server = pb.ExpertSpans(index=1, spans=spans.tobytes(), dropped=7, num_threads=1, clock_offset_ns=4_000)
    calls = np.array([[3, 6, 4_500, 4_600, 9_500]], "<i8")
    return pb.ProfileResponse(
        torch_trace=gzip.compress(torch_trace.encode()) if torch_trace else b"",
        unix_offset_ns=5_000_000,
        servers=[server],
        calls=calls.tobytes(),
        notes=["no GPU here"],
    )


@pytest.mark.parametrize("torch_trace", [TORCH, ""])
def test_document(torch_trace: str, tmp_path: Path) -> None:
    """Torch's events stay as they are; ours stand at the same times, named by what they are."""
    answer = answered(torch_trace)
    document = json.loads(chrome_trace(answer))
    base = document["baseTimeNanoseconds"]
    events = {event["name"]: event for event in document["traceEvents"] if event["ph"] == "X"}
    assert ("op" in events) is bool(torch_trace)

    def nanoseconds(name: str) -> tuple[int, int]:
        event = events[name]
        begin = round(base + 1000 * event["ts"])
        return begin, begin + round(1000 * event["dur"])

    assert nanoseconds("gate_up expert 17") == (5_006_000, 5_007_000)
    assert events["gate_up expert 17"]["args"] == {"layer": 3, "rows": 4, "expert": 17}
    layers = [event for event in document["traceEvents"] if event["name"] == "layer 3"]
    assert len({(event["pid"], event["tid"]) for event in layers}) == 3
    names = [event["args"].get("name") for event in document["traceEvents"] if event["ph"] == "M"]
    assert {"expert server 1", "thread 0", "calls", "calls to expert servers"} <= set(names)
    assert summary(answer)[-2:] == [
        "expert server 1: 2 spans of 1 threads, 7 more were too many, clock set by 0.004 ms",
        "no GPU here",
    ]
    write_trace(answer, tmp_path / "t.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes())) == document
    with pytest.raises(UserError, match="cannot be written"):
        write_trace(answer, tmp_path / "nowhere" / "t.json")


def test_nothing_to_show_is_a_document() -> None:
    """An engine without expert servers, and without torch's profiler; the trace says why."""
    assert json.loads(chrome_trace(pb.ProfileResponse()))["traceEvents"] == []
    assert summary(pb.ProfileResponse()) == []
    idle = pb.ProfileResponse(servers=[pb.ExpertSpans(num_threads=2)])
    assert "send requests while a profile runs" in summary(idle)[-1]


def test_where_a_trace_goes_is_checked_first(tmp_path: Path) -> None:
    """No user waits a minute for a file that cannot be written."""
    check_output(tmp_path / "t.json")
    (tmp_path / "t.json").touch()
    check_output(tmp_path / "t.json")
    with pytest.raises(UserError, match="it is a directory"):
        check_output(tmp_path)
    with pytest.raises(UserError, match=r"nowhere is not there, or not writable"):
        check_output(tmp_path / "nowhere" / "t.json")


PROFILED = """
import threading
from gpu_service.server.profiler import _exported, _start_torch
def profiled():
    profiler = _start_torch()
    profiler.stop()
    _exported(profiler)
threads = [threading.Thread(target=profiled) for _ in range(2)]
for thread in threads:
    thread.start()
    thread.join()
"""


def test_torchs_profiler_is_silent() -> None:
    """A profile on demand writes no lines of torch's own library into the log of `moebius serve`."""
    ended = subprocess.run([sys.executable, "-c", PROFILED], capture_output=True, text=True, check=True)
    lines = ForwardedLines("gpu", json_logs=False)
    assert [line for line in ended.stderr.splitlines() if lines.forwarded(line) is not None] == []
