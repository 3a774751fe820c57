"""Guards the scheduler: budget, order, preemption and pages, with integrity checked after every call."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpu_service.cache.radix_cache import RadixCache
from gpu_service.cache.request_cache import PagePool, RequestCache
from gpu_service.cache.request_states import SLOTS_PER_REQUEST, RequestStates, StatePool
from gpu_service.core.request import FinishReason, Request, RequestRefused
from gpu_service.core.results import RowResult
from gpu_service.core.step import Batch
from gpu_service.scheduler.admission import chunk_size
from gpu_service.scheduler.scheduler import Scheduler
from tests.helpers.drafters import FixedDrafter
from tests.helpers.engine_harness import Knobs, LateSupply, build_scheduler, make_request, prompt_of


def results(batch: Batch, token: int = 5) -> list[RowResult]:
    """Returns every row that samples gets `token`, those of drafts too."""
    drafts = batch.drafts or [[]] * len(batch.requests)
    return [
        RowResult(token if samples else None, verified=[RowResult(token) for _ in own])
        for samples, own in zip(batch.samples, drafts, strict=True)
    ]


def step(scheduler: Scheduler) -> Batch:
    """Returns one synchronous step."""
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.commit(batch, results(batch))
    scheduler.check_integrity()
    return batch


def finish_all(scheduler: Scheduler, limit: int = 500) -> None:
    """Steps until nothing is left."""
    for _ in range(limit):
        if not scheduler.has_work:
            return
        step(scheduler)
    raise AssertionError("requests starve")


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, launches and commits, up to two steps in flight and one of the prefill lane."""

    @initialize(
        pages=st.integers(6, 30),
        budget=st.integers(3, 24),
        caching=st.booleans(),
        states=st.booleans(),
        lane_from=st.sampled_from([(1, 1), (1, 9), (6, 9)]),
        num_drafts=st.integers(0, 4),
    )
    def build(
        self,
        pages: int,
        budget: int,
        caching: bool,
        states: bool,
        lane_from: tuple[int, int],
        num_drafts: int,
    ) -> None:
        knobs = Knobs(
            num_pages=pages,
            page_size=4,
            max_num_seqs=4,
            budget=budget,
            prefix_caching=caching,
            # Tokens are 5 or 6: runs of one of them are accepted as far as the drafts go on with it.
            drafter=FixedDrafter(5, 5, 6, 5),
            num_drafts=0 if states else num_drafts,
        )
        self.scheduler = build_scheduler(knobs, prefill_chunk_max=20)
        if states:
            held = RequestStates(StatePool(1 + SLOTS_PER_REQUEST * 4 + 3), 3)
            tree = RadixCache(4, held.forget)
            self.scheduler.cache = RequestCache(PagePool(pages), tree, caching, held)
        self.scheduler.pacing.min_tokens, self.scheduler.pacing.idle_min_tokens = lane_from
        self.in_flight: list[Batch] = []
        self.requests: list[Request] = []

    @rule(seed=st.integers(0, 2), length=st.integers(1, 30), output=st.integers(1, 9), rank=st.integers(0, 1))
    def add(self, seed: int, length: int, output: int, rank: int) -> None:
        request = make_request(f"r{len(self.requests)}", prompt_of(seed, length), max_tokens=output)
        request.priority = rank
        if length + output > self.scheduler.limits.context_limit:
            with pytest.raises(RequestRefused):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.requests.append(request)

    @rule(index=st.integers(0, 30))
    def abort(self, index: int) -> None:
        if self.requests:
            request = self.requests[index % len(self.requests)]
            was_finished = request.finished
            assert len(self.scheduler.abort(request.request_id)) == (not was_finished)

    @rule()
    def launch(self) -> None:
        if len(self.in_flight) == 2:
            self.commit(5)
        batch = self.scheduler.schedule()
        if batch is not None:
            limits, turns = self.scheduler.limits, self.scheduler.pacing
            most = max(20, limits.max_num_batched_tokens) if turns.streams else limits.max_num_batched_tokens
            assert 0 < batch.num_tokens <= most
            assert len(batch.requests) == len({id(r) for r in batch.requests}) <= limits.max_num_seqs
            assert not any(request.in_lane for request in batch.requests)
            assert not any(other.drafts for other in self.in_flight), "a step with drafts is waited for"
            self.in_flight.append(batch)

    @rule(is_ready=st.booleans())
    def lane_is_ready(self, is_ready: bool) -> None:
        self.scheduler.pacing.is_ready = is_ready

    @rule(message=st.sampled_from(["", "1 20", "3 12"]))
    def stream_without_a_lane(self, message: str) -> None:
        if not self.scheduler.pacing.is_ready and self.scheduler.pacing.batch is None:
            self.scheduler.pacing.read(message)

    @rule()
    def open_lane(self) -> None:
        while self.in_flight and self.scheduler.wants_lane():
            self.commit(5)
        if not self.scheduler.wants_lane():
            return
        batch = self.scheduler.schedule_lane()
        if batch is not None:
            assert 0 < batch.num_tokens <= 20
            assert all(request.in_lane for request in batch.requests)

    @rule(token=st.sampled_from([5, 6]), outcome=st.sampled_from(["well", "row", "lost"]))
    def close_lane(self, token: int, outcome: str) -> None:
        batch = self.scheduler.pacing.batch
        if batch is None:
            return
        if outcome == "lost":
            self.scheduler.give_up(batch)
            return
        rows = results(batch, token)
        if outcome == "row":
            rows[0].error = "broken"
        self.scheduler.commit(batch, rows)

    @rule(token=st.sampled_from([5, 6]), error=st.booleans())
    def commit(self, token: int, error: bool = False) -> None:
        if self.in_flight:
            batch = self.in_flight.pop(0)
            rows = results(batch, token)
            if error:
                failed = rows[0].verified[-1] if rows[0].verified else rows[0]
                failed.error = "broken"
            said = [len(request.output_token_ids) for request in batch.requests]
            pages = self.scheduler.cache.poisoned_pages(batch, rows)
            self.scheduler.commit(batch, rows)
            held = {page for request in self.scheduler.running for page in request.pages}
            held |= {page for node in self.scheduler.cache.tree.nodes() for page in node.pages}
            assert held.isdisjoint(pages), "pages that are cleared belong to no request"
            for request, before, own in zip(
                batch.requests, said, batch.drafts or [[]] * len(said), strict=True
            ):
                assert len(request.output_token_ids) - before <= 1 + len(own)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            lane = self.scheduler.pacing.batch
            for request in () if lane is None else lane.requests:
                assert request.slot >= 0, "who is in the lane's step keeps what the step writes to"
                assert len(request.pages) * 4 >= request.scheduled_len > 0

    def teardown(self) -> None:
        """Whatever happened, everything left can still be brought to its end, and no page stays owned."""
        if not hasattr(self, "scheduler"):
            return
        self.close_lane(5, "well")
        while self.in_flight:
            self.commit(5)
        self.scheduler.pacing.is_ready = False
        finish_all(self.scheduler)
        assert all(r.finished for r in self.requests)
        for request in self.requests:
            if request.finish_reason is FinishReason.LENGTH:
                assert len(request.output_token_ids) == request.params.max_tokens
        cache = self.scheduler.cache
        assert cache.pool.available + cache.tree.evictable_pages == cache.pool.usable


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=2 * settings().max_examples, stateful_step_count=40, deadline=None
)


