"""The ordered stream of messages from the outside to the engine thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from gpu_service.request import Request


@dataclass(frozen=True, slots=True)
class Add:
    """Queue the outputs of one request."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """End all outputs of a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Drop unheld prefixes; the future gets the number of pages freed."""

    done: Future[int]


@dataclass(frozen=True, slots=True)
class Call:
    """Run a named operation between two steps, on every rank; the future gets its end on the caller's."""

    operation: str
    argument: str
    done: Future[None]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine thread."""


Message = Add | Abort | Flush | Call | Stop


class Inbox:
    """Any thread posts, the engine thread drains; order is kept."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._messages: list[Message] = []
        # Outputs posted but not drained.
        self.num_added = 0

    def post(self, message: Message) -> None:
        """Appends a message and wakes the engine thread."""
        with self._condition:
            self._messages.append(message)
            if isinstance(message, Add):
                self.num_added += len(message.requests)
            self._condition.notify()

    def drain(self, wait: bool) -> list[Message]:
        """All messages so far; with `wait`, blocks until there is one."""
        with self._condition:
            while wait and not self._messages:
                self._condition.wait()
            messages, self._messages = self._messages, []
            self.num_added = 0
            return messages
