"""The gateway's side of its prompt processes: queues, deadlines, and new ones for those that died."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import structlog

from gateway.admission import RETRY_AFTER_S
from gateway.errors import ApiError
from gateway.prompts.contract import (
    ANSWER_HEADER,
    HEADER,
    READY,
    Answer,
    Broken,
    Kind,
    ModelFiles,
    OtherFiles,
    Prepared,
    Refused,
    WorkerSetup,
    packed,
    too_expensive,
    too_much_memory,
)
from gateway.prompts.worker import OUT_OF_MEMORY
from moebius.errors import WrongIdentity
from moebius.fair_shares import FairShares, in_turns, is_below_share
from moebius.model_identity import REMEDY

logger = structlog.get_logger(__name__)
SMALL_BYTES = 2**16  # bodies up to this size have a process of their own
_GROUP = 8  # small requests that a process gets at once, when more wait
_PIECE = 2**18  # bytes written at once, so that the loop goes on in between
_START_S = 120.0  # a large vocabulary on a busy machine takes many seconds
_WALL_FACTOR = 10  # a request may wait for a processor this much longer than it may use one
_RESTART_S = 1.0
_LIKELY_S = 0.002  # of a request that has not been read: those that are picked together are divided by this
_REFUSED_S = 2.0  # between two looks whether the right files are back


@dataclass(eq=False)
class _Job:
    """One request waiting for a process or in one; filled by `PromptPool.prepare`. Compared by identity."""

    kind: Kind
    body: Sequence[bytes]
    size: int
    client: str  # whose request it is
    answer: asyncio.Future[Answer] = field(default_factory=asyncio.Future)
    deaths: int = 0  # processes that ended in it by another's hand
    alone: bool = False  # a process ended in a group that it was in: whose fault that was is not known

    def end(self, answer: Answer) -> None:
        """Answers it, unless its client has gone."""
        if not self.answer.done():
            self.answer.set_result(answer)


def _spawn(channel: socket.socket) -> subprocess.Popen[bytes]:
    """A new process with `channel` as its standard input."""
    # Each process tokenises one text at a time, for which threads are of no use.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "gateway.prompts.worker"]
    return subprocess.Popen(command, stdin=channel.fileno(), env=environment)


def _message_of(jobs: Sequence[_Job]) -> list[bytes]:
    """Some requests for a process; small ones as one piece, which takes one system call."""
    pieces = [packed([(job.kind, job.size) for job in jobs])]
    for job in jobs:
        pieces += job.body
    return [b"".join(pieces)] if sum(job.size for job in jobs) <= SMALL_BYTES else pieces


class _Died(Exception):
    """A process ended while it worked; `status` as `Popen.returncode`, None: it was too slow."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status


