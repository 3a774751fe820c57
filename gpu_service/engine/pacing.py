"""The clock of the first rank: what steps take, and what follows from it for the steps to come.

`Pacing` sees every step of the main lane end, and has what all ranks learn at one place of their loops: how
turns of long prompts and of others are divided (`TurnPace`, for `scheduler/pacing.py`), and what steps with
drafts take (`DraftPace`, for `speculation/policy.py`). It also decides how far the prefill lane may run ahead
(`LanePace`), which concerns the launching host alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import structlog

from gpu_service.core.request import SchedulerLimits
from gpu_service.core.results import StepResult
from gpu_service.core.step import Batch
from gpu_service.engine.step_runner import LaunchedStep
from gpu_service.scheduler.pacing import STEPS_BETWEEN_UNKNOWN
from gpu_service.speculation.pace import DraftPace

# Operations of every rank's engine: what `Pacing.messages` names.
STREAM_PROMPTS, STEP_COSTS = "stream prompts", "costs of steps with drafts"
# Layers that may be queued on the device behind the one that runs, and how soon there are more again after
# a token was late: this much for each that is not.
_MOST_AHEAD, _WIDEN = 3, 0.125
# Of the time that the lane ran, how long it may be held for the main lane's sake: a prompt keeps more than
# half of its rate.
_MOST_HELD = 0.65
# Weight of the newest of the times between two tokens.
_NEWEST_TOKEN = 0.2
# Steps of others between two of prompts, at most.
_MOST_STEPS = 256
# Weight of the newest time of a step; changes of a number that are not worth a message to all ranks.
_NEWEST_STEP, _REPORTED_CHANGE = 0.3, 0.04
# How often the first rank looks whether prompts would be streamed.
_LOOK_S = 0.1

_log = structlog.get_logger(__name__)


class Pacing:
    """What the engine asks and tells the clock; None for a part: there is nothing of its kind to pace."""

    def __init__(self, lane: LanePace | None, turns: TurnPace | None, drafts: DraftPace | None) -> None:
        self._lane, self._turns, self._drafts = lane, turns, drafts

    def idled(self) -> None:
        """The main lane has nothing to compute: the time since its last step is no step's."""
        if self._lane is not None:
            self._lane.idled()
        if self._drafts is not None:
            self._drafts.idled()

    def committed(self, step: LaunchedStep, result: StepResult | None, lane_is_open: bool) -> None:
        """A step of the main lane has ended; `result` None: without one."""
        if self._turns is not None and result is not None:
            self._turns.committed(step.batch, result.seconds)
        if self._lane is not None:
            self._lane.committed(step.batch, lane_is_open)
        if self._drafts is not None:
            choices = None if result is None else result.choices
            self._drafts.committed(step.batch, step.overlaps, choices)

    def messages(self, streamed_tokens: Callable[[], int]) -> Iterator[tuple[str, str]]:
        """Yields the operations, with their arguments, by which all ranks learn what is new.

        `streamed_tokens`: as `StepRunner` says; it is asked ten times a second.
        """
        news = None if self._turns is None else self._turns.news(streamed_tokens)
        if news is not None:
            yield STREAM_PROMPTS, news
        costs = None if self._drafts is None else self._drafts.message()
        if costs is not None:
            yield STEP_COSTS, costs


