"""Runs one batch: checks its lines, has each answered, writes the results, makes files of them.

A request counts once its result is in a file on disk. What was answered but not yet written when the process
was killed is asked again, so that no result is lost and none is there twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
from pydantic_core import from_json, to_json

from gateway.batches.batch import Batch
from gateway.batches.files import FileFacts, new_file_id
from gateway.batches.lines import Chunk, chunks_of
from gateway.batches.outcomes import Counter, Reason, answered_line, counter_of, unanswered_line, usage_of
from gateway.batches.results import ResultFile
from gateway.batches.slots import Slots
from gateway.batches.store import ERRORS, INPUT, OUTPUT, BatchStore
from gateway.batches.writer import ResultWriter
from gateway.schemas.batches import MAX_MESSAGE_REQUESTS, MAX_REQUESTS
from gateway.schemas.errors import ApiError
from gateway.telemetry.batches import BatchMetrics
from gateway.transport.admission import Drain
from gateway.transport.internal import InternalAnswer, InternalCaller, InternalClient, TokenUsage

logger = structlog.get_logger(__name__)
_MOST_ERRORS = 100  # of an input file that are listed
_SAVE_S = 1.0
_LATER = frozenset({429, 503, 529})  # a request with such an answer is sent again until its batch expires
_FAILURES = frozenset({500, 502, 504})
_TRIES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


Error = dict[str, Any] | None  # of a line, in OpenAI's shape


class Unreadable(Exception):
    """Lines that were valid cannot be read now."""


class Stopped(Exception):
    """The process ends: the batch goes on in the next one."""


@dataclass
class Means:
    """What a run needs of its process; filled by the application."""

    client: InternalClient
    slots: Slots
    # Reads lines in a prompt process (`gateway.apis.batch_lines.read_lines`) for an owner.
    read: Callable[[bytes, str], Awaitable[bytes]]
    longest_line: int  # bytes
    drain: Drain
    metrics: BatchMetrics
    _has_ended: bool = field(default=False, init=False)

    @property
    def is_stopped(self) -> bool:
        """Whether runs are to end: the server is shutting down."""
        return self._has_ended or self.drain.has_begun

    def stop(self) -> None:
        """Ends all runs soon."""
        self._has_ended = True


class BatchRun:
    """One batch whose lock this process holds."""

    def __init__(self, batch: Batch, store: BatchStore, means: Means) -> None:
        self._batch = batch
        self._store = store
        self._means = means
        self._directory = store.path(batch)
        self._end: Reason | None = None  # why no further requests run
        self._looked_at = 0.0

    async def run(self) -> None:
        """Goes on until the batch is finished or the process ends. Raises OSError, Unreadable."""
        batch = self._batch
        try:
            if batch.status == "validating":
                await self._validate()
            if batch.status == "in_progress":
                await self._answer_all()
            if batch.status == "finalizing":
                await asyncio.to_thread(self._finalize)
        except Stopped:
            return
        if batch.is_finished:
            await asyncio.to_thread(self._store.close, batch)

    async def _save(self) -> None:
        await asyncio.to_thread(self._store.save, self._batch)

    async def _show_progress(self, is_over: asyncio.Event) -> None:
        """Saves counts that have changed, from time to time, also while no request may start; the results say
        the same, so a full disk does not matter."""
        saved: int | None = None
        while not is_over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), _SAVE_S)
            unanswered = self._batch.unanswered
            if unanswered != saved and not is_over.is_set():
                saved = unanswered
                with suppress(OSError):
                    await self._save()

    async def _validate(self) -> None:
        """Checks every line, so that a batch with a wrong one fails before any of its requests runs."""
        batch = self._batch
        seen: set[str] = set()
        batch.errors = []
        most = MAX_REQUESTS if batch.api == "openai" else MAX_MESSAGE_REQUESTS
        async for number, custom_id, error, _ in self._lines(False):
            if error is None and custom_id in seen:
                message = f"The custom_id {custom_id[:100]!r} is a duplicate of another request's."
                error = {"code": "duplicate_custom_id", "message": message, "param": "custom_id"}
            if error is None and len(seen) == most:
                error = {"code": "too_many_requests", "message": f"A batch has at most {most} requests."}
            if error is not None:
                batch.errors.append({"line": number, "param": None, **error})
                if len(batch.errors) == _MOST_ERRORS or error["code"] == "too_many_requests":
                    break
            seen.add(custom_id)
        if not seen and not batch.errors:
            message = "The batch input file is empty: a batch needs at least one request."
            batch.errors.append({"code": "empty_file", "message": message, "line": None, "param": None})
        batch.total = 0 if batch.errors else len(seen)
        batch.reach("failed" if batch.errors else "in_progress")
        await self._save()

    async def _lines(self, wants_bodies: bool) -> AsyncIterator[tuple[int, str, Error, bytes]]:
        """Yields number, id, error and, if wanted, body of each line."""
        longest = self._means.longest_line
        chunks = chunks_of(self._directory / INPUT, longest)
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            if chunk.is_too_long:
                message = f"This line is longer than {longest / 2**20:g} MiB (max_body_mib)."
                yield chunk.first, "", {"code": "request_too_large", "message": message}, b""
                return
            numbers = [number for number, line in enumerate(chunk.lines, chunk.first) if line.strip()]
            for number, line in zip(numbers, await self._read(chunk, wants_bodies), strict=True):
                yield number, *line

    async def _read(self, chunk: Chunk, wants_bodies: bool) -> Iterator[tuple[str, Error, bytes]]:
        """Returns id, error and body of each line that is not empty, as a prompt process reads them."""
        head = to_json([self._batch.endpoint, wants_bodies])
        data = b"\n".join([head, *chunk.lines])
        pause_s = _FIRST_PAUSE_S
        while True:
            self._check_stopped()
            try:
                pieces = (await self._means.read(data, self._batch.owner)).split(b"\n")
                break
            except ApiError as error:
                if error.status in _LATER:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    continue
                refused = {"code": error.code, "message": error.message}
                return iter([("", refused, b"")] * sum(bool(line.strip()) for line in chunk.lines))
        read = [(from_json(facts), body) for facts, body in zip(pieces[::2], pieces[1::2], strict=False)]
        return ((facts["custom_id"], facts["error"], body) for facts, body in read)

    def _check_stopped(self) -> None:
        if self._means.is_stopped:
            raise Stopped

    async def _answer_all(self) -> None:
        """Has every request answered that has no result yet, and writes why the rest has none."""
        files = await asyncio.to_thread(self._opened)
        writer = ResultWriter(files, logger.bind(batch=self._batch.id))
        running: set[asyncio.Task[None]] = set()
        is_over, progress = asyncio.Event(), None
        try:
            done = await asyncio.to_thread(self._count_results, files)
            progress = asyncio.create_task(self._show_progress(is_over))
            async for number, custom_id, error, body in self._lines(True):
                if error is not None:  # a process was refused memory or time: it may pass
                    raise Unreadable(f"line {number}: {error['message']}")
                if custom_id in done:
                    continue
                await self._begin(custom_id, body, writer, running)
            while running:
                await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
                self._raise_failures(running)
        finally:
            # Requests that run at the end of the process have their answers written: see `DrainMiddleware`.
            if not self._means.is_stopped:
                for task in running:
                    task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            is_over.set()
            if progress is not None:
                await progress  # no earlier counts are saved after these
            await writer.close()
            for file in files.values():
                file.close()
        self._check_stopped()
        self._plan_end()
        await self._save()

    @staticmethod
    def _raise_failures(running: set[asyncio.Task[None]]) -> None:
        for task in [one for one in running if one.done()]:
            running.discard(task)
            task.result()

    def _opened(self) -> dict[str, ResultFile]:
        return {name: ResultFile(self._directory / name) for name in (OUTPUT, ERRORS)}

    def _count_results(self, files: dict[str, ResultFile]) -> set[str]:
        """Returns the ids of requests that have results, and counts them."""
        batch = self._batch
        batch.succeeded, batch.errored, batch.canceled, batch.expired = 0, 0, 0, 0
        batch.usage = TokenUsage()
        done: set[str] = set()
        for value in files[OUTPUT].values():
            self._count("succeeded", usage_of(value))
            done.add(value["custom_id"])
        for value in files[ERRORS].values():
            self._count(counter_of(value))
            done.add(value["custom_id"])
        return done

    def _count(self, counter: Counter, usage: TokenUsage | None = None) -> None:
        setattr(self._batch, counter, getattr(self._batch, counter) + 1)
        if usage is not None:
            self._batch.usage.add(usage)

    async def _begin(
        self, custom_id: str, body: bytes, writer: ResultWriter, running: set[asyncio.Task[None]]
    ) -> None:
        """Starts a request as soon as there is room for it, or writes why it is not started."""
        slots = self._means.slots
        if not await self._why_ended():
            await slots.take()
            self._check_after_wait()
            if not await self._why_ended():
                self._raise_failures(running)
                running.add(asyncio.create_task(self._answer(custom_id, body, writer)))
                return
            slots.give()
        assert self._end is not None
        counter, line = unanswered_line(self._batch.api, custom_id, self._end)
        await writer.write(ERRORS, line)
        self._count(counter)
        self._means.metrics.ended(counter)

    def _check_after_wait(self) -> None:
        """Raises Stopped if the process ends; the slot that was taken is then free again."""
        if self._means.is_stopped:
            self._means.slots.give()
            raise Stopped

    async def _why_ended(self) -> str | None:
        """Returns why no further requests run; looks at most four times a second."""
        self._check_stopped()
        now = time.monotonic()
        if self._end is None and now > self._looked_at + 0.25:
            self._looked_at = now
            if time.time() >= self._batch.expires_at:
                self._end = "expired"
            elif await asyncio.to_thread(self._store.cancelling_at, self._batch) is not None:
                self._end = "canceled"
        return self._end

    async def _answer(self, custom_id: str, body: bytes, writer: ResultWriter) -> None:
        """Has one request answered and its result written, within the slot that was taken for it."""
        with suppress(Stopped):
            try:
                caller = InternalCaller(self._batch.key_name)
                answer = await self._answered(body, caller)
                if answer is None:
                    assert self._end is not None
                    counter, line = unanswered_line(self._batch.api, custom_id, self._end)
                else:
                    counter, line = answered_line(self._batch.api, custom_id, answer)
                await writer.write(OUTPUT if counter == "succeeded" else ERRORS, line)
                self._count(counter, caller.usage if counter == "succeeded" else None)
                self._means.metrics.ended(counter)
            finally:
                self._means.slots.give()

    async def _answered(self, body: bytes, caller: InternalCaller) -> InternalAnswer | None:
        """Returns the answer to a request, sent again while the server is busy or lacks its engine; None:
        the batch was cancelled or has expired before there was one."""
        pause_s, failures = _FIRST_PAUSE_S, 0
        while True:
            answer = await self._means.client.post(self._batch.endpoint, body, caller)
            failures += answer.status in _FAILURES
            is_passing = answer.status in _LATER or (answer.status in _FAILURES and failures < _TRIES)
            if not is_passing:
                return answer
            self._check_stopped()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if await self._why_ended():
                return None

    def _plan_end(self) -> None:
        """Chooses how the batch ends and the ids of its files, which a restart then uses again."""
        batch = self._batch
        batch.ends_as = "completed"
        if self._end == "canceled" or batch.canceled:
            batch.ends_as = "cancelled"
        elif self._end == "expired" or batch.expired:
            batch.ends_as = "expired"
        batch.output_file_id = new_file_id() if batch.succeeded else ""
        batch.error_file_id = new_file_id() if batch.succeeded < batch.total else ""
        batch.reach("finalizing")

    def _finalize(self) -> None:
        """Makes files of the results; repeating it after a restart changes nothing."""
        batch = self._batch
        if batch.api == "openai":
            for file_id, source, kind in (
                (batch.output_file_id, OUTPUT, "output"),
                (batch.error_file_id, ERRORS, "error"),
            ):
                if file_id:
                    facts = FileFacts(f"{batch.id}_{kind}.jsonl", "batch_output", batch.output_life_s)
                    self._store.files.adopt(batch.owner, file_id, self._directory / source, facts)
        batch.reach(batch.ends_as)
        self._store.save(batch)
