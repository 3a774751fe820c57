"""Watches this process and its expert servers for some seconds, for `moebius profile`.

Until then nothing of it exists. Expert servers note what their threads compute, torch's profiler what
GPU or CPU do, the expert client when it submitted and collected; who asked puts it together.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import structlog
import torch

from gpu_service.experts.client import ExpertCall, ExpertClient
from moebius.errors import UserError
from moebius.network.grpc_channels import open_aio_channel
from protos import engine_pb2 as pb
from protos import expert_pb2, expert_pb2_grpc

_log = structlog.get_logger(__name__)
MOST_SECONDS = 60.0
# Torch's trace takes some 250 bytes for an operation, and the engine waits while it is written: the profiler
# ends early rather than with more.
MOST_OPERATIONS = 300_000
# Of one layer in one step: attention, norms, router, shared experts. On a GPU kernels, mostly.
_OPERATIONS_PER_LAYER = {"cpu": 200, "cuda": 60}
_MOST_CALLS = 400_000
_LOOK_S = 0.02
_CLOCK_QUESTIONS = 8
_OPTIONS = [("grpc.max_receive_message_length", -1)]
_KINETO_SILENT = "6"
# How Kineto writes the category of what a GPU computes.
GPU_KERNEL = b'"cat": "kernel"'
_NO_KERNELS = (
    "no GPU kernels: no step was computed meanwhile, or CUPTI gave none; it serves one tool at a time "
    "(Nsight Systems is another) and needs the libcupti of torch's CUDA version"
)
_CLOCK_READINGS = 8
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ProfileRunning(UserError):
    """One at a time."""


class EngineProfiler:
    """The profiler of rank 0; one event loop calls it."""

    def __init__(
        self,
        addresses: Sequence[str],
        client: ExpertClient | None,
        num_layers: int,
        count_steps: Callable[[], int],
        count_streamed: Callable[[], int] = lambda: 0,
    ) -> None:
        """`addresses`: of the expert servers, by share; `count_steps`: forward passes since the start.

        `count_streamed`: operations since the start that copy experts to the GPU and compute them there, of
        which a step with a long prompt has many times as many as of all others.
        """
        self._addresses = tuple(addresses)
        self._client = client
        self._num_layers = num_layers
        self._count_steps = count_steps
        self._count_streamed = count_streamed
        self._until = 0.0  # time.monotonic(); 0: none runs

    async def run(self, seconds: float) -> pb.ProfileResponse:
        """Returns everything of the next `seconds`, which `profile_seconds` has checked.

        Raises ProfileRunning.
        """
        if self._until:
            left = self._until - time.monotonic()
            state = f"for {left:.0f} s more" if left > 0 else "it is being written"
            raise ProfileRunning(f"another profile is running ({state})")
        self._until = time.monotonic() + seconds
        answer = pb.ProfileResponse(unix_offset_ns=unix_offset_ns())
        started, stop = threading.Event(), threading.Event()
        own = asyncio.get_running_loop().run_in_executor(None, self._watch, seconds, started, stop, answer)
        try:
            await asyncio.to_thread(started.wait)
            self._until = time.monotonic() + seconds
            servers = [self._server(index, seconds) for index in range(len(self._addresses))]
            found = await asyncio.gather(*servers)
            await asyncio.shield(own)
        finally:
            # Also when the caller has gone: nothing of it goes on.
            stop.set()
            try:
                await asyncio.shield(own)
            finally:
                self._until = 0.0
        for index, spans in enumerate(found):
            if isinstance(spans, str):
                answer.notes.append(f"expert server {index}: {spans}")
            else:
                answer.servers.append(spans)
        return answer

    def _watch(
        self, seconds: float, started: threading.Event, stop: threading.Event, answer: pb.ProfileResponse
    ) -> None:
        """This process's part. In one thread: torch ends a profile only where it was begun."""
        calls: list[ExpertCall] = []
        profiler = None
        try:
            profiler = _start_torch()
        except Exception as error:  # of torch, CUPTI or a profiler that another process runs
            _log.warning("torch's profiler does not start", error=str(error))
            answer.notes.append(f"no GPU kernels or CPU operations: {error}")
        try:
            if self._client is not None:
                self._client.call_log = calls
            started.set()
            self._wait(seconds, stop, calls, answer)
            answer.engine_end_ns = time.monotonic_ns()
        finally:
            if self._client is not None:
                self._client.call_log = None
            started.set()
            if profiler is not None:
                # The engine waits while a trace is written: none is for a caller who has gone.
                self._take_trace(profiler, answer, wanted=not stop.is_set())
        answer.calls = np.array(calls, dtype="<i8").reshape(-1, 5).tobytes()
        if self._client is not None and self._client.is_device_driven:
            answer.notes.append("calls of the mailbox are kernels of the GPU: pack_and_ring, wait_and_add")

    def _take_trace(self, profiler: Any, answer: pb.ProfileResponse, wanted: bool) -> None:
        """Ends torch's profiler; its trace, or why there is none, goes into `answer`."""
        try:
            profiler.stop()
            trace = _exported(profiler) if wanted else b""
        except (RuntimeError, OSError) as error:
            answer.notes.append(f"no GPU kernels or CPU operations: {error}")
            return
        if wanted and _has_gpu() and GPU_KERNEL not in trace:
            answer.notes.append(_NO_KERNELS)
        answer.torch_trace = gzip.compress(trace, compresslevel=1) if trace else b""

    def _wait(
        self, seconds: float, stop: threading.Event, calls: Sequence[object], answer: pb.ProfileResponse
    ) -> None:
        begin, first, first_streamed = time.monotonic(), self._count_steps(), self._count_streamed()
        a_step = self._num_layers * _OPERATIONS_PER_LAYER["cuda" if _has_gpu() else "cpu"]
        while not stop.wait(min(_LOOK_S, max(0.0, begin + seconds - time.monotonic()))):
            passed = time.monotonic() - begin
            if passed >= seconds:
                return
            steps, streamed = self._count_steps() - first, self._count_streamed() - first_streamed
            if steps * a_step + streamed >= MOST_OPERATIONS or len(calls) >= _MOST_CALLS:
                experts = ", with experts streamed for prompts," if streamed else ""
                answer.notes.append(
                    f"the engine's part ends after {passed:.2f} of {seconds:g} s: {steps} steps{experts} are "
                    "what a trace may hold"
                )
                return

    async def _server(self, index: int, seconds: float) -> pb.ExpertSpans | str:
        """One server's spans, or why there are none."""
        found = pb.ExpertSpans(index=index)
        try:
            async with open_aio_channel(self._addresses[index], _OPTIONS) as channel:
                stub: Any = expert_pb2_grpc.ExpertStub(channel)  # type: ignore[no-untyped-call]
                found.clock_offset_ns = await clock_offset(stub)
                request = expert_pb2.ProfileRequest(seconds=seconds)
                pieces = []
                # A server with a long layer under way answers late.
                async for piece in stub.Profile(request, timeout=2 * seconds + 30):
                    pieces.append(piece.spans)
                    found.dropped, found.num_threads = piece.dropped, piece.num_threads
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        found.spans = b"".join(pieces)
        return found


