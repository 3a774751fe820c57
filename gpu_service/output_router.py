"""Carries token deltas from the engine thread to the calls that wait for them in the event loop."""

from __future__ import annotations

import asyncio
import contextlib

from gpu_service.engine.interface import OutputDelta


class CallEnded(RuntimeError):
    """A call is to end before its outputs have; the message says why."""


class CallBuffer:
    """What one Generate call has not sent yet. A slow client finds several steps' tokens here at once."""

    def __init__(self) -> None:
        self._deltas: list[OutputDelta] = []
        self._arrived = asyncio.Event()
        self._ended_by = ""

    def put(self, delta: OutputDelta) -> None:
        """Called in the event loop."""
        self._deltas.append(delta)
        self._arrived.set()

    def end(self, reason: str) -> None:
        """`take` raises from now on. Called in the event loop."""
        self._ended_by = reason
        self._arrived.set()

    async def take(self) -> dict[int, list[OutputDelta]]:
        """Everything so far, by output index; waits for at least one delta. Raises CallEnded."""
        await self._arrived.wait()
        self._arrived.clear()
        if self._ended_by:
            raise CallEnded(self._ended_by)
        deltas, self._deltas = self._deltas, []
        by_index: dict[int, list[OutputDelta]] = {}
        for delta in deltas:
            by_index.setdefault(delta.request.index, []).append(delta)
        return by_index


class OutputRouter:
    """The live calls by request id. All methods but `on_output` run in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: dict[str, CallBuffer] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._calls

    def open(self, request_id: str) -> CallBuffer:
        """Registers a call; its id must not be live."""
        self._calls[request_id] = CallBuffer()
        return self._calls[request_id]

    def close(self, request_id: str) -> None:
        """Forgets a call; what still comes for it is dropped."""
        self._calls.pop(request_id, None)

    def end_all(self, reason: str) -> None:
        """Ends every live call with CallEnded."""
        for buffer in self._calls.values():
            buffer.end(reason)

    def on_output(self, deltas: list[OutputDelta]) -> None:
        """Called by the engine thread; never blocks it. After the loop has closed nobody listens."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, deltas)

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            buffer = self._calls.get(delta.request.request_id)
            if buffer is not None:
                buffer.put(delta)
