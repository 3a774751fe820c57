"""The scheduler's side of the prefill lane: which prompts it takes, and who is in its open step.

A second step is in flight then, on a stream of its own, next to those of the main lane. What keeps the two
from touching the same page, slot or state:

(a) a request is in one lane at a time: one in the open step is in no other step, and is never preempted;
(b) a request that ends meanwhile (abort, shutdown) keeps its slot, pages and state until the step has ended;
(c) the step is planned while no other step is in flight, and so after the last run of any step that could
    still write to pages, slots or states which earlier commits have freed;
(d) it is committed once it has ended on the device, so what it gives up can be used by any later step;
(e) both lanes take pages from one pool. A request that lacks only what younger ones in the lane hold waits
    for the step's end, keeps what it has, and comes before the lane's next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpu_service.core.request import Request
from gpu_service.core.step import Batch
from gpu_service.scheduler.admission import Prompt

if TYPE_CHECKING:
    from gpu_service.core.interface import LaneSight


class PrefillLaneState:
    """The open step, and what it holds back; the scheduler changes all but the first four fields."""

    def __init__(self) -> None:
        # Filled by the engine before it plans: whether steps of the lane can be computed now, and the prompt
        # tokens from which one is worth it, while others decode and while none does.
        self.is_ready = False
        self.min_tokens = self.idle_min_tokens = 2
        # Tokens of a step while others decode; 0: as many as at other times.
        self.step_tokens = 0
        # What counts now, of prompts and of steps; filled by `weigh`.
        self.worth, self.most_tokens = 2, 0
        # Of the open step; None: none is open.
        self.batch: Batch | None = None
        # Who ended while in it, and whether its computed pages are kept for others.
        self.leaving: list[tuple[Request, bool]] = []
        # Who needs pages that only the open step can give back.
        self.lacks_pages: Request | None = None

    def follow(self, sight: LaneSight) -> None:
        """Takes what the engine sees of the lane, before it plans."""
        self.is_ready, self.step_tokens = sight.is_ready, sight.step_tokens
        self.min_tokens, self.idle_min_tokens = sight.min_tokens

    def weigh(self, decodes: bool, chunk_max: int) -> None:
        """Notes whether any request decodes, before the lane or the main lane is planned."""
        # Streaming may pay from one token on, but a single token is the main lane's: that is decoding.
        self.worth = max(2, self.min_tokens if decodes else self.idle_min_tokens)
        self.most_tokens = min(chunk_max, self.step_tokens) if decodes and self.step_tokens else chunk_max

    def is_due(self, request: Request, need: int) -> bool:
        """Returns whether the main lane leaves a prompt with `need` tokens to compute to the lane."""
        return self.is_ready and need >= self.worth and is_plain_text(request)

    def excludes(self, request: Request, need: int) -> bool:
        """Returns whether a running request is none of the main lane's."""
        return request.in_lane or self.is_due(request, need)

    def choose(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Returns those that a step takes: each that is worth it, else all of them if they are together.

        A short prompt is sooner done by the main lane than by the lane's next step with a long one.
        """
        eligible = [prompt for prompt in prompts if is_plain_text(prompt.request)]
        long = [prompt for prompt in eligible if prompt.need >= self.worth]
        if long:
            return long
        return eligible if sum(prompt.need for prompt in eligible) >= self.worth else []

    @property
    def may_open(self) -> bool:
        """Returns whether a step may be planned, once nothing else is in flight."""
        lacking = self.lacks_pages
        waited_for = lacking is not None and lacking.slot >= 0 and not lacking.finished
        return self.is_ready and self.batch is None and not waited_for

    def open(self, batch: Batch) -> None:
        """The step's requests are its own until `close`."""
        self.batch = batch
        for request in batch.requests:
            request.in_lane = True

    def close(self) -> list[tuple[Request, bool]]:
        """The step has ended; returns `leaving`, who can give up what they hold."""
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
    """Whether the lane can compute a prompt: images are encoded by the main lane, for one request at a time,
    and a prompt whose every token is scored would hold up the lane's others.
    """
    return request.vision is None and request.params.prompt_logprobs is None
