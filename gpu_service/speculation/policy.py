"""Chooses how many draft tokens of which requests a step verifies, alike on every rank.

A step of R requests gives R tokens, and each verified draft one more if it and all before it are accepted.
The j-th draft of a request gives the product of the acceptance rates of its first j places (`acceptance.py`).
So the drafts of a step are taken in the order of what they give, as many as maximise tokens per second,

    (R + what the drafts give) / seconds of a step of R requests and as many drafts

against R / seconds of a step without drafts, which overlaps with others. Seconds are those that the first
rank measured (`pace.py`, `step_costs.py`) and sent to all; before it has, rows cost nothing. A host
drafter also proposes
tokens that steps without drafts sample anyway, which are compared with them. What is known wears off: a
request's share with every token, towards the usual one of all, which itself rises slowly; so what was given
up is tried again now and then.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from gpu_service.cache.request_cache import RequestCache
from gpu_service.core.request import FinishReason, Request, SchedulerLimits
from gpu_service.core.results import RowResult
from gpu_service.core.step import Batch
from gpu_service.speculation.acceptance import DraftSource, PlaceRates, RequestRates
from gpu_service.speculation.drafter import HostDrafter
from gpu_service.speculation.rest import DrafterRest
from gpu_service.speculation.step_costs import StepCosts

# By what factor drafts have to be better than none to be verified, where costs are measured: what looks equal
# is not, since a drafter takes time in steps that verify none of its drafts, too. For a drafter to be woken,
# or not to rest, by the second.
_BETTER, _WELL = 1.01, 1.03


class Outputs(Protocol):
    """What a step with drafts does to the outputs of its requests: the scheduler."""

    cache: RequestCache

    def append_token(self, request: Request, result: RowResult) -> None:
        """Adds a token, which may end the output."""

    def finish(self, request: Request, reason: FinishReason, error: str = "", keep: bool = True) -> None:
        """Ends a request."""

    def preempt(self, victim: Request, keep: bool = True) -> None:
        """Takes a request's pages."""


