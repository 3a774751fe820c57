"""What the processes of a served checkpoint use: memory, descriptors, threads, KV pages, shared memory."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import grpc
import psutil

from gateway.prompts.worker import COMMAND
from protos import engine_pb2, engine_pb2_grpc
from tests.helpers.stack import Stack, mailboxes_of

MIB = 2**20
SHARED_MEMORY = Path("/dev/shm")
# Younger processes are still starting: what they use says nothing of growth.
GROWN_UP_S = 3.0
# Part of a drill whose samples are left out: caches fill, allocators settle.
WARM_UP = 0.1


@dataclass(frozen=True)
class Usage:
    """The usage of one process, or of several of one name; filled by `usage`."""

    rss_mib: float
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Sample:
    """One look; filled by `look`."""

    # Of time.monotonic().
    at: float
    processes: dict[str, Usage]
    shared_memory_mib: float
    # Of the engine; None when it did not answer.
    used_tokens: int | None
    cached_tokens: int | None
    requests: int | None


def processes_of(stack: Stack) -> dict[str, list[psutil.Process]]:
    """Name -> live processes: supervisor, gateway, prompts (those that the gateway starts), gpu, expert-N."""
    found: dict[str, list[psutil.Process]] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        found["supervisor"] = [psutil.Process(stack.process.pid)]
        for child in found["supervisor"][0].children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                name = "prompts" if child.name() == COMMAND else _name(child.cmdline())
                if name is not None and child.status() != psutil.STATUS_ZOMBIE:
                    found.setdefault(name, []).append(child)
    return found


def _name(command: Sequence[str]) -> str | None:
    if "moebius" in command and "--config" in command:
        return Path(command[command.index("--config") + 1]).stem
    return None


def look(stack: Stack) -> Sample:
    """Returns all numbers now."""
    found = {name: _grown_up(members) for name, members in processes_of(stack).items()}
    processes = {name: _usage(members) for name, members in found.items() if members}
    shared = 0.0
    for name in mailboxes_of(stack):
        with contextlib.suppress(OSError):
            shared += (SHARED_MEMORY / name).stat().st_size / MIB
    load = _load(stack)
    used, cached, requests = (
        (load.num_used_tokens, load.num_cached_tokens, load.num_total_reqs) if load else (None, None, None)
    )
    return Sample(time.monotonic(), processes, shared, used, cached, requests)


def _grown_up(members: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [member for member in members if time.time() - member.create_time() >= GROWN_UP_S]


def _usage(members: Sequence[psutil.Process]) -> Usage:
    rss = descriptors = threads = 0
    for process in members:
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            rss += process.memory_info().rss
            descriptors += process.num_fds()
            threads += process.num_threads()
    return Usage(rss / MIB, descriptors, threads)


def _load(stack: Stack) -> engine_pb2.GetLoadResponse | None:
    for path in Path(stack.state_dir).rglob("gpu.sock"):
        with grpc.insecure_channel(f"unix:{path}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                stub = engine_pb2_grpc.EngineStub(channel)
                return stub.GetLoad(engine_pb2.GetLoadRequest(), timeout=2)
            except grpc.RpcError:
                return None
    return None


@dataclass
class Watcher:
    """Looks every `interval_s` seconds, in a thread, from entering to leaving the `with` block."""

    stack: Stack
    interval_s: float
    samples: list[Sample] = field(default_factory=list)
    # Every process that was ever seen, so that none is missed at the end.
    seen: set[psutil.Process] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Watcher:
        self._thread = threading.Thread(target=self._run, name="watcher")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            for members in processes_of(self.stack).values():
                self.seen.update(members)
            self.samples.append(look(self.stack))


@dataclass(frozen=True)
class Drift:
    """One number at the begin and at the end of a drill; filled by `drifts`."""

    name: str
    # Medians over the first and the last third after the warm-up.
    first: float
    last: float
    # How much `last` may be above `first`.
    allowed: float

    @property
    def flat(self) -> bool:
        """Whether it has not grown."""
        return self.last - self.first <= self.allowed


def drifts(samples: Sequence[Sample]) -> list[Drift]:
    """Returns the growth of everything that was sampled: at most 5 % and 4 MiB of memory, 2 descriptors and
    threads.

    Empty with fewer than 6 samples.
    """
    begin = int(len(samples) * WARM_UP)
    third = (len(samples) - begin) // 3
    if third < 2:
        return []
    first, last = samples[begin : begin + third], samples[-third:]
    found = []
    for name in sorted(set(first[0].processes) & set(last[-1].processes)):
        for unit in ("rss_mib", "descriptors", "threads"):
            ends = [_median(part, name, unit) for part in (first, last)]
            allowed = 4 + 0.05 * ends[0] if unit == "rss_mib" else 2
            found.append(Drift(f"{name} {unit}", *ends, allowed))
    shared = [statistics.median(sample.shared_memory_mib for sample in part) for part in (first, last)]
    return [*found, Drift("shared_memory_mib", *shared, 0.0)]


def _median(samples: Sequence[Sample], name: str, unit: str) -> float:
    return statistics.median(
        getattr(sample.processes[name], unit) for sample in samples if name in sample.processes
    )
