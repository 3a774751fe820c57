"""Long prompts next to running streams where there is no prefill lane: with several pipeline stages.

Stages launch different layers, of one step after another, so that a lane would need its turns between the
layers of all of them. So steps take turns instead: one of long prompts alone, of up to `prefill_chunk_max`
tokens, which streams its experts (each rank its part of them, over its own link), then as many steps of all
other requests that those which decode have had the device as long. A step with both would copy all experts
for 512 rows and every token.

Others' steps stand between a prompt's, none before its first one or after its last: with n steps there are
n - 1 such places. So more of them stand there, such that both have had the device as long when the prompt
ends; a prompt of one step leaves nothing to divide.

`PromptTurns` is the scheduler's: it only counts, so that all ranks plan the same. `TurnPace` is the first
rank's: from the time that steps took it says how many to count; the engine tells all ranks at one place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from gpu_service.core.limits import SchedulerLimits
from gpu_service.core.request import Request
from gpu_service.core.step import Batch
from gpu_service.scheduler.lane import is_plain_text

# Steps of others between two of prompts: until times are known, and at most.
_UNKNOWN, _MOST = 8, 256
# Weight of the newest time; changes of a number that are not worth a message to all ranks.
_NEWEST, _REPORTED_CHANGE = 0.3, 0.04
# How often the first rank looks whether prompts would be streamed.
_LOOK_S = 0.1
# At most this many times the usual number of others' steps follow a step of prompts.
_LONGEST = 2.0

_log = structlog.get_logger(__name__)


@dataclass
class PromptTurns:
    """Changed by the scheduler and, through a message, by the engine."""

    # Whether steps of prompts alone stream their experts.
    streams: bool = False
    # Steps of everybody else that take as long as one of long prompts; how many come before the next one.
    steps_between: float = _UNKNOWN
    left: float = 0.0
    # Steps of everybody else that prompts have had the time of since long ones wait, less those that came.
    owed: float = 0.0
    # Tokens of a step of prompts while others decode; None: `prefill_chunk_max`.
    chunk: int | None = None

    def takes(self, request: Request, need: int, usual: int) -> bool:
        """Whether a prompt is left to a step of its own: it needs more than one of `usual` tokens."""
        return self.streams and need > usual and is_plain_text(request)

    @property
    def is_due(self) -> bool:
        """Returns whether the next step is one of long prompts, to the nearest number of others' steps."""
        return self.left < 0.5

    def took(self, is_prompts: bool, tokens_to_come: int, most: int) -> None:
        """Notes a step, after which long prompts need `tokens_to_come`, at `most` of them in a step."""
        if not is_prompts:
            self.left -= 1
            self.owed = max(self.owed - 1, -self.steps_between)
            return
        # Bounded: prompts also go on where no other request has anything to compute.
        self.owed = min(self.owed + self.steps_between, _LONGEST * self.steps_between)
        to_come = -(-tokens_to_come // most)
        # What is owed now and will be for the steps to come, in as many parts as there are steps to come.
        each = self.steps_between + self.owed / max(1, to_come)
        self.left = max(0.0, min(each, _LONGEST * self.steps_between))

    def ended(self) -> None:
        """No long prompts are left."""
        self.left = self.owed = 0.0

    def read(self, message: str) -> None:
        """Applies what `TurnPace.message` wrote; empty: nothing is streamed."""
        self.streams = bool(message)
        if message:
            steps, chunk = message.split()
            self.steps_between, self.chunk = float(steps), int(chunk)
            self.left = min(self.left, _LONGEST * self.steps_between)


class TurnPace:
    """How turns are divided, from what steps took."""

    def __init__(self, chunk_max: int, usual: int, max_added_s: float | None) -> None:
        """`usual`: tokens of a usual step, which prompts get at least; `max_added_s`: what a step of prompts
        may take; None: what one of `chunk_max` takes.
        """
        self._chunk_max, self._usual, self._max_added_s = chunk_max, usual, max_added_s
        self._decode_s = self._prompts_s = 0.0
        self._steps, self._chunk = float(_UNKNOWN), chunk_max
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
            steps = max(1.0, min(float(_MOST), self._prompts_s / self._decode_s))
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
        """Returns the message for `PromptTurns.read` of every rank."""
        chunk = min(self._chunk, max(self._usual, self._useful))
        return f"{self._steps:.2f} {chunk}" if self._useful else ""

    def news(self, streamed_tokens: Callable[[], int]) -> str | None:
        """Returns `message`, if it is another than last time; None: nothing has changed.

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


def make_turn_pace(limits: SchedulerLimits, max_added_s: float | None) -> TurnPace | None:
    """Returns the division of turns within the limits; None: no step streams its experts."""
    if not limits.prefill_chunk_max:
        return None
    return TurnPace(limits.prefill_chunk_max, limits.max_num_batched_tokens, max_added_s)


def _mean(before: float, newest: float) -> float:
    return before + _NEWEST * (newest - before) if before else newest
