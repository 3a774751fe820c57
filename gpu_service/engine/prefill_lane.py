"""The prefill lane: one long step of prompts in flight, next to the steps of all other requests.

host    | layers 0, 1 | launch N+1 | layer 2 | commit N, launch N+2 | layer 3 | ...   | poll both
lane    |    |-------- 0 --------|-------- 1 --------|-------- 2 --------| ...
main    |------ step N ------|------ step N+1 ------|------ step N+2 ------| ...

Its step streams every expert that the device does not hold, so it asks no expert server and knows nothing of
their loss and recovery. It has a stream, an attention plan and staging buffers of its own; pages, slots and
the token pool are shared, and `scheduler/pacing.py` says why that is safe. Launching its many layers takes
the host longer than a token of the main lane, so between two layers the main lane gets a turn that waits for
nothing. The host runs only some layers ahead of the device: what is queued there can not be held back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from gpu_service.core.interface import Inbox, LaneSight
from gpu_service.core.step import Batch, StepPlan
from gpu_service.device.stream import DeviceEvent
from gpu_service.engine.pacing import LanePace
from gpu_service.engine.step_runner import LaunchedStep

# How often the host looks whether the device has got on, when it has nothing else to do.
POLL_S = 0.0005
# The least time between two turns of the main lane while layers are launched: a look costs the host time.
_TURN_S = 0.0003


class LaneRunner(ABC):
    """What computes the lane's steps, one at a time, on a stream of its own."""

    # Called between layers by the thread that launches a step; set by `PrefillLane`.
    between_layers: Callable[[], None] = staticmethod(lambda: None)
    # Called within a layer when the host has to know something of the device, with whether that has come:
    # returns about then. Set by `PrefillLane`.
    wait_until: Callable[[Callable[[], bool]], None] = staticmethod(lambda has_come: None)

    @property
    @abstractmethod
    def min_tokens(self) -> tuple[int, int]:
        """Prompt tokens from which a step is worth it, while others decode and while none does."""

    def step_tokens(self, wait_s: float | None) -> int:
        """Returns the most tokens of a step while others decode, whose tokens it may put off so long (None:
        not known).

        0: as many as at other times.
        """
        return 0

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Returns whether a step can be computed now: all experts that the device lacks can be streamed."""

    @abstractmethod
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launches a step after all that the main lane has launched. Failures come with what it returns.

        That ends when everything launched has, also of a step that failed half-way. ExpertUnavailable there:
        experts were replaced while they were streamed, and what was computed is worthless.
        """

    @abstractmethod
    def mark(self) -> DeviceEvent:
        """Returns the end of what was launched so far."""

    @abstractmethod
    def close(self) -> None:
        """Finishes what was launched; nothing may be launched afterwards."""


class PrefillLane:
    """The engine's side of the lane; used by the engine thread."""

    def __init__(self, runner: LaneRunner, pace: LanePace) -> None:
        self.runner = runner
        self.pace = pace
        # The open one, launched to its last layer.
        self.step: LaunchedStep | None = None
        self._give_turn: Callable[[], bool] = lambda: False
        self._inbox = Inbox()
        self._marks: deque[DeviceEvent] = deque()
        self._last_turn = 0.0
        runner.between_layers, runner.wait_until = self._between_layers, self._wait_until

    def attend(self, give_turn: Callable[[], bool], inbox: Inbox, in_flight: Sequence[LaunchedStep]) -> None:
        """`give_turn` drains the inbox, lets the main lane do what it can without waiting, and says whether
        that was anything; `in_flight`: the main lane's steps, the oldest first, as they are at any time.
        """
        self._give_turn, self._inbox = give_turn, inbox
        inbox.look = lambda: self._sight(in_flight[0] if in_flight else None)

    def launch(self, batch: Batch, plan: StepPlan) -> None:
        """Opens a step; returns when all its layers are launched, with turns of the main lane meanwhile."""
        self._marks.clear()
        self.pace.opened()
        self.step = self.runner.launch(plan)
        self.step.batch = batch

    def take(self) -> LaunchedStep:
        """Returns the open step, which is the caller's from now on."""
        assert self.step is not None, "no step is open"
        step, self.step = self.step, None
        return step

    def _sight(self, oldest: LaunchedStep | None) -> LaneSight:
        """Returns what this host sees now; `oldest` in flight of the main lane."""
        return LaneSight(
            lane_has_ended=self.step is not None and self.step.query(),
            main_has_ended=oldest is not None and oldest.query(),
            is_ready=self.runner.is_ready,
            min_tokens=self.runner.min_tokens,
            step_tokens=self.runner.step_tokens(self.pace.wait_s),
        )

    def _between_layers(self) -> None:
        if self._inbox.is_entry:
            self._marks.append(self.runner.mark())
            if self.pace.clock() - self._last_turn >= _TURN_S:
                self._turn()
        self._wait_until(self._may_go_on)

    def _wait_until(self, has_come: Callable[[], bool]) -> None:
        """Waits with turns of the main lane, as many on other ranks as on the first one, which alone asks."""
        if not self._inbox.is_entry:
            while self._inbox.is_to_drain():
                self._turn()
            return
        while not has_come():
            if not self._turn():
                self._inbox.wait(POLL_S)
        self._inbox.go_on()

    def _turn(self) -> bool:
        did_something = self._give_turn()
        self._last_turn = self.pace.clock()
        return did_something

    def _may_go_on(self) -> bool:
        while self._marks and self._marks[0].query():
            self._marks.popleft()
        return self.pace.may_go_on(len(self._marks))
