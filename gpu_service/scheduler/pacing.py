"""Which prompts are computed by steps of their own, when, and how many tokens such a step has.

A step that streams its experts is fast when it is long, and all who decode would wait for it; so long prompts
have steps without anyone else (docs/decisions/0012). There are two ways, and a machine has one of them:

- the prefill lane: the step is in flight next to those of everyone else, on a stream of its own
  (`engine/prefill_lane.py`);
- turns, where there is no lane, as with several pipeline stages, which launch different layers of one step
  after another: one step of long prompts, then as many of all other requests that those which decode have had
  the device as long. A step with both would copy all experts for 512 rows and every token.

`PromptPacing` only counts and compares, so that all ranks plan alike. What follows from time the first rank
measures (`engine/pacing.py`) and tells all ranks at one place.

**The lane.** What keeps its open step and those of the main lane from touching the same page, slot or state:

(a) a request is in one lane at a time: one in the open step is in no other step, and is never preempted;
(b) a request that ends meanwhile (abort, shutdown) keeps its slot, pages and state until the step has ended;
(c) the step is planned while no other step is in flight, and so after the last run of any step that could
    still write to pages, slots or states which earlier commits have freed;
(d) it is committed once it has ended on the device, so what it gives up can be used by any later step;
(e) both lanes take pages from one pool. A request that lacks only what younger ones in the lane hold waits
    for the step's end, keeps what it has, and comes before the lane's next step.

**Turns.** Others' steps stand between a prompt's, none before its first one or after its last: with n steps
there are n - 1 such places. So more of them stand there, such that both have had the device as long when the
prompt ends; a prompt of one step leaves nothing to divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_service.core.interface import LaneSight
from gpu_service.core.request import Request, SchedulerLimits
from gpu_service.core.step import Batch
from gpu_service.scheduler.admission import Prompt

# Steps of others between two of prompts until times are known.
STEPS_BETWEEN_UNKNOWN = 8
# At most this many times the usual number of others' steps follow a step of prompts.
_LONGEST = 2.0


@dataclass
class PromptTurns:
    """How many steps of others come before the next one of long prompts."""

    # Steps of everyone else that take as long as one of long prompts; how many come before the next one.
    steps_between: float = STEPS_BETWEEN_UNKNOWN
    left: float = 0.0
    # Steps of everyone else that prompts have had the time of since long ones wait, less those that came.
    owed: float = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the next step is one of long prompts: to the nearest whole number of others' steps."""
        return self.left < 0.5

    def took(self, is_prompts: bool, tokens_to_come: int, most: int) -> None:
        """A step was planned, after which long prompts need `tokens_to_come`, at `most` of them in a step."""
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


