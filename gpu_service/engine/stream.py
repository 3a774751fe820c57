"""Ordered asynchronous work of the host.

`CpuStream` is a worker thread, so that scheduling really overlaps with computing on a machine with no
GPU. `InlineStream` is the null object: work is done when `launch` returns.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from gpu_service.engine.step_runner import Pending

Result = TypeVar("Result")


class Event(Pending[Result]):
    """The end of one launch, and what it returned or raised."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None

    def run(self, work: Callable[[], Result]) -> None:
        """Does the work here and now and records how it ended. Called by streams only."""
        try:
            self._result = work()
        except BaseException as error:  # it is raised again in whoever waits
            self._error = error
        self._done.set()

    def query(self) -> bool:
        """Whether the work has ended."""
        return self._done.is_set()

    def wait(self) -> Result:
        """Blocks until the work has ended; returns its result or raises its exception."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class Stream(ABC):
    """Launches run one after another in launch order; later launches see all effects of earlier ones.

    A launch that raises does not stop later ones: the exception is delivered by its event.
    """

    @abstractmethod
    def launch(self, work: Callable[[], Result]) -> Event[Result]:
        """Queues work and returns at once (or, for the null object, when the work is done)."""

    @abstractmethod
    def close(self) -> None:
        """Finishes what was launched; nothing may be launched afterwards."""


class InlineStream(Stream):
    """The null object: every launch has ended when it returns."""

    def launch(self, work: Callable[[], Result]) -> Event[Result]:
        event = Event[Result]()
        event.run(work)
        return event

    def close(self) -> None:
        """Nothing is pending, ever."""


class CpuStream(Stream):
    """One worker thread that runs launches in order."""

    def __init__(self, name: str = "forward-stream") -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def launch(self, work: Callable[[], Result]) -> Event[Result]:
        event = Event[Result]()
        self._queue.put(lambda: event.run(work))
        return event

    def close(self) -> None:
        """Runs what is queued, then ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task()