class Speculation:
    """The scheduler's. Drafts come from a host drafter, from the device with a step's results, or for each
    request from whichever is accepted more often."""

    def __init__(
        self,
        limits: SchedulerLimits,
        num_drafts: int,
        drafter: HostDrafter | None,
        *,
        has_device_drafter: bool = False,
        adaptive: bool = False,
    ) -> None:
        """Starts without any knowledge of costs.

        `num_drafts`: of a request, at most; `has_device_drafter`: drafts come with results of steps, too;
        `adaptive`: what steps cost will be measured.
        """
        self.costs = StepCosts()
        if adaptive:
            self.costs.update({}, {})
        # Since start: requests that had drafts in a step, drafts verified, and those that were accepted.
        self.num_drafts = self.num_verified = self.num_accepted = 0
        self._limits = limits
        self._most_drafts = num_drafts
        self._drafter = drafter
        self._has_device_drafter = has_device_drafter
        # Of a device drafter; while it rests, what its drafts would give, the requests and costs that it was
        # last decided by, and whether drafts would have paid with these.
        self._rest = DrafterRest()
        self._usual: list[float] = []
        self._situation: tuple[int, int] | None = None
        self._paid = False
        # The step in flight that others of its lane wait for: it has drafts, or brings some.
        self._awaited: Batch | None = None
        self._of_all = PlaceRates(num_drafts)
        self._rates: WeakKeyDictionary[Request, RequestRates] = WeakKeyDictionary()

    def read(self, message: str) -> None:
        """Applies what `DraftPace.message` wrote. Raises ValueError for anything else."""
        self.costs.read(message)

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
            request.drafts, request.drafts_source = self._from_text(request, 1), DraftSource.TEXT
        offers = [self._gains(request, DraftSource.TEXT, len(request.drafts))[1:] for request in in_flight]
        return any(self._choose(offers, len(running)))  # accepted only if that token is, too

    def add_drafts(
        self,
        batch: Batch,
        running: Sequence[Request],
        grow: Callable[[Batch, int, int], bool],
        foresee: Callable[[Request, int], object] = lambda request, count: None,
    ) -> None:
        """Gives a planned step what drafts are worth verifying.

        `grow` makes room for a number of drafts of a request of the batch, where there is any; `foresee` for
        a number of tokens of a request after those, which a device drafter reads before they are verified.
        """
        if not batch.is_uniform_decode or not all(map(_decodes, running)):
            return
        rests = self._rests(len(batch.requests))
        if rests and self._drafter is None:
            return
        if not all(batch.samples):  # one that was preempted starts again while its latest token is in flight
            return
        draft_tokens = [
            self._draft_tokens(request) if start + 1 == request.total_len else []
            for request, start in zip(batch.requests, batch.start_positions, strict=True)
        ]
        offers = [
            self._gains(request, DraftSource(request.drafts_source), len(own))
            for request, own in zip(batch.requests, draft_tokens, strict=True)
        ]
        counts = self._choose(offers, len(offers))
        drafts = [own[:count] for own, count in zip(draft_tokens, counts, strict=True)]
        for index, own in enumerate(drafts):
            if own and not grow(batch, index, len(own)):
                drafts[index] = []
        if any(drafts):
            batch.drafts = drafts
        if self._has_device_drafter and not rests:
            expected = [
                self._expected(request, own)
                for request, own in zip(batch.requests, draft_tokens, strict=True)
            ]
            batch.num_drafts = max(self._choose(expected, len(expected)))
            for index, request in enumerate(batch.requests):
                inflight = 1 + (len(drafts[index]) if batch.drafts else 0)
                ahead = min(batch.num_drafts, self._room(request, inflight))
                if ahead:
                    foresee(request, inflight - 1 + ahead)
            if self.costs.is_measured:
                has_drafts = bool(batch.num_drafts) or _has_drafts_of_layers(batch)
                self._rest.planned(has_drafts, lambda: self._pays(len(expected), self._usual_gains))
                # What a step takes without drafts is measured without the drafter.
                batch.runs_drafter = self.costs.plain(len(expected)) is not None
        if batch.drafts or batch.num_drafts:
            self._awaited = batch

    def committed(
        self, request: Request, verified: int, accepted: int, next_drafts: Sequence[int] = ()
    ) -> None:
        """A step gave a request `accepted` tokens and one more, of `verified` drafts; a device drafter has
        `next_drafts`."""
        # Those after the first rejected one say nothing, nor do those after the output's end.
        tried, confirmed = accepted if request.finished else min(verified, accepted + 1), accepted
        source = DraftSource(request.drafts_source)
        was_proposed = source == DraftSource.TEXT and verified == 0 and len(request.drafts) > 0
        if was_proposed and request.output_token_ids:
            # `waits` proposed this very token, which costs no row.
            tried, confirmed = 1, int(request.drafts[0] == request.output_token_ids[-1])
        own, usual = self._rates_of(request), self._of_all.rates(source)
        own.add(source, tried, confirmed, accepted + 1, usual)
        self._of_all.add(source, tried, confirmed, accepted + 1)
        request.accepted_draft_tokens += accepted
        request.rejected_draft_tokens += verified - accepted
        self.num_drafts += verified > 0
        self.num_verified += verified
        self.num_accepted += accepted
        request.drafts = next_drafts
        request.drafts_source = DraftSource.LAYERS if next_drafts else DraftSource.TEXT

    def append_drafts(self, scheduler: Outputs, batch: Batch, index: int, result: RowResult) -> None:
        """After the step's own token: those of the drafts' rows, as long as the draft was what came before.

        known tokens   |-- computed before --| t |
        rows                                 | t   d0   d1   d2 |     each samples the token after its own
        appended                                  d0   d1    x        d2 was wrong: its KV is written over
        """
        request, drafts = batch.requests[index], batch.drafts[index] if batch.drafts else []
        accepted = 0
        for draft, row in zip(drafts, result.verified, strict=True):
            if request.finished or request.output_token_ids[-1] != draft:
                break
            if row.error:
                scheduler.finish(request, FinishReason.ERROR, row.error, keep=False)
                break
            accepted += 1
            if request.slot >= 0:
                request.computed_len += 1
                request.scheduled_len += 1
                scheduler.cache.accept_draft(batch, index, accepted - 1)
            scheduler.append_token(request, row)
        self.committed(request, len(drafts), accepted, result.drafts)
        if request.slot >= 0 and any(row.error for row in result.verified):
            # Its last page is among `RequestCache.poisoned_pages`.
            request.speculates = False
            scheduler.preempt(request)

    def ended(self, batch: Batch) -> None:
        """The step is in flight no more."""
        if batch is self._awaited:
            self._awaited = None

    @property
    def runs_drafter(self) -> bool:
        """Whether steps run a device drafter, for now."""
        return self._has_device_drafter and not self._rest.is_on

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

    def _from_text(self, request: Request, inflight: int) -> list[int]:
        """Returns drafts of the host drafter, of which the first `inflight` are being sampled."""
        room = self._room(request, inflight)
        if self._drafter is None or room == 0:
            return []
        return self._drafter.propose(request, room + inflight)

    def _draft_tokens(self, request: Request) -> list[int]:
        """Returns drafts after the known tokens, of the drafter whose drafts are accepted more often, which
        `drafts_source` says."""
        drafts = self._from_text(request, 0)
        own = list(request.drafts[: self._room(request, 0)])
        layers, text = self._rate(request, DraftSource.LAYERS), self._rate(request, DraftSource.TEXT)
        if request.drafts_source == DraftSource.LAYERS and own and (not drafts or layers > text):
            drafts = own
        else:
            request.drafts, request.drafts_source = (), DraftSource.TEXT
        if request.constraint is not None:
            # A row whose draft can not be accepted would be computed in vain.
            drafts = drafts[: request.constraint.num_allowed(drafts)]
        return drafts

    def _expected(self, request: Request, drafts: Sequence[int]) -> list[float]:
        """Returns the offer of a device drafter for the step after one for which a request has `drafts`: none
        where those of its text are as good, which will go on."""
        layers, text = self._rate(request, DraftSource.LAYERS), self._rate(request, DraftSource.TEXT)
        goes_on = drafts and request.drafts_source == DraftSource.TEXT and text >= layers
        return [] if goes_on else self._gains(request, DraftSource.LAYERS, self._room(request, 1))

    def _choose(self, offers: Sequence[Sequence[float]], rows: int, margin: float = _BETTER) -> list[int]:
        """Returns how many of its drafts each request gets in a step of `rows` rows without them.

        `offers`: of each request's drafts the tokens that they give, none more than the one before; `margin`:
        by what factor drafts have to be better than none.
        """
        counts = [0] * len(offers)
        limits, plain = self._limits, self.costs.plain(rows)
        most = min(limits.max_rows, limits.max_num_batched_tokens, self.costs.most_rows(rows)) - rows
        if plain is None or most <= 0 or not any(offers):
            return counts
        gains = sorted(
            (-gain, place, index) for index, own in enumerate(offers) for place, gain in enumerate(own)
        )[:most]
        margin = margin if self.costs.is_measured else 1.0
        tokens, best, taken = float(rows), margin * rows / plain, 0
        for number, (gain, _, _) in enumerate(gains, 1):
            tokens -= gain
            rate = tokens / self.costs.verifying(rows, number)
            if rate > best:
                best, taken = rate, number
        for _, _, index in gains[:taken]:
            counts[index] += 1
        return counts

    @property
    def _usual_gains(self) -> list[float]:
        """Returns the tokens that each draft of a device drafter gives, for all requests together."""
        return _products(self._of_all.rates(DraftSource.LAYERS))

    def _pays(self, rows: int, gains: Sequence[float]) -> bool:
        """Returns whether drafts that give that many tokens each are well worth it in a step of `rows`
        requests."""
        return any(self._choose([gains] * rows, rows, _WELL))

    def _rests(self, rows: int) -> bool:
        """Returns whether a device drafter rests in a step of that many requests, planned now.

        A rest ends early where draft tokens pay now and did not when it began: with other requests, or other
        costs.
        """
        situation = rows, self.costs.version
        if not self._rest.is_on:
            self._situation = None
        elif self._situation is None:
            self._situation = situation
            self._usual = self._usual_gains
            self._paid = self._pays(rows, self._usual)
        elif self._situation != situation:
            self._situation, paid = situation, self._paid
            self._paid = self._pays(rows, self._usual)
            if self._paid and not paid:
                self._rest.ends()
        return self._rest.counts_down()

    def _gains(self, request: Request, source: DraftSource, count: int) -> list[float]:
        """Returns the tokens that each of a request's first drafts gives on average."""
        rates = self._rates_of(request).rates(source, self._of_all.rates(source))
        return _products(rates[:count])

    def _rate(self, request: Request, source: DraftSource) -> float:
        """Returns the accepted share of a request's first drafts."""
        return self._rates_of(request).rates(source, self._of_all.rates(source))[0]

    def _rates_of(self, request: Request) -> RequestRates:
        return self._rates.setdefault(request, RequestRates())


def _products(rates: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(rates, operator.mul))


def _has_drafts_of_layers(batch: Batch) -> bool:
    return any(
        own and request.drafts_source == DraftSource.LAYERS
        for request, own in zip(batch.requests, batch.drafts, strict=bool(batch.drafts))
    )


def _decodes(request: Request) -> bool:
    """Returns whether it has no more than one token to compute, or is the prefill lane's for now."""
    return request.in_lane or request.planned_len - request.scheduled_len <= 1
