"""An event that signal handlers may set."""

from __future__ import annotations

import contextlib
import queue


class Wakeup:
    """What `threading.Event` is to threads, with one thread that waits.

    `Event.set` takes a lock that it does not take twice: a signal in the middle of `wait`, or of another
    signal's `set`, would wait for itself. `SimpleQueue.put` may be interrupted by itself anywhere.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        """Returns whether it was set since the last `clear`."""
        return self._is_set

    def set(self) -> None:
        """Wakes the waiting thread, from any thread or signal handler."""
        self._is_set = True
        self._queue.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Waits until it is set, for a time at most; returns whether it is."""
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=timeout_s)
        return self._is_set

    def clear(self) -> None:
        """Takes the wake-up back, by the thread that waits."""
        self._is_set = False
        for _ in range(self._queue.qsize()):
            self._queue.get_nowait()