def test_equal_calls_give_equal_batches() -> None:
    """Two copies fed alike plan alike: what lets several ranks schedule without talking."""
    logs = []
    for _ in range(2):
        scheduler = build_scheduler(Knobs(num_pages=20, budget=13, max_num_seqs=3))
        for i in range(6):
            scheduler.add(make_request(f"r{i}", prompt_of(i % 2, 9 + i), max_tokens=8))
        log = []
        while scheduler.has_work:
            batch = step(scheduler)
            log.append(
                [(r.key, r.slot, n) for r, n in zip(batch.requests, batch.num_new_tokens, strict=True)]
            )
        logs.append(log)
    assert logs[0] == logs[1]


def test_decoding_never_waits_for_a_long_prompt() -> None:
    """A running request gets its token in every step while a 100-token prompt is chunked."""
    scheduler = build_scheduler(Knobs(budget=16))
    short, long = (
        make_request("short", prompt_of(1, 4), max_tokens=20),
        make_request("long", prompt_of(2, 100)),
    )
    scheduler.add(short)
    step(scheduler)
    scheduler.add(long)
    while long.computed_len < 100:
        batch = step(scheduler)
        assert batch.requests[0] is short
        assert batch.num_tokens <= 16


def test_a_request_alone_reaches_the_context_limit() -> None:
    """A request as large as the pool runs: no watermark or reservation may keep it waiting."""
    scheduler = build_scheduler(Knobs(num_pages=11, page_size=4, budget=16))
    assert scheduler.limits.context_limit == 40
    request = make_request("big", prompt_of(1, 30), max_tokens=10)
    scheduler.add(request)
    finish_all(scheduler)
    assert request.finish_reason is FinishReason.LENGTH
    assert len(request.output_token_ids) == 10


