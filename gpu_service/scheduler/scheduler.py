"""Which tokens of which requests the next step computes, and what a step's results do to the requests.

Deterministic: the same calls in the same order give the same batches (no clocks, no set ordering, no
look at device memory), so that several ranks can each run their own copy. Knows no tensors.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gpu_service.cache.radix_cache import PrefixHandle
from gpu_service.cache.request_cache import RequestCache
from gpu_service.core.interface import Emission, EngineLoad, delta_of, take_tokens
from gpu_service.core.request import (
    FinishReason,
    Request,
    SchedulerLimits,
    mark_finish,
    refuse_impossible,
)
from gpu_service.core.results import RowResult
from gpu_service.core.step import Batch
from gpu_service.scheduler.admission import (
    ClientShares,
    Division,
    Prompt,
    admissible,
    all_decode,
    divide_among_prompts,
    divide_budget,
    fits,
    next_chunk,
    seniority,
    token_cost,
)
from gpu_service.scheduler.pacing import PromptPacing
from gpu_service.scheduler.supply import PageSupply
from gpu_service.speculation.policy import Speculation


class Scheduler:
    """Two queues in order of seniority; every request in `running` has a slot and, once computed, pages."""

    def __init__(
        self, limits: SchedulerLimits, cache: RequestCache, speculation: Speculation | None = None
    ) -> None:
        """`speculation` None: steps have no drafts."""
        self.limits = limits
        self.cache = cache
        self.speculation = speculation
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_constrained = 0  # Unfinished requests whose output has to follow a grammar.
        self.pacing = PromptPacing(limits)
        self.shares = ClientShares()
        # None: the pool has all its pages from the start.
        self.supply: PageSupply | None = None
        # Whether a request that decodes sits out for now; set by the engine, alike on every rank.
        self.holds: Callable[[Request], bool] = lambda request: False
        self._free_slots = list(range(limits.max_num_seqs))
        self._arrivals = 0
        # The number of the next batch.
        self.next_step = 0

    @property
    def has_work(self) -> bool:
        """Returns whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestRefused when it could never fit, alone, in the pool."""
        refuse_impossible(request.prompt_len, request.params.max_tokens, self.limits)
        request.arrival = self._arrivals
        request.bound(self.limits)
        self.num_constrained += request.constraint is not None
        self._arrivals += 1
        self.shares.came(request)
        self.cache.tree.advance(request.arrived_s)
        bisect.insort(self.waiting, request, key=seniority)

    def abort(self, request_id: str) -> list[Request]:
        """Ends every output of a request, whatever its state; returns those that were unfinished."""
        found = [r for r in (*self.running, *self.waiting) if r.request_id == request_id]
        for request in found:
            self.finish(request, FinishReason.ABORT)
        return found

    def finish(self, request: Request, reason: FinishReason, error: str = "", keep: bool = True) -> None:
        """Ends a request now: its pages go to the tree (if `keep`) or back to the pool, its slot is free.

        Steps in flight may still read and write those pages and that slot. That is safe because the request
        that gets them next is computed by a later step of the same device stream. The prefill lane has
        another one: what it computes gives them up when its step has ended.
        """
        request.finish_reason = reason
        request.error_message = error
        self.num_constrained -= request.constraint is not None
        queue = self.running if request.slot >= 0 else self.waiting
        queue.remove(request)
        self.shares.went(request)
        if request.in_lane:
            self.pacing.leaving.append((request, keep))
        else:
            self._leave(request, keep)

    def schedule(self) -> Batch | None:
        """Returns the next step's batch; None: nothing can be computed before an earlier step's commit."""
        if self.speculation is not None and self.speculation.waits(self.running):
            return None
        self._prepare()
        self.pacing.lacks_pages = None
        batch = self._take_turns() if self.pacing.takes_turns else self._schedule_main()
        if self.speculation is not None and batch is not None:
            ways = self.cache.grow_for_drafts, self.cache.grow_where_free
            grow, foresee = (partial(way, spared_pages=self.limits.watermark_pages) for way in ways)
            self.speculation.add_drafts(batch, self.running, grow, foresee)
        return batch

    def _schedule_main(self, apart: bool = True) -> Batch | None:
        """Returns a step of everyone's; `apart`: but for the prompts that have steps without others."""
        if (decode := self._decode_all()) is not None:
            return decode
        cache, pacing, excludes = self.cache, self.pacing, self.pacing.excludes_any or self.num_constrained
        division = divide_budget(
            self.running,
            self._newcomers(
                lambda prompts: [p for p in prompts if not (apart and pacing.leaves(p.request, p.need))]
            ),
            self.limits,
            cache.page_size,
            cache.keeps_states,
            excluded=partial(self._is_excluded, apart) if excludes else None,
            budget=pacing.main_tokens,
            rank=self.shares.rank,
        )
        return self._plan(division)

    def _decode_all(self) -> Batch | None:
        """Returns the step where requests only decode and all have room; None: that has to be divided."""
        cache, running = self.cache, self.running
        may_start = bool(self.waiting and self._free_slots)
        if may_start or cache.states is not None or len(running) > self.pacing.main_tokens:
            return None
        found = all_decode(running, cache.page_size, self.next_step)
        if found is None or not all(cache.grow(other, other.scheduled_len + 1) for other in found[1]):
            return None
        batch, _ = found
        clients, step = list[str](), batch.step
        for request, start in zip(batch.requests, batch.start_positions, strict=True):
            request.scheduled_len = start + 1
            request.inflight_tokens += 1
            request.last_step = step
            if start >= request.charged_len:
                request.charged_len = start + 1
                clients.append(request.fairness_id)
        self.shares.decoded(clients)
        return self._planned(batch)

    def _is_excluded(self, apart: bool, request: Request, need: int) -> bool:
        """Whether a running request is not in a step of `_schedule_main`."""
        is_others = self.pacing.excludes(request, need) if apart else request.in_lane
        return is_others or (need == 1 and request.constraint is not None and self.holds(request))

    def _schedule_prompts(self) -> Batch | None:
        """Returns a step of prompts alone, divided as among those of a step that is everyone's."""
        pacing, cache = self.pacing, self.cache
        division = Division({}, [], pacing.prompt_tokens)
        prompts, rank = self._prompts_of(pacing.choose), self.shares.rank
        divide_among_prompts(division, prompts, self.limits, cache.page_size, cache.keeps_states, rank)
        return self._plan(division)

    def _take_turns(self) -> Batch | None:
        """Where there is no lane: a step of long prompts, or of all others, whichever is due."""
        pacing, turns = self.pacing, self.pacing.turns
        if not self._prompts_of(pacing.choose):
            turns.ended()
            return self._schedule_main()
        long_first = turns.is_due
        for is_long in (long_first, not long_first):
            batch = self._schedule_prompts() if is_long else self._schedule_main()
            if batch is not None:
                batch.is_prompt_turn = is_long
                to_come = sum(prompt.need for prompt in self._prompts_of(pacing.choose))
                turns.took(is_long, to_come, pacing.prompt_tokens)
                return batch
        return self._schedule_main(apart=False)

    def wants_lane(self) -> bool:
        """Whether a step of the prefill lane would have something to compute, with the pages there are."""
        self.pacing.weigh(self._decodes())
        return self.pacing.may_open and bool(self._prompts_of(self.pacing.choose))

    def schedule_lane(self) -> Batch | None:
        """The batch of the prefill lane's next step, which is open from now on until it is committed.

        Call it where `wants_lane`, with no step in flight.
        """
        assert self.pacing.may_open, "the lane has an open step, or is not ready"
        self._prepare()
        batch = self._schedule_prompts()
        if batch is not None:
            self.pacing.open(batch)
            self.cache.opened_lane(batch)
        return batch

    def _plan(self, division: Division) -> Batch | None:
        batch = Batch([], [], [], [], step=self.next_step)
        preempted = self._schedule_running(batch, division.counts)
        # Admitting right after a preemption would take the pages that were just made free.
        if not preempted:
            self._admit(batch, division)
        return self._planned(batch)

    def _planned(self, batch: Batch) -> Batch | None:
        if not batch.requests:
            return None
        self.next_step += 1
        if self.speculation is not None:
            batch.runs_drafter = self.speculation.runs_drafter
        if self.supply is not None:
            self.supply.planned(batch)
        self.cache.planned(batch)
        return batch

    def commit(self, batch: Batch, results: Sequence[RowResult], *, replayed: bool = False) -> list[Request]:
        """Applies a step's results; returns the requests that have something new to report, in batch order.

        A request that ended after the step was launched (abort, or a stop token found one step late) is
        skipped: its extra token is dropped. One that was preempted meanwhile keeps the token, unless the
        step was `replayed`: the step after it may already have written to the pages that it gave up.
        """
        reported: list[Request] = []
        for index, (request, result) in enumerate(zip(batch.requests, results, strict=True)):
            if self._commit_row(batch, index, result, replayed):
                reported.append(request)
        self.ended(batch)
        return reported

    def commits_tokens(self, batch: Batch) -> bool:
        """Returns whether `commit_tokens` may be called where a step's result is its tokens alone."""
        is_lane = batch is self.pacing.batch
        return self.speculation is None and self.cache.states is None and not is_lane

    def commit_tokens(self, batch: Batch, token_ids: list[int]) -> Emission:
        """`commit` of a step that was not replayed, and of whose requests all came to a token and no more."""
        emission, others = take_tokens(batch, token_ids)
        for index in others:
            if self._commit_row(batch, index, RowResult(token_ids[index])):
                emission.deltas.append(delta_of(batch.requests[index]))
        self.ended(batch)
        return emission

    def _commit_row(self, batch: Batch, index: int, result: RowResult, replayed: bool = False) -> bool:
        """Returns whether the request has something new to report."""
        request, samples = batch.requests[index], batch.samples[index]
        if request.finished:
            return False
        request.inflight_tokens -= samples
        if replayed and request.slot < 0:
            return False
        if result.error:
            self.finish(request, FinishReason.ERROR, result.error, keep=False)
            return True
        if request.slot >= 0:
            request.computed_len = batch.start_positions[index] + batch.num_new_tokens[index]
            if batch.state_writes:
                self.cache.keep_state(request, batch.state_writes[index])
        if result.prompt_logprobs or request.params.prompt_logprobs is not None:
            request.add_prompt_logprobs(result.prompt_logprobs, result.prompt_logprobs_start)
        if result.pooled_sum is not None:
            request.add_pooled(result.pooled_sum, result.pooled_from_start)
        if samples:
            self.append_token(request, result)
            if self.speculation is not None:
                self.speculation.append_drafts(self, batch, index, result)
        return samples

    def ended(self, batch: Batch) -> None:
        """The step will not be run again, whether it came to anything; `commit` calls it."""
        if self.supply is not None:
            self.supply.ended(batch)
        if self.speculation is not None:
            self.speculation.ended(batch)
        self.cache.ended(batch)
        if batch is self.pacing.batch:
            for request, keep in self.pacing.close():
                self._leave(request, keep)

    def give_up(self, batch: Batch, keep: bool = True) -> None:
        """The lane's step came to nothing by no fault of its requests, which are computed again; `keep`: from
        where they had been before it.
        """
        left = [
            (r, samples) for r, samples in zip(batch.requests, batch.samples, strict=True) if not r.finished
        ]
        self.ended(batch)
        for request, samples in left:
            request.inflight_tokens -= samples
            self.preempt(request, keep)

    def load(self) -> EngineLoad:
        """Returns a snapshot of queues and cache."""
        counts = self.cache.counts | ({} if self.speculation is None else self.speculation.counts)
        num_running, num_waiting = len(self.running), len(self.waiting)
        return EngineLoad(num_running, num_waiting, num_preemptions=self.num_preemptions, **counts)

    def check_integrity(self) -> None:
        """Raises AssertionError when queues, slots, lengths or pages contradict one another."""
        self.pacing.check_integrity(self.running)
        holders = [*self.running, *(request for request, _ in self.pacing.leaving)]
        self.cache.check_integrity(holders)
        self.shares.check_integrity([*self.waiting, *self.running])
        slots = sorted([*self._free_slots, *(r.slot for r in holders)])
        assert slots == list(range(self.limits.max_num_seqs)), f"slots lost or doubled: {slots}"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=seniority), "queue out of order"
        for request in self.waiting:
            assert request.slot < 0, f"{request.key} waits with a slot"
            assert not request.pages, f"{request.key} waits with pages"
        for request in self.running:
            assert not request.finished, f"{request.key} runs although finished"
            lengths = (0, request.computed_len, request.scheduled_len, request.planned_len)
            assert list(lengths) == sorted(lengths), f"{request.key}: lengths {lengths} not ascending"
            room = len(request.pages) * self.cache.page_size
            assert room >= request.scheduled_len, f"{request.key} was scheduled beyond its pages"

    def _schedule_running(self, batch: Batch, counts: Mapping[int, int]) -> bool:
        """Gives running requests their tokens; preempts the youngest while the older lack pages."""
        preempted, cache, page_size = False, self.cache, self.cache.page_size
        for index, request in enumerate(list(self.running)):
            count = counts.get(index, 0)
            if request.slot < 0 or count == 0:
                continue
            end = request.scheduled_len + count
            # Of most rows no page is full: asking the cache for each of them takes as long as all else here.
            has_room = end <= len(request.pages) * page_size or cache.grow(request, end)
            while not has_room and request.slot >= 0:
                victim = self._victim(request)
                if victim is None:
                    self.pacing.lacks_pages = request
                    break
                preempted = True
                self.preempt(victim)
                has_room = victim is not request and cache.grow(request, end)
            if has_room and (cache.states is None or cache.has_free_state):
                self._append_row(batch, request, count)
        return preempted

    def _victim(self, request: Request) -> Request | None:
        """Returns the youngest request, which gives up pages. None: only the open step of the lane has
        younger.

        Victims come from the young end, and a batch is filled from the old end, so none is in the batch.
        """
        if not self.running[-1].in_lane:
            return self.running[-1]
        victim = next(other for other in reversed(self.running) if not other.in_lane)
        return None if victim is request else victim

    def _decodes(self) -> bool:
        return any(request.scheduled_len >= request.prompt_len for request in self.running)

    def _prepare(self) -> None:
        """What may change before a step is planned: the pages there are, which prompts have steps without
        others, and what each client has had.
        """
        self.cache.poll_tiers()
        if self.supply is not None:
            self.supply.before_step(self)
        self.pacing.weigh(self._decodes())
        self.shares.weigh(self.waiting, self.running)

    def _prompts_of(self, choose: Callable[[list[Prompt]], list[Prompt]]) -> list[Prompt]:
        """Returns those that `choose` takes of the running requests' prompts and those that may start now."""
        needs = [request.planned_len - request.scheduled_len for request in self.running]
        prompts = [Prompt(self.running[index], need, index) for index, need in enumerate(needs) if need > 1]

        def choose_waiting(waiting: list[Prompt]) -> list[Prompt]:
            return [prompt for prompt in choose(prompts + waiting) if prompt.index < 0]

        return choose(prompts + self._newcomers(choose_waiting))

    def _newcomers(self, choose: Callable[[list[Prompt]], list[Prompt]]) -> list[Prompt]:
        """Returns waiting requests that may start now: a client's oldest, then its shortest, of clients in
        turns.

        As long as the one whose turn it is lacks pages no other overtakes it, or it could wait for ever.
        `choose`: which of them the step takes, in the same order.
        """
        if not (self._free_slots and self.waiting and self.cache.has_free_state):
            return []
        candidates = list(admissible(self.waiting, self.running, self.cache, self.limits))
        if not candidates:
            return []
        oldest = self.shares.oldest(candidates)
        if not fits(oldest, self.cache.probe(oldest), self.cache, self.limits, self.running):
            return []
        prompts = choose([Prompt(request, self._expected(request)) for request in candidates])
        return self.shares.choose(prompts, len(self._free_slots))

    def _expected(self, request: Request) -> int:
        """How many tokens a waiting request will compute, asked of the prefix tree once."""
        if request.expected_len < 0:
            handle = self.cache.probe(request)
            request.expected_len = request.total_len - (handle.num_tokens if handle else 0)
        return request.expected_len

    def _admit(self, batch: Batch, division: Division) -> None:
        """Starts newcomers; what one of them does not need after all is for those after it."""
        cache, page_size, left = self.cache, self.cache.page_size, division.left
        later = sum(budget for _, budget in division.newcomers)
        for request, budget in division.newcomers:
            later -= budget
            cost = token_cost(request, self.limits)
            allowed = (left - later) // cost
            if budget == 0 and allowed < min(page_size, request.expected_len):
                continue
            handle = cache.probe(request)
            has_room = fits(request, handle, cache, self.limits, self.running)
            if not (self._free_slots and cache.has_free_state and has_room):
                return
            start = handle.num_tokens if handle else 0
            need = request.total_len - start
            count = next_chunk(request, start, need, max(1, allowed), page_size, cache.keeps_states)
            if count == 0:
                continue
            self._start(request, handle, batch)
            if not cache.grow(request, start + count):
                raise RuntimeError(f"{request.key}: admitted, but {count} tokens have no pages")
            self._append_row(batch, request, count)
            left -= count * cost

    def _start(self, request: Request, handle: PrefixHandle | None, batch: Batch) -> None:
        """Moves a request from waiting to running, with a slot and its cached prefix."""
        self.waiting.remove(request)
        self.cache.attach(request, handle)
        request.slot = heapq.heappop(self._free_slots)
        request.expected_len = -1
        request.charged_len = max(request.charged_len, request.cached_len)
        bisect.insort(self.running, request, key=seniority)
        batch.admitted.append(request)

    def _append_row(self, batch: Batch, request: Request, count: int) -> None:
        start, planned_len = request.scheduled_len, request.planned_len
        end = start + count
        samples = end == planned_len
        batch.requests.append(request)
        batch.start_positions.append(start)
        batch.num_new_tokens.append(count)
        batch.samples.append(samples)
        batch.output_positions.append(planned_len - request.prompt_len)
        self.cache.scheduled(request, batch)
        request.scheduled_len = end
        if end > request.charged_len:
            self.shares.computes(request, end)
        request.inflight_tokens += samples
        request.last_step = batch.step

    def preempt(self, victim: Request, keep: bool = True) -> None:
        """Back to waiting; `keep`: what it computed stays in the tree as long as its pages are not needed."""
        self.running.remove(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._leave(victim, keep)
        bisect.insort(self.waiting, victim, key=seniority)

    def _leave(self, request: Request, keep: bool) -> None:
        if request.slot < 0:
            return
        heapq.heappush(self._free_slots, request.slot)
        request.slot = -1
        self.cache.release(request, keep)

    def append_token(self, request: Request, result: RowResult) -> None:
        """Adds a step's token, which may end the output."""
        assert result.token_id is not None
        if request.constraint is not None:
            request.constraint.accept(result.token_id)
            if request.constraint.error:
                self.finish(request, FinishReason.ERROR, request.constraint.error, keep=False)
                return
        request.output_token_ids.append(result.token_id)
        if result.logprobs is not None:
            request.output_logprobs.append(result.logprobs)
        mark_finish(request, result.token_id)
        if request.finish_reason is not None:
            self.finish(request, request.finish_reason)
        elif len(request.output_token_ids) == 1 and request.slot >= 0:
            # The prompt is computed: others may start from it, this request's siblings first.
            self.cache.store(request)
