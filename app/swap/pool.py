"""Which of several models are loaded: on demand, each in its turn, the least recently used one makes room.

A model that is loaded is asked at once. Others wait in the order of their oldest request; for the first of
them room is made by the model that was used least recently among those that are idle or have had their time
(`residency_s`): it takes no new requests, and sleeps when its running ones have ended. So requests for two
models in turn cost one change per `residency_s`, not one per request, and no stream of requests for one model
keeps another out.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import structlog

_log = structlog.get_logger(__name__)
State = Literal["unloaded", "loading", "loaded", "leaving", "sleeping"]
_LOOK_S = 0.05


class CannotLoad(Exception):
    """A model could not be loaded; the message says why."""


class ModelRunner(ABC):
    """The processes of one model."""

    @abstractmethod
    async def start(self) -> None:
        """Ends what is left of former ones, starts them, and returns when the model answers.

        Raises CannotLoad, and then none is left.
        """

    @abstractmethod
    async def sleep(self) -> None:
        """Gives back the memory of GPUs; returns when that is done. Raises CannotLoad where it cannot be."""

    @abstractmethod
    async def wake(self) -> None:
        """Loads the model that `sleep` has put away. Raises CannotLoad."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends them, and gives back all memory."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether they run; they may end by themselves."""

    @abstractmethod
    def fits(self) -> bool:
        """Returns whether the host has RAM for a start of them, as far as it can be known."""


@dataclass(eq=False)
class Slot:
    """One model; changed by `ModelPool`."""

    name: str
    runner: ModelRunner
    state: State = "unloaded"
    in_flight: int = 0
    # Requests that wait for it, each with its number in the order of all.
    waiting: dict[asyncio.Future[None], int] = field(default_factory=dict)
    used_at: float = 0.0
    loaded_at: float = 0.0


class ModelPool:
    """The models of one server. Used in one event loop."""

    def __init__(
        self,
        runners: Mapping[str, ModelRunner],
        max_loaded: int,
        residency_s: float,
        clock: Callable[[], float] = time.monotonic,
        look_s: float = _LOOK_S,
    ) -> None:
        """`max_loaded`: models in memory of GPUs at once; `clock` counts seconds."""
        self.slots = {name: Slot(name, runner) for name, runner in runners.items()}
        self._max_loaded, self._residency_s = max_loaded, residency_s
        self._clock, self._look_s = clock, look_s
        self._numbers = count()
        self._changed = asyncio.Event()
        self._turns: asyncio.Task[None] | None = None
        # Held by who changes what is loaded.
        self._changing = asyncio.Lock()

    async def close(self) -> None:
        """Ends all models."""
        if self._turns is not None:
            self._turns.cancel()
            await asyncio.gather(self._turns, return_exceptions=True)
        await asyncio.gather(*(slot.runner.stop() for slot in self.slots.values()))

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[None]:
        """Waits until the model is loaded, and keeps it so inside. Raises CannotLoad."""
        slot = self.slots[name]
        self._note_ends()
        if slot.state == "loaded":
            slot.in_flight += 1  # before anything else runs
        else:
            await self._turn(slot)
        try:
            yield
        finally:
            slot.in_flight -= 1
            slot.used_at = self._clock()
            self._changed.set()

    async def _turn(self, slot: Slot) -> None:
        """Returns when the model is loaded and counts the caller as one of its requests."""
        turn = asyncio.get_running_loop().create_future()
        slot.waiting[turn] = next(self._numbers)
        self._changed.set()
        if self._turns is None or self._turns.done():
            self._turns = asyncio.create_task(self._take_turns())
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                slot.in_flight -= 1  # it had got its turn
            raise
        finally:
            slot.waiting.pop(turn, None)

    def lost(self, name: str) -> None:
        """Notes that a model that should be loaded does not answer; the next request starts it again."""
        if self.slots[name].state == "loaded":
            self.slots[name].state = "unloaded"

    async def put_to_sleep(self, name: str) -> None:
        """Lets running requests of a model end, and puts it to sleep. Raises CannotLoad."""
        async with self._changing:
            await self._leave(self.slots[name])

    async def wake_up(self, name: str) -> None:
        """Loads a model as a request would. Raises CannotLoad."""
        async with self.lease(name):
            return

    async def unload(self, name: str) -> None:
        """Lets running requests of a model end, and gives back all its memory, packed experts included."""
        async with self._changing:
            slot = self.slots[name]
            await self._quiet(slot)
            await self._stop(slot)

    async def reload(self, name: str) -> None:
        """Lets running requests of a model end, and loads it again; those that come meanwhile wait for that.

        A model that is not loaded is only ended: it is read again when it is asked for. Raises CannotLoad.
        """
        was_loaded = self.slots[name].state not in ("unloaded", "sleeping")
        await self.unload(name)
        if was_loaded:
            await self.wake_up(name)

    async def _take_turns(self) -> None:
        """Loads models as long as some are waited for."""
        while (slot := self._next()) is not None:
            async with self._changing:
                try:
                    await self._load(slot)
                except CannotLoad as error:
                    _log.error("model is not loaded", model=slot.name, reason=str(error))
                    self._end_waiting(slot, error)
                except Exception as error:  # a defect: those that wait would wait for ever
                    _log.exception("model is not loaded", model=slot.name)
                    self._end_waiting(slot, CannotLoad(f"{type(error).__name__}: {error}"))

    def _next(self) -> Slot | None:
        """Returns the model with the oldest waiting request."""
        wanted = [slot for slot in self.slots.values() if slot.waiting]
        return min(wanted, key=lambda slot: min(slot.waiting.values()), default=None)

    async def _load(self, slot: Slot) -> None:
        """Makes room, loads the model, and lets its requests go. Raises CannotLoad."""
        self._note_ends()
        if slot.state != "loaded":
            await self._make_room(slot)
            if not slot.waiting:
                return  # they have left meanwhile
            await self._start(slot)
            slot.state, slot.loaded_at = "loaded", self._clock()
        for turn in list(slot.waiting):
            if not turn.done():
                slot.in_flight += 1
                turn.set_result(None)
        slot.waiting.clear()

    async def _start(self, slot: Slot) -> None:
        """Wakes or starts a model; where it cannot start, those that sleep give up their RAM, one by one."""
        was, slot.state = slot.state, "loading"
        if was == "sleeping":
            try:
                return await slot.runner.wake()
            except CannotLoad as error:
                _log.warning(
                    "model is started again, as it does not wake", model=slot.name, reason=str(error)
                )
        while True:
            try:
                await self._make_ram(slot)
                return await slot.runner.start()
            except CannotLoad:
                asleep = self._least_recent("sleeping")
                if asleep is None:
                    slot.state = "unloaded"
                    raise
                await self._stop(asleep)

    async def _make_ram(self, slot: Slot) -> None:
        """Stops models that sleep while the host has no room for another one's experts."""
        while not slot.runner.fits() and (asleep := self._least_recent("sleeping")) is not None:
            await self._stop(asleep)

    async def _make_room(self, wanted: Slot) -> None:
        """Returns when fewer models than may be are loaded; those that have had their time leave."""
        while sum(slot.state == "loaded" for slot in self.slots.values()) >= self._max_loaded:
            leaving = self._may_leave()
            if leaving is not None:
                await self._leave(leaving)
                continue
            if not wanted.waiting:
                return
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self._look_s)
            except TimeoutError:
                self._note_ends()

    def _may_leave(self) -> Slot | None:
        """Returns the model that was used least recently of those that are idle or have had their time."""
        now = self._clock()
        ready = [
            slot
            for slot in self.slots.values()
            if slot.state == "loaded" and (not slot.in_flight or now - slot.loaded_at >= self._residency_s)
        ]
        return min(ready, key=lambda slot: (slot.in_flight > 0, slot.used_at), default=None)

    async def _leave(self, slot: Slot) -> None:
        """Puts a loaded model to sleep when its requests have ended; one that cannot sleep is stopped."""
        if slot.state != "loaded":
            return
        await self._quiet(slot)
        try:
            await slot.runner.sleep()
            slot.state = "sleeping"
        except CannotLoad as error:
            _log.warning("model is stopped, as it cannot sleep", model=slot.name, reason=str(error))
            await self._stop(slot)

    async def _quiet(self, slot: Slot) -> None:
        """Takes no new requests for a loaded model, and returns when its running ones have ended."""
        if slot.state == "loaded":
            slot.state = "leaving"
        while slot.in_flight:
            self._changed.clear()
            await self._changed.wait()

    async def _stop(self, slot: Slot) -> None:
        await slot.runner.stop()
        slot.state = "unloaded"

    def _least_recent(self, state: State) -> Slot | None:
        found = [slot for slot in self.slots.values() if slot.state == state]
        return min(found, key=lambda slot: slot.used_at, default=None)

    def _note_ends(self) -> None:
        """Models whose processes have ended by themselves are not loaded."""
        for slot in self.slots.values():
            if slot.state in ("loaded", "sleeping") and not slot.runner.is_running:
                _log.warning("model has ended", model=slot.name)
                slot.state = "unloaded"

    def _end_waiting(self, slot: Slot, error: CannotLoad) -> None:
        for turn in list(slot.waiting):
            if not turn.done():
                turn.set_exception(error)
        slot.waiting.clear()