@pytest.mark.parametrize(
    ("length", "output", "field"), [(40, 1, "input_ids"), (30, 11, "max_tokens"), (0, 1, "one")]
)
def test_what_can_never_fit_is_refused(length: int, output: int, field: str) -> None:
    """The request is refused at the door, with the field and the limit, and does not wait for ever."""
    scheduler = build_scheduler(Knobs(num_pages=11, page_size=4))
    with pytest.raises(RequestRefused, match=field):
        scheduler.add(make_request("big", prompt_of(1, length), max_tokens=output))


def test_a_replayed_step_tells_nothing_of_a_request_that_gave_up_its_pages() -> None:
    """They may have been written to meanwhile; the same token is computed again when it resumes."""
    for replayed in (False, True):
        scheduler = build_scheduler(Knobs(num_pages=11, page_size=4, max_num_seqs=2, budget=64))
        old, young = (make_request(f"r{n}", prompt_of(n, 13), max_tokens=12) for n in range(2))
        for request in (old, young):
            scheduler.add(request)
        step(scheduler)
        while young.slot >= 0:  # one step is always in flight, as in the overlap loop
            before = scheduler.schedule()
            following = scheduler.schedule() if before is not None else None
            assert before is not None
            reported = scheduler.commit(before, results(before), replayed=replayed)
            if following is not None:
                scheduler.commit(following, results(following))
        assert young in before.requests
        assert (young in reported) is not replayed
        assert young.inflight_tokens == 0
        finish_all(scheduler)
        assert len(young.output_token_ids) == len(old.output_token_ids) == 12


def test_the_youngest_is_preempted_and_resumes_from_the_tree() -> None:
    """Out of pages, seniority decides; the victim keeps its tokens and finishes too."""
    scheduler = build_scheduler(Knobs(num_pages=13, page_size=4, budget=64))
    old, young = (
        make_request(name, prompt_of(i, 16), max_tokens=20) for i, name in enumerate(("old", "young"))
    )
    scheduler.add(old)
    scheduler.add(young)
    finish_all(scheduler)
    assert (old.num_preemptions, len(old.output_token_ids)) == (0, 20)
    assert young.num_preemptions >= 1
    assert len(young.output_token_ids) == 20


def test_priority_goes_first_among_waiting() -> None:
    """Lower priority is admitted before an earlier arrival."""
    scheduler = build_scheduler(replace(Knobs(), max_num_seqs=1))
    first, second = make_request("first", [1, 2]), make_request("second", [3, 4])
    second.priority = -1
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler).requests == [second]


def test_chunks_end_on_pages_or_make_progress() -> None:
    """Aligned when the budget reaches a border, else as much as there is; the last chunk is exact."""
    assert chunk_size(0, 100, 10, 4) == 8
    assert chunk_size(6, 100, 10, 4) == 10
    assert chunk_size(1, 100, 2, 4) == 2
    assert chunk_size(5, 7, 10, 4) == 7
    assert chunk_size(0, 7, 0, 4) == 0


def test_a_token_is_the_main_lanes_even_where_streaming_pays_from_one_on() -> None:
    """For a model whose experts are streamed at any length, decoding is never left to the prefill lane, which
    takes prompts only: it would not be computed.
    """
    scheduler = build_scheduler(
        Knobs(num_pages=30, page_size=4, max_num_seqs=4, budget=8), prefill_chunk_max=20
    )
    scheduler.pacing.is_ready, scheduler.pacing.min_tokens, scheduler.pacing.idle_min_tokens = True, 1, 1
    scheduler.add(make_request("short", prompt_of(0, 1), max_tokens=4))
    scheduler.add(make_request("long", prompt_of(1, 12), max_tokens=4))
    for _ in range(20):
        if scheduler.wants_lane():
            lane = scheduler.schedule_lane()
            assert lane is not None
            scheduler.commit(lane, results(lane))
        if scheduler.has_work:
            step(scheduler)
    assert not scheduler.has_work


def test_pages_are_asked_for_once_before_each_step_that_is_planned() -> None:
    """What changes the number of pages is called where a step is planned, and not where the lane is only
    asked about: with every call memory may move.
    """
    scheduler = build_scheduler(Knobs(num_pages=30, page_size=4), prefill_chunk_max=20)
    scheduler.supply = supply = LateSupply(scheduler)
    pacing = scheduler.pacing
    pacing.is_ready, pacing.min_tokens, pacing.idle_min_tokens = True, 8, 8
    scheduler.add(make_request("short", prompt_of(0, 3), max_tokens=4))
    scheduler.add(make_request("long", prompt_of(1, 12), max_tokens=4))
    assert scheduler.wants_lane()
    assert supply.asked == 0
    lane = scheduler.schedule_lane()
    assert supply.asked == 1
    main = scheduler.schedule()
    assert supply.asked == 2
    assert lane is not None
    assert main is not None
    for batch in (main, lane):
        scheduler.commit(batch, results(batch))