def profile_seconds(seconds: float, most: float = MOST_SECONDS) -> float:
    """Checks a request's time. Raises UserError saying what is allowed."""
    if not 0 < seconds <= most:
        raise UserError(f"seconds is {seconds:g}; allowed: above 0, at most {most:g}")
    return seconds


def unix_offset_ns() -> int:
    """Returns what to add to CLOCK_MONOTONIC for Unix time, nanoseconds.

    Of several readings that during which least time passed: others may have had the processor in between.
    """
    readings = []
    for _ in range(_CLOCK_READINGS):
        before, unix, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, unix - (before + after) // 2))
    return min(readings)[1]


async def clock_offset(stub: Any) -> int:
    """Returns what to add to the server's CLOCK_MONOTONIC for ours, nanoseconds.

    0 under the same kernel, where it is the same clock. Otherwise the answer to the quickest of several
    questions is taken to be written in the middle of it. Raises AioRpcError.
    """
    best: tuple[int, int] | None = None
    for _ in range(_CLOCK_QUESTIONS):
        asked = time.monotonic_ns()
        answer = await stub.GetClock(expert_pb2.GetClockRequest(), timeout=5.0)
        answered = time.monotonic_ns()
        if answer.boot_id and answer.boot_id == boot_id():
            return 0
        offset = (asked + answered) // 2 - answer.monotonic_nanoseconds
        if best is None or answered - asked < best[0]:
            best = (answered - asked, offset)
    assert best is not None
    return best[1]


def boot_id() -> str:
    """Returns the id of the running kernel; empty where it cannot be read."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def _has_gpu() -> bool:
    """Returns whether this process computes on one."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _start_torch() -> Any:
    """Returns a profiler that runs: of all threads, and of the GPU where there is one."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    # Its library, Kineto, logs every start and stop above the level of errors. It reads the level once, when
    # it is first used, which is here. A level that a user has set stays.
    os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_SILENT)
    activities = [ProfilerActivity.CPU]
    if _has_gpu():
        activities.append(ProfilerActivity.CUDA)
    config = _ExperimentalConfig(profile_all_threads=True)
    profiler = profile(activities=activities, experimental_config=config)
    profiler.start()
    return profiler


def _exported(profiler: Any) -> bytes:
    """Returns the trace of a profiler that has been stopped, as JSON."""
    with tempfile.TemporaryDirectory(prefix="moebius-profile-") as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()
