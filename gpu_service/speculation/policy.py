"""Chooses how many draft tokens of which requests a step verifies, alike on every rank.

A step of R requests gives R tokens, and each verified draft one more if it and all before it are accepted.
With the acceptance rate `a` of a request's latest drafts, its j-th draft gives `a ** j` tokens. So the drafts
of a step are taken in the order of what they give, as many as make the most tokens per second of

    (R + what the drafts give) / seconds of a step of R + drafts rows

against R / seconds of a step without drafts, which overlaps with others. Seconds are those that the first
rank measured (`pace.py`) and sent to all; before it has, rows cost nothing. A host drafter also proposes
tokens that steps without drafts sample anyway, which are compared with them. What is known wears off: a
request's share with every token, towards the usual one of all, which itself rises slowly; so what was given
up is tried again now and then.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from gpu_service.core.request import Request, SchedulerLimits
from gpu_service.core.step import Batch
from gpu_service.speculation.drafter import HostDrafter
from gpu_service.speculation.rest import DrafterRest

# What remains after a token of what is known of a request's drafts, and of all requests'.
_KEPT, _KEPT_OF_ALL = 0.98, 0.998
# Drafts that the usual share counts as, beside a request's own.
_PRIOR = 2.0


# Captured graphs make stairs of what rows cost: a step of 9 runs the graph of 16, which took twice as long
# as that of 8 on one H200. With times of 9 to 16 taken as one, 9 looked half as dear.
_MEASURED_ALONE = 64


def bucket(rows: int) -> int:
    """Returns rows of steps that are measured as one: each number up to 64, then multiples of 8."""
    return rows if rows <= _MEASURED_ALONE else -(-rows // 8) * 8


class StepCosts:
    """Seconds of decode steps by rows, between two known numbers of rows linear."""

    def __init__(self) -> None:
        self._plain: Mapping[int, float] = {}
        self._verifying: list[tuple[int, float]] = []
        self.is_measured = False

    def update(self, plain: Mapping[int, float], verifying: Mapping[int, float]) -> None:
        """Takes the seconds measured of steps without drafts, and with, by `bucket`."""
        self._plain = plain
        self._verifying = sorted({**plain, **verifying}.items())
        self.is_measured = True

    def plain(self, rows: int) -> float | None:
        """Returns the time of a step without drafts; None: it has to be measured first."""
        return self._plain.get(bucket(rows)) if self.is_measured else 1.0

    def verifying(self, rows: int) -> float:
        """Returns the time of a step with drafts; more rows than were ever tried cost as much as those."""
        if not self._verifying:
            return 1.0
        at = bisect_left(self._verifying, (rows, 0.0))
        if at == len(self._verifying):
            return self._verifying[-1][1]
        above, seconds = self._verifying[at]
        if at == 0 or above == rows:
            return seconds
        below, less = self._verifying[at - 1]
        return less + (seconds - less) * (rows - below) / (above - below)

    def most_rows(self, rows: int) -> int:
        """Returns what may be tried: twice what was. `rows`: of requests alone."""
        if not self.is_measured:
            return sys.maxsize
        tried = self._verifying[-1][0] if self._verifying else rows
        return 2 * max(rows, tried)


class Speculation:
    """The scheduler's. Without a host drafter, drafts come from the device with a step's results."""

    def __init__(
        self,
        limits: SchedulerLimits,
        num_drafts: int,
        drafter: HostDrafter | None,
        *,
        adaptive: bool = False,
    ) -> None:
        """`num_drafts`: of a request, at most; `adaptive`: what steps cost will be measured."""
        self.costs = StepCosts()
        if adaptive:
            self.costs.update({}, {})
        # Since start: requests that had drafts in a step, drafts verified, and those that were accepted.
        self.num_drafts = self.num_verified = self.num_accepted = 0
        self._limits = limits
        self._most_drafts = num_drafts
        self._drafter = drafter
        # Of a device drafter.
        self._rest = DrafterRest()
        # The step in flight that others of its lane wait for: it has drafts, or brings some.
        self._awaited: Batch | None = None
        # Like a request's own fields, of all.
        self._accepted = self._verified = 0.0

    def read(self, message: str) -> None:
        """Applies what `DraftPace.message` wrote. Raises ValueError for anything else."""
        plain, verifying = ({int(rows): s for rows, s in table.items()} for table in json.loads(message))
        self.costs.update(plain, verifying)

    def waits(self, running: Sequence[Request]) -> bool:
        """Returns whether no step is to be planned before the one in flight is committed."""
        if self._awaited is not None:
            return True
        if self._drafter is None or not all(map(_decodes, running)):
            return False
        in_flight = [request for request in running if request.inflight_tokens and not request.in_lane]
        if not in_flight:
            return False
        # The token in flight is the first that is proposed; those after it are worth waiting for it, or not.
        for request in in_flight:
            request.drafts = self._draft_tokens(request, 1)
        offers = [(request, len(request.drafts) - 1) for request in in_flight]
        return any(self._choose(offers, len(running), first=2))  # accepted only if that token is, too

    def add_drafts(
        self, batch: Batch, running: Sequence[Request], grow: Callable[[Batch, int, int], bool]
    ) -> None:
        """Gives a planned step what drafts are worth verifying.

        `grow` makes room for a number of drafts of a request of the batch, where there is any.
        """
        if not batch.is_uniform_decode or not all(map(_decodes, running)):
            return
        if self._rest.counts_down():
            return
        if not all(batch.samples):  # one that was preempted starts again while its latest token is in flight
            return
        draft_tokens = [
            self._draft_tokens(request, 0) if start + 1 == request.total_len else []
            for request, start in zip(batch.requests, batch.start_positions, strict=True)
        ]
        offers = [(request, len(own)) for request, own in zip(batch.requests, draft_tokens, strict=True)]
        counts = self._choose(offers, len(offers))
        drafts = [own[:count] for own, count in zip(draft_tokens, counts, strict=True)]
        for index, own in enumerate(drafts):
            if own and not grow(batch, index, len(own)):
                drafts[index] = []
        if any(drafts):
            batch.drafts = drafts
        if self._drafter is None:
            expected = [(request, self._room(request, 1)) for request in batch.requests]
            batch.num_drafts = max(self._choose(expected, len(expected)))
            if self.costs.is_measured:
                self._rest.planned(bool(batch.drafts or batch.num_drafts))
                # What a step takes without drafts is measured without the drafter.
                batch.runs_drafter = self.costs.plain(len(expected)) is not None
        if batch.drafts or batch.num_drafts:
            self._awaited = batch

    def committed(self, request: Request, verified: int, accepted: int) -> None:
        """A step gave a request `accepted` tokens and one more, of `verified` drafts."""
        kept, kept_of_all = _KEPT ** (accepted + 1), _KEPT_OF_ALL ** (accepted + 1)
        # Those after the first rejected one say nothing, nor do those after the output's end.
        tried, confirmed = accepted if request.finished else min(verified, accepted + 1), accepted
        if self._drafter is not None and verified == 0 and request.drafts and request.output_token_ids:
            # `waits` proposed this very token, which costs no row.
            tried, confirmed = 1, int(request.drafts[0] == request.output_token_ids[-1])
        request.drafts_verified = kept * request.drafts_verified + tried
        request.drafts_accepted = kept * request.drafts_accepted + confirmed
        self._verified = kept_of_all * self._verified + tried
        self._accepted = kept_of_all * self._accepted + confirmed
        request.accepted_draft_tokens += accepted
        request.rejected_draft_tokens += verified - accepted
        self.num_drafts += verified > 0
        self.num_verified += verified
        self.num_accepted += accepted

    def ended(self, batch: Batch) -> None:
        """The step is in flight no more."""
        if batch is self._awaited:
            self._awaited = None

    @property
    def runs_drafter(self) -> bool:
        """Whether steps run a device drafter, for now."""
        return self._drafter is None and not self._rest.is_on

    @property
    def counts(self) -> dict[str, int]:
        """For `EngineLoad`."""
        verified, accepted = self.num_verified, self.num_accepted
        return {"num_drafts": self.num_drafts, "draft_tokens": verified, "accepted_tokens": accepted}

    def _room(self, request: Request, inflight: int) -> int:
        """Drafts that a step may have, once `inflight` more tokens are known: its own token is not one."""
        if not request.speculates:
            return 0
        in_output = request.params.max_tokens - len(request.output_token_ids)
        in_context = self._limits.context_limit - request.total_len
        return max(0, min(self._most_drafts, min(in_output, in_context) - inflight - 1))

    def _draft_tokens(self, request: Request, inflight: int) -> list[int]:
        room = self._room(request, inflight)
        if room == 0:
            return []
        if self._drafter is not None:
            drafts = self._drafter.propose(request, room + inflight)
        else:
            drafts = list(request.drafts[:room])
        if request.constraint is not None and not inflight:
            # A row whose draft can not be accepted would be computed in vain.
            drafts = drafts[: request.constraint.num_allowed(drafts)]
        return drafts

    def _choose(self, offers: Sequence[tuple[Request, int]], rows: int, first: int = 1) -> list[int]:
        """Returns how many of its drafts each request gets in a step of `rows` rows without them.

        `first`: draft tokens that have to be accepted for a request's first draft to be.
        """
        counts = [0] * len(offers)
        limits, plain = self._limits, self.costs.plain(rows)
        most = min(limits.max_rows, limits.max_num_batched_tokens, self.costs.most_rows(rows)) - rows
        if plain is None or most <= 0 or not any(count > 0 for _, count in offers):
            return counts
        gains = sorted(
            (-(share**place), place, index)
            for index, (request, count) in enumerate(offers)
            for share in (self._share(request),)
            for place in range(first, count + first)
        )[:most]
        tokens, best, taken = float(rows), rows / plain, 0
        for number, (gain, _, _) in enumerate(gains, 1):
            tokens -= gain
            rate = tokens / self.costs.verifying(rows + number)
            if rate > best:
                best, taken = rate, number
        for _, _, index in gains[:taken]:
            counts[index] += 1
        return counts

    def _share(self, request: Request) -> float:
        """Returns the share of the request's drafts that are accepted once all before them are."""
        usual = (1 + self._accepted) / (1 + self._verified)
        return (_PRIOR * usual + request.drafts_accepted) / (_PRIOR + request.drafts_verified)


def _decodes(request: Request) -> bool:
    """Returns whether it has no more than one token to compute, or is the prefill lane's for now."""
    return request.in_lane or request.planned_len - request.scheduled_len <= 1
