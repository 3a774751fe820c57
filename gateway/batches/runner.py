"""Runs the batches of a directory that no other process runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog

from gateway.batches.batch import UNFINISHED, Batch
from gateway.batches.run import BatchRun, Means, Unreadable
from gateway.batches.store import BatchStore, RunningLock

logger = structlog.get_logger(__name__)
_LOOK_S = 0.5
_SWEEP_S = 600.0
_CLOSE_S = 5.0  # for results that are being written
_FAILED_S = 10.0  # before a batch whose run failed is tried again


class BatchRunner:
    """Looks for batches while the application runs, and runs each that it can lock."""

    def __init__(self, store: BatchStore, means: Means, may_run: Callable[[], bool]) -> None:
        """`may_run` returns whether requests would be answered now."""
        self._store = store
        self._means = means
        self._may_run = may_run
        self._runs: dict[str, asyncio.Task[None]] = {}  # by batch
        self._batches: dict[str, Batch] = {}  # those that run, by id
        self._not_before: dict[str, float] = {}  # by batch whose run failed; monotonic time
        self._looking: asyncio.Task[None] | None = None
        self._problem = ""
        means.metrics.watch(UNFINISHED, self._count, self._waiting, lambda: means.slots.running)

    def _count(self, status: str) -> int:
        return sum(batch.status == status for batch in list(self._batches.values()))

    def _waiting(self) -> int:
        unanswered = sum(batch.unanswered for batch in list(self._batches.values()))
        return max(0, unanswered - self._means.slots.running)

    def start(self) -> None:
        """Begins to look for batches."""
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Ends all runs: what was answered is written, the rest is for the next process."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        self._means.stop()
        if self._runs:
            _, slow = await asyncio.wait(self._runs.values(), timeout=_CLOSE_S)
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)

    async def _look(self) -> None:
        swept_at = 0.0
        while True:
            try:
                if self._may_run() and not self._means.is_stopped:
                    await self._begin_all()
                if time.monotonic() > swept_at + _SWEEP_S:
                    swept_at = time.monotonic()
                    await asyncio.to_thread(self._store.sweep)
                self._problem = ""
            except OSError as error:  # the directory may come back
                if str(error) != self._problem:
                    logger.error("batches cannot be read", reason=str(error))
                self._problem = str(error)
            await asyncio.sleep(_LOOK_S)

    async def _begin_all(self) -> None:
        now = time.monotonic()
        for owner, batch_id in await asyncio.to_thread(self._store.unfinished):
            if batch_id in self._runs or self._not_before.get(batch_id, 0.0) > now:
                continue
            locked = await asyncio.to_thread(self._store.lock, owner, batch_id)
            if locked is not None:
                task = asyncio.create_task(self._run(*locked))
                self._runs[batch_id] = task

    async def _run(self, batch: Batch, lock: RunningLock) -> None:
        log = logger.bind(batch=batch.id)
        self._batches[batch.id] = batch
        log.info("batch runs", status=batch.status, endpoint=batch.endpoint)
        try:
            await BatchRun(batch, self._store, self._means).run()
            log.info("batch run ended", status=batch.status, total=batch.total, succeeded=batch.succeeded)
        except Exception as error:  # of the disk, mostly: what is written stays, the rest is tried again
            self._not_before[batch.id] = time.monotonic() + _FAILED_S
            known = isinstance(error, OSError | Unreadable)
            log.error("a batch was interrupted", reason=str(error), exc_info=None if known else error)
        finally:
            with contextlib.suppress(OSError):
                lock.release()
            self._runs.pop(batch.id, None)
            self._batches.pop(batch.id, None)