class LanePace:
    """How far the lane may run ahead, so that running streams keep their rhythm; driven by the host's clock.

    The time between two tokens of steps that only decode is compared with that of as many requests while the
    lane is idle. One that took longer than is allowed makes the lane's slices smaller, at last single layers,
    and lets it pause until the tokens after it have made up for that, within limits; others widen them again.
    """

    def __init__(self, max_added_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_added_s`: what may be added between two tokens; None: as much as there is without the lane."""
        self._max_added_s = max_added_s
        self.clock = clock
        # Seconds between two tokens without the lane, by the binary order of the number of requests.
        self._idle: dict[int, float] = {}
        # Of the latest: the same, when, and whether the lane computed nothing then.
        self._last: tuple[int, float, bool] | None = None
        self._order = 0
        # When the lane last went on; whether it is to pause, and since it does, until when at most.
        self._since = 0.0
        self._pauses = False
        self._until: float | None = None
        # By how much tokens were late, less what others came before their time.
        self._late_s = 0.0
        # Layers that may be queued on the device behind the one that runs, as a whole number.
        self.ahead = float(_MOST_AHEAD)

    @property
    def wait_s(self) -> float | None:
        """What may be added between two tokens of those who decode; None: that is not known yet."""
        return self._idle.get(self._order) if self._max_added_s is None else self._max_added_s

    def opened(self) -> None:
        """A step of the lane is about to be launched."""
        self._since, self._pauses, self._until = self.clock(), False, None

    def committed(self, batch: Batch, lane_is_open: bool) -> None:
        """A step of the main lane has ended."""
        now, order = self.clock(), len(batch.requests).bit_length()
        alone = not lane_is_open or self._until is not None
        last, self._last = self._last, (order, now, alone) if batch.is_uniform_decode else None
        if batch.is_uniform_decode:
            self._order = order
        if last is None or self._last is None or last[0] != order:
            return
        between = now - last[1]
        idle = self._idle.setdefault(order, between)
        if alone and last[2]:
            self._idle[order] = idle + _NEWEST_TOKEN * (between - idle)
        if not lane_is_open:
            return
        late = between - idle - (idle if self._max_added_s is None else self._max_added_s)
        self._late_s = max(0.0, self._late_s + late)
        if late > 0:
            self.ahead = self.ahead // 2
            self._pauses = True
        else:
            self.ahead = min(_MOST_AHEAD, self.ahead + _WIDEN)
            if not self._late_s:
                self._go_on()

    def idled(self) -> None:
        """Notes that the main lane is idle: the next token's time says nothing, and no request is delayed."""
        self._last, self._late_s, self.ahead = None, 0.0, float(_MOST_AHEAD)
        self._go_on()

    def may_go_on(self, queued: int) -> bool:
        """Returns whether the lane may launch a layer while `queued` ones have not ended."""
        if not self._pauses:
            return queued <= int(self.ahead)
        if queued:
            return False
        now = self.clock()
        if self._until is None:
            self._until = now + _MOST_HELD * (now - self._since)
        if now >= self._until:
            self._go_on()
        return not self._pauses

    def _go_on(self) -> None:
        if self._pauses:
            self._since, self._pauses, self._until = self.clock(), False, None


class TurnPace:
    """How turns are divided, from what steps took."""

    def __init__(self, chunk_max: int, usual: int, max_added_s: float | None) -> None:
        """`usual`: tokens of a usual step, which prompts get at least; `max_added_s`: what a step of prompts
        may take; None: what one of `chunk_max` takes.
        """
        self._chunk_max, self._usual, self._max_added_s = chunk_max, usual, max_added_s
        self._decode_s = self._prompts_s = 0.0
        self._steps, self._chunk = float(STEPS_BETWEEN_UNKNOWN), chunk_max
        # Of a step of prompts, from which longer ones would only stop others for longer; 0: none is streamed.
        self._useful = 0
        self._look_again, self._said = 0.0, ""

    def committed(self, batch: Batch, seconds: float) -> None:
        """A step has ended that had the device so long."""
        if seconds <= 0:
            return
        if batch.is_prompt_turn:
            self._prompts_s = _mean(self._prompts_s, seconds)
            self._limit_chunk(batch.num_tokens, seconds)
        elif batch.is_uniform_decode:
            self._decode_s = _mean(self._decode_s, seconds)
        if self._decode_s and self._prompts_s:
            steps = max(1.0, min(float(_MOST_STEPS), self._prompts_s / self._decode_s))
            if abs(steps - self._steps) > _REPORTED_CHANGE * self._steps:
                self._steps = steps

    def _limit_chunk(self, tokens: int, seconds: float) -> None:
        limit = self._max_added_s
        if limit is None:
            return
        if seconds > limit and tokens > self._usual:
            # Copies take as long for few rows: half is all that is tried at once.
            self._chunk = max(self._usual, int(tokens * max(0.5, limit / seconds)))
        elif seconds < limit / 2:
            self._chunk = min(self._chunk_max, 2 * self._chunk)

    def message(self) -> str:
        """For `PromptPacing.read` of every rank."""
        chunk = min(self._chunk, max(self._usual, self._useful))
        return f"{self._steps:.2f} {chunk}" if self._useful else ""

    def news(self, streamed_tokens: Callable[[], int]) -> str | None:
        """`message`, if it is another than last time; None: nothing has changed.

        `streamed_tokens`: as `StepRunner` says; it is asked ten times a second.
        """
        now = time.monotonic()
        if now >= self._look_again:
            self._look_again = now + _LOOK_S
            self._useful = streamed_tokens()
        message = self.message()
        if message == self._said:
            return None
        if not (message and self._said):
            _log.info("long prompts stream their experts, in turns with others' steps", now=bool(message))
        self._said = message
        return message


def make_pacing(
    lane: LanePace | None,
    drafts: DraftPace | None,
    limits: SchedulerLimits,
    max_added_s: float | None,
    is_entry: bool,
) -> Pacing:
    """Returns the clock of a rank; turns are taken where there is no lane and steps stream their experts.

    `max_added_s`: what a step of long prompts alone may take while others decode. `is_entry`: whether this is
    the rank that tells all others, which alone measures.
    """
    turns = None
    if lane is None and limits.prefill_chunk_max:
        turns = TurnPace(limits.prefill_chunk_max, limits.max_num_batched_tokens, max_added_s)
    return Pacing(lane, turns if is_entry else None, drafts if is_entry else None)


def _mean(before: float, newest: float) -> float:
    return before + _NEWEST_STEP * (newest - before) if before else newest
