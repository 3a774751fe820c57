"""The pool of processes that prepare requests: queues, deadlines, and replacement of those that end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import structlog

from gateway.apis.registry import Kind
from gateway.generation.job import Prepared
from gateway.prompts.fork_server import EarlyServer, ForkServer
from gateway.prompts.process import (
    SMALL_BYTES,
    Broken,
    Died,
    Job,
    ModelFiles,
    Postponed,
    Process,
    Refused,
    WorkerSetup,
    packed,
    too_expensive,
    too_much_memory,
)
from gateway.prompts.worker import OUT_OF_MEMORY
from gateway.schemas.errors import ApiError
from gateway.transport.admission import RETRY_AFTER_S
from moebius.errors import WrongIdentity
from moebius.fair_shares import FairShares, in_turns, is_below_share

logger = structlog.get_logger(__name__)
WORKER = "gateway.prompts.worker"
_GROUP = 8  # small requests that a process gets at once, if enough wait
_WALL_FACTOR = 10  # a request may wait for a processor this much longer than it may use one
_RESTART_S, _LONGEST_RESTART_S = 1.0, 8.0  # pauses between starts that fail, each twice the one before
_PATIENCE_S = 10.0  # that a request waits at least while no process starts
_STUCK_S = 10.0  # of waiting or work, after which the pool reports a problem
_SLOW_SHARE = 4  # 1 / the share of waiting requests whose grammars may take long
_ESTIMATED_S = 0.002  # estimate for a request that is not yet read, for fairness within a group
_REFUSED_S = 2.0  # between two checks whether the right files are back


class PromptPool:
    """Processes and their queues. One process takes small bodies only, so that large requests, or those whose
    grammars take long, delay small ones no more than small ones delay each other; with one process there is
    no such promise."""

    def __init__(self, processes: int, most_waiting: int, early: EarlyServer | None = None) -> None:
        """`most_waiting`: requests that may wait; further ones get 429. `early`: the first server."""
        self._early = early
        self._count = processes
        self._most_waiting = most_waiting
        # In order of arrival. A request is in one of the queues for as long as it waits, however that
        # ends: a process takes it, it is refused, or its client disconnects.
        self._small: dict[Job, None] = {}
        self._large: dict[Job, None] = {}
        self._slow: dict[Job, None] = {}  # whose grammars take long
        self._slow_is_next = False  # when large ones wait, too
        self._taken_at = 0.0  # when a process took small ones last
        self._busy_since: dict[int, float] = {}  # by number of each process that has requests
        self._shares = FairShares()  # seconds of processes
        self._changed = asyncio.Event()  # set when a request waits
        self._server: ForkServer | None = None  # which the processes are forks of
        self._running: dict[int, Process] = {}
        # By number of a process that is to be started: how often that has failed in a row.
        self._failed_starts: dict[int, int] = {}
        # By number: the changed files because of which a process cannot be replaced.
        self._refused: dict[int, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._setup: WorkerSetup | None = None

    @property
    def refusal(self) -> str:
        """The changed files because of which processes cannot be replaced, or an empty string."""
        return next(iter(self._refused.values()), "")

    @property
    def outage(self) -> str:
        """The same if no process runs, so that no request is answered."""
        return "" if self._running else self.refusal

    async def spawn(self, files: ModelFiles) -> None:
        """Starts the processes that are not running; they read the model's files while the engine may load.

        Raises:
            OSError: a process could not be started.
        """
        try:
            for number in set(range(self._count)) - self._running.keys():
                self._running[number] = await self._spawn(files)
        except Died as error:
            raise OSError(f"a process for prompts did not start: {error!r}") from error

    async def _spawn(self, files: ModelFiles) -> Process:
        """Starts a process. Raises OSError."""
        if self._server is None or self._server.ended:
            early, self._early = self._early, None
            self._server = await asyncio.to_thread(ForkServer, WORKER, packed(files), early)
        return await Process.spawn(self._server)

    async def start(self, setup: WorkerSetup) -> None:
        """Starts those that `spawn` did not; afterwards `prepare` may be called.

        Raises:
            OSError: a process could not be started, or ended while it read the model's files.
            WrongIdentity: the files are not those that the gateway has read.
        """
        self._setup = setup
        try:
            await asyncio.gather(*(self._begin(number, setup) for number in range(self._count)))
        except (Died, TimeoutError) as error:
            raise OSError(f"a process for prompts did not start: {error!r}") from error
        self._tasks = [asyncio.create_task(self._serve(number)) for number in self._running]

    async def _begin(self, number: int, setup: WorkerSetup) -> None:
        """Waits until a process can serve; one that ended while the engine loaded is replaced once."""
        early = self._running.get(number)
        if early is not None:
            try:
                await early.begin(setup)
                return
            except Died as death:  # the engine may load for half an hour, during which it may be killed
                del self._running[number]
                logger.warning("a process for prompts ended before it served", status=death.status)
        await self._replace(number, setup)

    async def _replace(self, number: int, setup: WorkerSetup) -> None:
        """Starts a new process that can serve. Raises OSError, Died or TimeoutError."""
        process = await self._spawn(setup.files)
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
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
            self._server = None

    async def prepare(
        self, kind: Kind, body: Sequence[bytes], client: str = "", owner: str = ""
    ) -> Prepared | bytes:
        """Returns the prepared request, or the JSON answer if that needs no engine.

        `client`: its sender; `owner`: whose stored responses it may continue.

        Raises:
            ApiError: the request is refused, costs too much, or too many wait.
        """
        if self.outage:
            raise ApiError(503, self.outage, code="model_files_changed", retry_after_s=RETRY_AFTER_S)
        if self.waiting >= self._most_waiting and not is_below_share(
            Counter(job.client for job in (*self._small, *self._large, *self._slow)),
            client,
            self._most_waiting,
        ):
            raise ApiError(
                429,
                f"{self._most_waiting} requests wait to be read: try again later",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
        job = Job(kind, body, sum(map(len, body)), client, owner)
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
        assert not isinstance(answer, Postponed), "a postponed request is answered later"
        return answer

    @property
    def waiting(self) -> int:
        """Requests that no process has taken yet."""
        return len(self._small) + len(self._large) + len(self._slow)

    def problem(self) -> str:
        """Returns why requests are not being prepared, or an empty string if they are."""
        now = time.monotonic()
        if self._small and now - max(next(iter(self._small)).since, self._taken_at) > _STUCK_S:
            return "requests wait to be read, but none has been read for a while"
        stuck = [number for number, since in self._busy_since.items() if now - since > _STUCK_S]
        if not self._running.keys() - stuck:
            return "no process can read requests at the moment"
        return ""

    def _queue_of(self, job: Job) -> dict[Job, None]:
        if job.patient:
            return self._slow
        return self._small if job.size <= SMALL_BYTES else self._large

    def _queue(self, job: Job) -> None:
        self._queue_of(job)[job] = None
        self._changed.set()

    def _unqueue(self, job: Job) -> None:
        self._queue_of(job).pop(job, None)

    def _pick(self, number: int) -> list[Job]:
        """Returns the next requests for this process whose clients still wait: of small ones its share, at
        most a group; empty: none waits."""
        others = [self._slow, self._large] if self._slow_is_next else [self._large, self._slow]
        queues = [*others, self._small]
        if number == 0:
            has_others = not {*self._refused, *self._failed_starts} >= set(range(1, self._count))
            queues = [self._small] if has_others else [self._small, *others]
        for queue in queues:
            most = min(_GROUP, -(-len(queue) // self._count)) if queue is self._small else 1
            jobs: list[Job] = []
            size = 0
            for job in self._in_turns(queue):
                if job.answer.done():  # its client disconnected in this turn of the event loop
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
                if queue is self._small:
                    self._taken_at = time.monotonic()
                else:
                    self._slow_is_next = queue is self._large
                return jobs
        return []

    def _in_turns(self, queue: Iterable[Job]) -> Iterable[Job]:
        """Returns the queue in order of arrival; clients take turns by the time that their requests took."""
        queues: dict[str, list[Job]] = {}
        for job in queue:
            queues.setdefault(job.client, []).append(job)
        if len(queues) < 2:
            return queue
        self._shares.settle(queues)
        each = {client: iter(jobs) for client, jobs in queues.items()}
        return in_turns(each, self._shares.served, lambda _job: _ESTIMATED_S)

    def _charge(self, jobs: Sequence[Job], seconds: float) -> None:
        """Charges the time to the clients' shares."""
        for job in jobs:
            self._shares.charge(job.client, seconds / len(jobs))

    async def _serve(self, number: int) -> None:
        """Gives one process its requests; after its end, gives further ones to its successor."""
        while True:
            process = self._running.get(number)
            if process is None:
                await self._restart(number)
                continue
            while not (jobs := self._pick(number)):
                self._changed.clear()
                await self._changed.wait()
            if process.ended:  # killed while idle: that is no failed try of the requests
                del self._running[number]
                for job in jobs:
                    self._queue(job)
                await process.stop()
                continue
            began = self._busy_since[number] = time.monotonic()
            try:
                answers = await process.run(jobs, self._limits().cpu_s * _WALL_FACTOR)
            except Died as death:
                del self._running[number]
                self._retry_or_refuse(jobs, death)
                continue
            finally:
                del self._busy_since[number]
                self._charge(jobs, time.monotonic() - began)
            for job, answer in zip(jobs, answers, strict=True):
                if isinstance(answer, Postponed):
                    self._postpone(job)
                else:
                    job.end(answer)
            if process.leaving:
                del self._running[number]
                await process.stop(kill=False)

    def _postpone(self, job: Job) -> None:
        """Moves it to the queue of those whose grammars take long, of which a limited number may wait."""
        if job.answer.done():
            return
        if len(self._slow) >= max(1, self._most_waiting // _SLOW_SHARE):
            message = f"{len(self._slow)} requests wait whose grammars take long to compile: try again later"
            job.end(Refused(429, message, None, "queue_full"))
            return
        job.patient = True
        self._queue(job)

    def check_integrity(self) -> None:
        """Raises AssertionError when a request counted as waiting does not wait, or is in the wrong queue."""
        for queue in (self._small, self._large, self._slow):
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
            self._failed_starts.pop(number, None)
            self._refused.pop(number, None)
        except WrongIdentity as error:
            await self._refuse(number, str(error))
        except (OSError, Died, TimeoutError) as error:
            failures = self._failed_starts[number] = self._failed_starts.get(number, 0) + 1
            logger.error("a process for prompts does not start", error=repr(error), failures=failures)
            self._changed.set()  # running processes may have to take more kinds of requests now
            if failures == 1:  # it may have been killed
                return
            self._refuse_overdue()
            await asyncio.sleep(min(_RESTART_S * 2 ** min(failures - 2, 8), _LONGEST_RESTART_S))

    async def _refuse(self, number: int, reason: str) -> None:
        """Notes that changed files keep a process from starting. Those that run have the right files."""
        if reason != self._refused.get(number):
            logger.error("a process for prompts may not start", reason=reason)
        self._refused[number] = reason
        self._changed.set()  # running processes may have to take more kinds of requests now
        if not self._running:
            self._answer_all(Refused(503, reason, None, "model_files_changed"))
        await asyncio.sleep(_REFUSED_S)

    def _refuse_overdue(self) -> None:
        """Refuses what has waited for long where no process runs; the rest waits for the next start."""
        if self._running:
            return
        latest = time.monotonic() - _PATIENCE_S
        for queue in (self._small, self._large, self._slow):
            for job in [job for job in queue if job.since < latest]:
                self._unqueue(job)
                job.end(Refused(503, "requests cannot be read at the moment", None, "unavailable"))

    def _answer_all(self, answer: Refused) -> None:
        """Gives all waiting requests this answer."""
        for queue in (self._small, self._large, self._slow):
            for job in queue:
                job.end(answer)
            queue.clear()

    def _retry_or_refuse(self, jobs: Sequence[Job], death: Died) -> None:
        """Answers the request whose process died, or gives it to another process once; those of a group are
        retried one by one."""
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

    def _refusal(self, job: Job, death: Died) -> Refused | None:
        """Returns the refusal of a request that was alone in a process that ended; None: try again."""
        limits = self._limits()
        if death.status == -signal.SIGPROF:
            return too_expensive(f"{limits.cpu_s:g} s of processor time", "prompt_timeout_s")
        if death.status in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV):
            return too_much_memory(limits)
        if job.deaths or death.status is None:
            return Refused(503, "the request could not be read in time", None, "unavailable")
        return None