class _Process:
    """One running process; made by `spawn`."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.leaving = False  # it ends after its last answer, having grown

    @classmethod
    async def spawn(cls, files: ModelFiles) -> _Process:
        """A process that begins to read the model's files; OSError when it cannot be started."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                popen = await asyncio.to_thread(_spawn, theirs)
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        process = cls(popen, reader, writer)
        await process._send([packed(files)])
        return process

    async def begin(self, setup: WorkerSetup) -> None:
        """Waits until it can serve; _Died or TimeoutError when it cannot, and is stopped.

        Raises WrongIdentity when it found other files of the model than the gateway has read.
        """
        try:
            async with asyncio.timeout(_START_S):
                await self._send([packed(setup)])
                ready = await self._receive()
            if isinstance(ready, OtherFiles):
                raise WrongIdentity(f"{ready.changes} since the gateway has read it: {REMEDY}")
        except BaseException:
            await self.stop()
            raise
        assert ready == READY, ready

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself or by a signal."""
        return self._process.poll() is not None

    async def run(self, jobs: Sequence[_Job], limit_s: float) -> list[Answer]:
        """The answers; _Died when the process ended without, or took `limit_s` for each by the clock."""
        try:
            async with asyncio.timeout(limit_s * len(jobs)):
                await self._send(_message_of(jobs))
                answers, self.leaving = await self._receive()
        except TimeoutError:
            await self.stop()
            raise _Died(None) from None
        return cast(list[Answer], answers)

    async def _send(self, pieces: Sequence[bytes]) -> None:
        try:
            for piece in pieces:
                for start in range(0, len(piece), _PIECE):
                    self._writer.write(piece[start : start + _PIECE])
                    await self._writer.drain()
        except ConnectionError:
            raise _Died(await self.stop()) from None

    async def _receive(self) -> Any:
        try:
            header = await self._reader.readexactly(ANSWER_HEADER.size)
            length, count = ANSWER_HEADER.unpack(header)
            data = await self._reader.readexactly(length)
            buffers = [await self._read_buffer() for _ in range(count)]
        except (asyncio.IncompleteReadError, ConnectionError):
            raise _Died(await self.stop(kill=False)) from None
        return pickle.loads(data, buffers=buffers)

    async def _read_buffer(self) -> bytes:
        (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return await self._reader.readexactly(length)

    async def stop(self, kill: bool = True) -> int:
        """Closes the connection and waits for the end; returns the exit status."""
        self._writer.close()
        if kill:
            self._process.kill()
        return await asyncio.to_thread(self._process.wait)


class PromptPool:
    """Some processes and what waits for them. One process takes small bodies only, so that large requests
    never make small ones wait for more than one another's; with one process there is no such promise."""

    def __init__(self, processes: int, most_waiting: int) -> None:
        """`most_waiting`: requests that may wait before others get 429."""
        self._count = processes
        self._most_waiting = most_waiting
        # In the order in which they came. A request is in one of them for as long as it waits, however that
        # ends: a process takes it, it is refused, or its client goes away.
        self._small: dict[_Job, None] = {}
        self._large: dict[_Job, None] = {}
        self._shares = FairShares()  # seconds of processes
        self._changed = asyncio.Event()  # something waits
        self._running: dict[int, _Process] = {}
        # Numbers of those whose last start failed.
        self._failed_starts: set[int] = set()
        # By number, of those that cannot be replaced because files have changed: which.
        self._refused: dict[int, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._setup: WorkerSetup | None = None

    @property
    def refusal(self) -> str:
        """Why processes cannot be replaced: which files of the model have changed; empty: they can."""
        return next(iter(self._refused.values()), "")

    @property
    def stands_still(self) -> str:
        """The same where no process runs, so that nothing is answered."""
        return "" if self._running else self.refusal

    async def spawn(self, files: ModelFiles) -> None:
        """Starts the processes that do not run yet; they read the model's files while the engine may load.

        Raises:
            OSError: a process could not be started.
        """
        try:
            for number in set(range(self._count)) - self._running.keys():
                self._running[number] = await _Process.spawn(files)
        except _Died as error:
            raise OSError(f"a process for prompts did not start: {error!r}") from error

    async def start(self, setup: WorkerSetup) -> None:
        """Starts those that `spawn` did not; once they can serve, `prepare` may be called.

        Raises:
            OSError: a process could not be started, or ended while it read the model's files.
            WrongIdentity: these are not those that the gateway has read.
        """
        self._setup = setup
        try:
            await asyncio.gather(*(self._begin(number, setup) for number in range(self._count)))
        except (_Died, TimeoutError) as error:
            raise OSError(f"a process for prompts did not start: {error!r}") from error
        self._tasks = [asyncio.create_task(self._serve(number)) for number in self._running]

    async def _begin(self, number: int, setup: WorkerSetup) -> None:
        """Waits until a process can serve; one that ended while the engine loaded is replaced once."""
        early = self._running.get(number)
        if early is not None:
            try:
                await early.begin(setup)
                return
            except _Died as death:  # the engine may load for half an hour, in which anything may kill it
                del self._running[number]
                logger.warning("a process for prompts ended before it served", status=death.status)
        await self._replace(number, setup)

    async def _replace(self, number: int, setup: WorkerSetup) -> None:
        """A new process that can serve; OSError, _Died or TimeoutError when there is none."""
        process = await _Process.spawn(setup.files)
        await process.begin(setup)
        self._running[number] = process

    async def close(self) -> None:
        """Ends all processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.stop() for process in self._running.values()))
        self._running.clear()
        self._tasks = []

    async def prepare(self, kind: Kind, body: Sequence[bytes], client: str = "") -> Prepared | bytes:
        """The prepared request, or the JSON answer of one that needs no engine. `client`: whose it is.

        Raises:
            ApiError: the request is refused, costs too much, or too many wait.
        """
        if self.stands_still:
            raise ApiError(503, self.stands_still, code="model_files_changed", retry_after_s=RETRY_AFTER_S)
        if self.waiting >= self._most_waiting and not is_below_share(
            Counter(job.client for job in (*self._small, *self._large)), client, self._most_waiting
        ):
            raise ApiError(
                429,
                f"{self._most_waiting} requests wait to be read: try again later",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
        job = _Job(kind, body, sum(map(len, body)), client)
        self._queue(job)
        try:
            answer = await job.answer
        finally:
            self._unqueue(job)
        if isinstance(answer, Refused):
            raise ApiError(answer.status, answer.message, param=answer.param, code=answer.code)
        if isinstance(answer, Broken):
            logger.error("unexpected error", kind=answer.kind, details=answer.details)
            raise ApiError(500, f"internal error: {answer.kind}", code="internal_error")
        return answer

    @property
    def waiting(self) -> int:
        """Requests that no process has taken yet."""
        return len(self._small) + len(self._large)

    def _queue_of(self, job: _Job) -> dict[_Job, None]:
        return self._small if job.size <= SMALL_BYTES else self._large

    def _queue(self, job: _Job) -> None:
        self._queue_of(job)[job] = None
        self._changed.set()

    def _unqueue(self, job: _Job) -> None:
        self._queue_of(job).pop(job, None)

    def _pick(self, number: int) -> list[_Job]:
        """The next requests for this process whose clients still wait: of small ones its share, at most a
        group; empty: none waits."""
        queues = [self._large, self._small]
        if number == 0:
            has_others = not self._refused.keys() >= set(range(1, self._count))
            queues = [self._small] if has_others else [self._small, self._large]
        for queue in queues:
            most = min(_GROUP, -(-len(queue) // self._count)) if queue is self._small else 1
            jobs: list[_Job] = []
            size = 0
            for job in self._in_turns(queue):
                if job.answer.done():  # its client went away in this turn of the event loop
                    continue
                size += job.size
                if len(jobs) == most or (jobs and (size > SMALL_BYTES or job.alone)):
                    break
                jobs.append(job)
                if job.alone:
                    break
            for job in jobs:
                self._unqueue(job)
            if jobs:
                return jobs
        return []

    def _in_turns(self, queue: Iterable[_Job]) -> Iterable[_Job]:
        """As they came, of several clients in turns by the time that their requests took."""
        queues: dict[str, list[_Job]] = {}
        for job in queue:
            queues.setdefault(job.client, []).append(job)
        if len(queues) < 2:
            return queue
        self._shares.settle(queues)
        each = {client: iter(jobs) for client, jobs in queues.items()}
        return in_turns(each, self._shares.served, lambda _job: _LIKELY_S)

    def _charge(self, jobs: Sequence[_Job], seconds: float) -> None:
        """To their clients' shares."""
        for job in jobs:
            self._shares.charge(job.client, seconds / len(jobs))

    async def _serve(self, number: int) -> None:
        """Gives one process its requests, and the next process those after its end."""
        while True:
            process = self._running.get(number)
            if process is None:
                await self._restart(number)
                continue
            while not (jobs := self._pick(number)):
                self._changed.clear()
                await self._changed.wait()
            if process.ended:  # killed while it was idle: that costs the requests none of their tries
                del self._running[number]
                for job in jobs:
                    self._queue(job)
                await process.stop()
                continue
            began = time.monotonic()
            try:
                answers = await process.run(jobs, self._limits().cpu_s * _WALL_FACTOR)
            except _Died as death:
                del self._running[number]
                self._bury(jobs, death)
                continue
            finally:
                self._charge(jobs, time.monotonic() - began)
            for job, answer in zip(jobs, answers, strict=True):
                job.end(answer)
            if process.leaving:
                del self._running[number]
                await process.stop(kill=False)

    def check_integrity(self) -> None:
        """Raises AssertionError when what counts as waiting does not wait, or is in the wrong queue."""
        for queue in (self._small, self._large):
            for job in queue:
                assert self._queue_of(job) is queue, f"a {job.kind} of {job.size} bytes is in the wrong queue"
                ended = job.answer.done() and not job.answer.cancelled()
                assert not ended, f"a {job.kind} was answered and still counts as waiting"

    def _limits(self) -> WorkerSetup:
        assert self._setup is not None, "the pool has not been started"
        return self._setup

    async def _restart(self, number: int) -> None:
        try:
            await self._replace(number, self._limits())
            self._failed_starts.discard(number)
            self._refused.pop(number, None)
        except WrongIdentity as error:
            await self._refuse(number, str(error))
        except (OSError, _Died, TimeoutError) as error:
            logger.error("a process for prompts does not start", error=repr(error))
            if number not in self._failed_starts:  # it may have been killed; requests wait for one more try
                self._failed_starts.add(number)
                return
            self._answer_all(Refused(503, "requests cannot be read at the moment", None, "unavailable"))
            await asyncio.sleep(_RESTART_S)

    async def _refuse(self, number: int, reason: str) -> None:
        """A process would read requests by other files. Those that run have the right ones, and go on."""
        if reason != self._refused.get(number):
            logger.error("a process for prompts may not start", reason=reason)
        self._refused[number] = reason
        self._changed.set()  # a process that runs may have to take more kinds of requests now
        if not self._running:
            self._answer_all(Refused(503, reason, None, "model_files_changed"))
        await asyncio.sleep(_REFUSED_S)

    def _answer_all(self, answer: Refused) -> None:
        """Of all that wait."""
        for queue in (self._small, self._large):
            for job in queue:
                job.end(answer)
            queue.clear()

    def _bury(self, jobs: Sequence[_Job], death: _Died) -> None:
        """Answers the request whose process died, or gives it to another process once; of a group each one
        is tried by itself."""
        kinds, size = sorted({job.kind for job in jobs}), sum(job.size for job in jobs)
        logger.warning("a process for prompts ended", status=death.status, kinds=kinds, bytes=size)
        for job in jobs:
            if job.answer.done():
                continue
            refusal = None if len(jobs) > 1 else self._refusal(job, death)
            if refusal is not None:
                job.end(refusal)
                continue
            job.deaths += len(jobs) == 1
            job.alone = True
            self._queue(job)

    def _refusal(self, job: _Job, death: _Died) -> Refused | None:
        """Why a request cannot be done that was alone with its process when that ended; None: try again."""
        limits = self._limits()
        if death.status == -signal.SIGPROF:
            return too_expensive(f"{limits.cpu_s:g} s of processor time", "prompt_timeout_s")
        if death.status in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV):
            return too_much_memory(limits)
        if job.deaths or death.status is None:
            return Refused(503, "the request could not be read in time", None, "unavailable")
        return None