class PromptPacing:
    """The scheduler's one policy of prompts: which steps they are in."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        # Of the lane, filled by the engine before it plans: whether its steps can be computed now, the prompt
        # tokens from which one is worth it, while others decode and while none does, and the most tokens of a
        # step while others decode (0: as many as at other times).
        self.is_ready = False
        self.min_tokens = self.idle_min_tokens = 2
        self.step_tokens = 0
        # Of the lane's open step; None: none is open.
        self.batch: Batch | None = None
        # Requests that ended while in it, and whether their computed pages are kept for others.
        self.leaving: list[tuple[Request, bool]] = []
        # A request that needs pages which only the open step can give back.
        self.lacks_pages: Request | None = None
        # Of turns, filled by the engine through a message: whether steps stream their experts, and tokens of
        # a step of prompts while others decode (None: `prefill_chunk_max`).
        self.streams = False
        self.chunk: int | None = None
        self.turns = PromptTurns()
        # Whether any request decodes; filled by `weigh`.
        self._decodes = False

    def follow(self, sight: LaneSight) -> None:
        """Takes what the engine sees of the lane, before it plans."""
        self.is_ready, self.step_tokens = sight.is_ready, sight.step_tokens
        self.min_tokens, self.idle_min_tokens = sight.min_tokens

    def read(self, message: str) -> None:
        """Takes what `TurnPace.message` wrote; empty: nothing is streamed."""
        self.streams = bool(message)
        if message:
            steps, chunk = message.split()
            self.turns.steps_between, self.chunk = float(steps), int(chunk)
            self.turns.left = min(self.turns.left, _LONGEST * self.turns.steps_between)

    def weigh(self, decodes: bool) -> None:
        """Called before a step is planned, or asked for: whether any request decodes."""
        self._decodes = decodes

    @property
    def takes_turns(self) -> bool:
        """Whether long prompts and all others have steps in turns now."""
        return self.streams and self._decodes

    @property
    def main_tokens(self) -> int:
        """Tokens of a step that is everyone's: where it streams and none decodes, a longer one costs hardly
        more time.
        """
        is_long = self.streams and not self._decodes
        return self._limits.prefill_chunk_max if is_long else self._limits.max_num_batched_tokens

    @property
    def prompt_tokens(self) -> int:
        """Most tokens of a step of prompts alone."""
        most = self._limits.prefill_chunk_max
        if self.takes_turns:
            return self.chunk or most
        return min(most, self.step_tokens) if self._decodes and self.step_tokens else most

    @property
    def _worth(self) -> int:
        """Tokens from which a prompt has steps without others; it is more than one, which is decoding."""
        if self.takes_turns:
            return self._limits.max_num_batched_tokens + 1
        return max(2, self.min_tokens if self._decodes else self.idle_min_tokens)

    def leaves(self, request: Request, need: int) -> bool:
        """Whether a step that is everyone's leaves a prompt with `need` tokens to one of prompts alone."""
        return (self.is_ready or self.takes_turns) and need >= self._worth and is_plain_text(request)

    @property
    def excludes_any(self) -> bool:
        """Returns whether `excludes` may say so of any request now."""
        return self.batch is not None or self.is_ready or self.takes_turns

    def excludes(self, request: Request, need: int) -> bool:
        """Returns whether a running request is in no step that is everyone's."""
        return request.in_lane or self.leaves(request, need)

    def choose(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Returns those that a step of prompts takes: each that is long enough; for the lane, if none is, all
        of them if they are together.

        A short prompt is sooner done by the main lane than by the lane's next step with a long one.
        """
        eligible = [prompt for prompt in prompts if is_plain_text(prompt.request)]
        long = [prompt for prompt in eligible if prompt.need >= self._worth]
        if long or self.takes_turns:
            return long
        return eligible if sum(prompt.need for prompt in eligible) >= self._worth else []

    @property
    def may_open(self) -> bool:
        """Whether a step of the lane may be planned, once nothing else is in flight."""
        lacking = self.lacks_pages
        waited_for = lacking is not None and lacking.slot >= 0 and not lacking.finished
        return self.is_ready and self.batch is None and not waited_for

    def open(self, batch: Batch) -> None:
        """The requests of the lane's step are its own until `close`."""
        self.batch = batch
        for request in batch.requests:
            request.in_lane = True

    def close(self) -> list[tuple[Request, bool]]:
        """The lane's step has ended; returns `leaving`, who can give up what they hold."""
        assert self.batch is not None, "no step is open"
        for request in self.batch.requests:
            request.in_lane = False
        leaving, self.leaving, self.batch = self.leaving, [], None
        return leaving

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Raises AssertionError unless exactly the open step's requests are marked, and run or leave."""
        members = [] if self.batch is None else self.batch.requests
        leaving = [request for request, _ in self.leaving]
        held = [request for request in running if request.in_lane] + leaving
        assert sorted(map(id, held)) == sorted(map(id, members)), "the lane's requests are not its step's"
        for request in members:
            assert request.slot >= 0, f"{request.key} is in the lane without a slot"
            assert request.finished == (request in leaving), f"{request.key} ended, but not in the lane"


def is_plain_text(request: Request) -> bool:
    """Whether a prompt can have steps without others: images are encoded by the main lane, for one request at
    a time, and a prompt whose every token is scored would hold up the others of its step.
    """
    return request.vision is None and request.params.prompt_logprobs is None
