"""The first of several gateway processes: starts the others, replaces those that end or hang, and adds up
their metrics. It serves no requests itself, so none can disturb it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.processes.shared import KeyTable, Places, shared_memory
from gateway.telemetry.combined import Samples, added, rendered, samples_of
from gateway.workers.channel import Channel, ChannelClosed, Heartbeat, MemberSetup, bound_socket
from moebius.checkpoint.errors import CheckpointError
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.models.identity import TEMPLATE_FILE, IdentityRecord, Parts, file_digest, text_parts

logger = structlog.get_logger(__name__)
_LOOK_S = 0.25
_START_S = 120.0  # to the first heartbeat
_READY_S = 600.0  # for a replacement at SIGHUP
_ANSWER_S = 2.0
_ANY_ANSWER_S = 4.5  # shorter than the limit of probes and scrapes: see `gateway/telemetry/operations.py`
_STABLE_S = 10.0  # one that ran for longer is restarted at once
_LONGEST_PAUSE_S = 5.0
_STOP_MARGIN_S = 5.0
_TOTALS = ("counter", "histogram")


@dataclass(eq=False)
class _Process:
    """One serving process; filled by `Group._start`."""

    seat: int
    index: int  # its place in `Places`
    popen: subprocess.Popen[bytes]
    channel: Channel
    listens_when_ready: bool
    talking: asyncio.Task[None] | None = None
    started_at: float = field(default_factory=time.monotonic)
    beat_at: float | None = None  # time of its last heartbeat
    samples: Samples = field(default_factory=dict)  # the last that it sent
    refusal: str = ""  # changed files, as last reported
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def silent_s(self, now: float) -> float:
        """Returns the seconds since its last heartbeat."""
        return now - (self.started_at if self.beat_at is None else self.beat_at)


class Group:
    """Starts and monitors all serving processes; `run` is its lifetime."""

    def __init__(self, config: MoebiusConfig) -> None:
        """Reserves the port. Raises StartupError."""
        self._count = config.gateway.workers
        self._own_directory = ""  # of stored responses, which any process may need
        if config.gateway.stored_responses and not config.gateway.stored_responses_dir:
            self._own_directory = tempfile.mkdtemp(prefix="moebius-responses-")
        # Twice the count: at SIGHUP each process's replacement starts before it has ended.
        self._memory = shared_memory(2 * self._count)
        self._places = Places(2 * self._count, 0, self._memory)
        self._keys = KeyTable(2 * self._count, 0, self._memory)
        self._held = bound_socket(config.gateway.host, config.gateway.port)  # also while none listens
        port = int(self._held.getsockname()[1])
        stored = config.gateway.stored_responses_dir or self._own_directory
        gateway = config.gateway.model_copy(update={"port": port, "stored_responses_dir": stored})
        self._config = config.model_copy(update={"gateway": gateway})
        self._seats: list[_Process | None] = [None] * self._count
        self._processes: set[_Process] = set()
        self._gone: Samples = {}  # counters of processes that have ended
        self._broken: UserError | None = None
        self._files = _files_of(config)
        self._refusals: dict[int, str] = {}  # by seat: why no process could start
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        # Whether a SIGHUP is pending for which no replacement has begun; and whether one is running.
        self._replacement_is_due = self._is_replacing = False
        self._registry = CollectorRegistry()
        self._restarts = Counter(
            "moebius:gateway_worker_restarts", "Gateway processes that were replaced", registry=self._registry
        )
        running = Gauge("moebius:gateway_workers", "Gateway processes that run", registry=self._registry)
        running.set_function(lambda: len(self._processes))

    async def run(self) -> int:
        """Runs until a signal. Returns the exit code; raises StartupError when no model can be served."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._ask_for_replacement)
        for seat in range(self._count):
            self._seats[seat] = await self._start(seat)
        watching = asyncio.create_task(self._watch())
        await self._stopping.wait()
        await self._wait_for_all(self._config.supervisor.stop_timeout_s + _STOP_MARGIN_S)
        tasks = [watching, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._held.close()
        if self._own_directory:
            shutil.rmtree(self._own_directory, ignore_errors=True)
        os.close(self._memory)
        if self._broken is not None:
            raise self._broken
        return 0

    def _spawn_task(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, seat: int) -> _Process:
        """Starts a process, once there is a place in the shared memory: replaced processes keep theirs while
        they finish their requests. Raises OSError when it cannot be started."""
        places = set(range(2 * self._count))
        while not (free := places - {one.index for one in self._processes}):  # noqa: ASYNC110 - they end
            await asyncio.sleep(_LOOK_S)
        return self._started(seat, min(free))

    def _started(self, seat: int, index: int) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "gateway.workers.member"]
            try:
                popen = subprocess.Popen(command, stdin=theirs.fileno(), pass_fds=(self._memory,))
            except OSError:
                ours.close()
                raise
        another = any(one.ready.is_set() for one in self._processes)
        setup = pickle.dumps(
            MemberSetup(self._config, index, 2 * self._count, self._memory, another, self._files)
        )
        ours.sendall(struct.pack("!I", len(setup)) + setup)
        channel = Channel(lambda name, value: self._answer(process, name, value))
        process = _Process(seat, index, popen, channel, another)
        process.talking = asyncio.create_task(process.channel.run(ours))
        self._processes.add(process)
        logger.info("gateway process starts", worker=seat, pid=popen.pid)
        return process

    async def _answer(self, process: _Process, name: str, value: Any) -> Any:
        if name == "beat":
            assert isinstance(value, Heartbeat)
            process.beat_at = time.monotonic()
            process.samples = value.samples or process.samples
            process.refusal = value.refusal
            if value.is_ready:
                process.ready.set()
                self._refusals.pop(process.seat, None)
        elif name == "leaving":
            process.samples = value
        elif name == "broken" or (name == "refused" and not self._has_ready):
            self._broken = value
            self._stop(None)
        elif name == "metrics":
            return await self.metrics()
        elif name == "why_not_ready":
            return self._why_not_ready()
        return None

    def _why_not_ready(self) -> str:
        """Returns why a listening process could not answer or could not be replaced; empty: none."""
        seated = [one for one in self._seats if one is not None]
        refusals = [*self._refusals.values(), *(one.refusal for one in seated if one.refusal)]
        if refusals:
            return refusals[0]
        known = all(one.ready.is_set() or one.listens_when_ready for one in self._processes)
        return "" if known else "a gateway process is starting"

    @property
    def _has_ready(self) -> bool:
        return any(one.ready.is_set() for one in self._processes)

    async def metrics(self) -> bytes:
        """Returns the metrics of all processes, ended ones included, as Prometheus text."""
        processes = list(self._processes)
        await asyncio.gather(*(self._ask_samples(process) for process in processes))
        parts = [self._gone, *(process.samples for process in processes), samples_of(self._registry)]
        return rendered(added(parts))

    async def all_metrics(self) -> bytes:
        """Returns the text of `GET /metrics`, engines included, which one of the other processes polls."""
        answer = await self._ask_one("page")
        return await self.metrics() if answer is None else bytes(answer)

    async def not_ready(self) -> str:
        """Returns why a request sent now would not be answered, or an empty string if it would."""
        answer = await self._ask_one("not_ready")
        if answer is None:
            return "no gateway process answers" if self._has_ready else "no gateway process has started yet"
        return str(answer)

    async def _ask_one(self, name: str) -> Any:
        """Returns the first reply of the others, asked in turn, ready ones first, or None if none replies.

        If one takes long, the next is asked as well: it may hang, or wait for an engine that is silent.
        """
        waiting = sorted(self._processes, key=lambda one: not one.ready.is_set())
        asked: set[asyncio.Task[Any]] = set()
        end = time.monotonic() + _ANY_ANSWER_S
        try:
            while (waiting or asked) and (left_s := end - time.monotonic()) > 0:
                if waiting:
                    asked.add(asyncio.create_task(waiting.pop(0).channel.ask(name)))
                timeout_s = min(_ANSWER_S, left_s) if waiting else left_s
                done, asked = await asyncio.wait(
                    asked, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    if task.exception() is None:
                        return task.result()
        finally:
            for task in asked:
                task.cancel()
        return None

    async def _ask_samples(self, process: _Process) -> None:
        """Updates a process's metrics; if it does not reply, its last ones stay."""
        with contextlib.suppress(TimeoutError, ChannelClosed):
            async with asyncio.timeout(_ANSWER_S):
                process.samples = await process.channel.ask("samples")

    async def _watch(self) -> None:
        """Detects processes that have ended or hang; never returns. Time in which this process itself was
        stopped does not count against the others, which may have been stopped, too."""
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            missed_s = max(0.0, now - looked_at - 2 * _LOOK_S)
            looked_at = now
            for process in list(self._processes):
                if missed_s:
                    process.started_at += missed_s
                    process.beat_at = None if process.beat_at is None else process.beat_at + missed_s
                limit_s = _START_S if process.beat_at is None else self._config.supervisor.hang_timeout_s
                if process.popen.poll() is not None:
                    self._note_end(process)
                elif process.silent_s(now) > limit_s:
                    logger.warning("gateway process hangs", worker=process.seat, pid=process.popen.pid)
                    process.popen.kill()

    def _note_end(self, process: _Process) -> None:
        self._processes.discard(process)
        self._places.clear(process.index)
        self._keys.clear(process.index)
        self._gone = added([self._gone, process.samples], _TOTALS)
        if self._stopping.is_set() or self._seats[process.seat] is not process:
            return
        lived_s = time.monotonic() - process.started_at
        logger.warning(
            "gateway process ended",
            worker=process.seat,
            pid=process.popen.pid,
            status=process.popen.returncode,
            seconds=round(lived_s, 1),
        )
        self._seats[process.seat] = None
        if process.refusal:
            self._refusals[process.seat] = process.refusal
        self._spawn_task(self._restart(process.seat, 0.0 if lived_s > _STABLE_S else _pause_s(lived_s)))

    async def _restart(self, seat: int, pause_s: float) -> None:
        """Fills an empty seat, retrying as needed: memory or process slots may be short."""
        while True:
            await asyncio.sleep(pause_s)
            if self._seats[seat] is not None:
                return  # a running replacement filled it
            try:
                new = await self._start(seat)
            except OSError as error:
                logger.error("a gateway process cannot be started", worker=seat, reason=str(error))
                pause_s = _LONGEST_PAUSE_S
                continue
            self._restarts.inc()
            self._seat(new)
            return

    def _seat(self, new: _Process) -> None:
        """Gives a process its seat; its predecessor there finishes its requests and ends."""
        old, self._seats[new.seat] = self._seats[new.seat], new
        if old is None:
            return
        try:
            old.channel.notify("retire")
        except ChannelClosed:  # it has ended, or has just started and has no clients
            old.popen.terminate()

    def _ask_for_replacement(self) -> None:
        """Replaces all processes at SIGHUP. A running replacement is repeated: files may have changed."""
        self._replacement_is_due = True
        if not self._is_replacing and not self._stopping.is_set():
            self._is_replacing = True
            self._spawn_task(self._replace_all())

    async def _replace_all(self) -> None:
        """Replaces processes one after the other, each once its successor can serve: files are read again."""
        try:
            while self._replacement_is_due:
                self._replacement_is_due = False
                self._update_digests()
                logger.info("gateway processes are replaced")
                for seat in range(self._count):
                    if self._seats[seat] is None:
                        continue  # it is being started already
                    if not await self._replace(seat):
                        break
        finally:
            self._is_replacing = False

    def _update_digests(self) -> None:
        """Updates the expected digests, as the operator asked for: files may differ now, except the engine's,
        with which each new process compares its own."""
        self._files = _files_of(self._config)
        template = {name: value for name, value in self._files.items() if name == TEMPLATE_FILE}
        if template:
            IdentityRecord(self._config.model.identity_file).replace(template)

    async def _replace(self, seat: int) -> bool:
        """Returns whether a new process took the seat; if not, the present one stays."""
        try:
            new = await self._start(seat)
        except OSError as error:
            logger.error("a gateway process cannot be started", worker=seat, reason=str(error))
            return False
        end = time.monotonic() + _READY_S
        while not new.ready.is_set():
            if new.popen.poll() is not None or time.monotonic() > end:
                logger.error("the new gateway process cannot serve: the running ones continue", worker=seat)
                new.popen.kill()
                return False
            await asyncio.sleep(_LOOK_S)
        self._seat(new)
        return True

    def _stop(self, number: int | None) -> None:
        if number is not None:
            logger.info("stopping", signal=signal.Signals(number).name)
        for task in self._tasks:
            task.cancel()  # prevents further starts
        for process in self._processes:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGTERM)
        self._stopping.set()

    async def _wait_for_all(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while self._processes and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S / 5)
            for process in list(self._processes):
                if process.popen.poll() is not None:
                    self._processes.discard(process)
        for process in self._processes:
            logger.warning("gateway process does not end", pid=process.popen.pid)
            process.popen.kill()
            process.popen.wait()


def _files_of(config: MoebiusConfig) -> Parts:
    """Returns digests of the files to read; empty if they cannot be read, which the processes then report."""
    model, template = config.model.model, config.gateway.chat_template
    try:
        if model:
            return text_parts(model, template)
        return {TEMPLATE_FILE: file_digest(Path(template))} if template else {}
    except CheckpointError as error:
        logger.warning("the model's files cannot be read", reason=str(error))
        return {}


def _pause_s(lived_s: float) -> float:
    """Returns the restart delay: none after _STABLE_S of life, the maximum after an immediate end."""
    return _LONGEST_PAUSE_S * (1.0 - lived_s / _STABLE_S)
