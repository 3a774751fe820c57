"""Guards how prompts share a step's budget: short ones start at once, and none waits without a bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_service.core.images import PreparedImage, PromptImage, locate
from gpu_service.core.request import Request, SchedulerLimits
from gpu_service.core.results import RowResult
from gpu_service.core.step import Batch
from gpu_service.scheduler.pacing import PromptTurns
from gpu_service.scheduler.scheduler import Scheduler
from tests.helpers.engine_harness import Knobs, build_scheduler, make_request, prompt_of

PAGE, SEQS = 4, 8


def step(scheduler: Scheduler) -> Batch:
    """Returns one synchronous step in which every row samples 5."""
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.commit(batch, [RowResult(5 if samples else None) for samples in batch.samples])
    scheduler.check_integrity()
    return batch


def tokens_of(batch: Batch, request: Request) -> int:
    """Returns what the step computes for a request."""
    pairs = zip(batch.requests, batch.num_new_tokens, strict=True)
    return sum(count for other, count in pairs if other is request)


def roomy(budget: int, num_seqs: int = SEQS, scored_token_cost: int = 1) -> Scheduler:
    """Returns a scheduler that never lacks pages."""
    knobs = Knobs(num_pages=40_000, max_num_seqs=num_seqs, budget=budget, context_limit=10_000)
    scheduler = build_scheduler(knobs)
    limits: SchedulerLimits = replace(scheduler.limits, scored_token_cost=scored_token_cost)
    scheduler.limits = limits
    return scheduler


def seeing_request(scheduler: Scheduler, prompt_len: int, images: list[tuple[int, int]]) -> Request:
    """Waits, with images at these places whose tokens see one another."""
    request = make_request("seeing", prompt_of(1, prompt_len))
    pixels = np.zeros((1, 1), np.float32)
    placed = [
        PromptImage(PreparedImage(-1 - start, pixels, (1, 1, count), (1, count)), start, 0, count)
        for start, count in images
    ]
    request.vision = locate(prompt_len, placed, sees_ahead=True)
    scheduler.add(request)
    return request


@pytest.mark.parametrize("decoding", [0, 6])
def test_images_that_see_ahead_are_computed_in_one_step(decoding: int) -> None:
    """However long the other prompts are, and although decoding leaves less than the image needs."""
    scheduler = roomy(budget=16)
    for number in range(decoding):
        scheduler.add(make_request(f"d{number}", prompt_of(number, 2), max_tokens=500))
        step(scheduler)
    images = [(3, 12), (16, 5), (21, 16), (60, 9)]
    request = seeing_request(scheduler, 75, images)
    short = make_request("short", prompt_of(2, 30))
    scheduler.add(short)
    ends = []
    for _ in range(60):
        batch = step(scheduler)
        assert 0 < batch.num_tokens <= 16
        if tokens_of(batch, request):
            ends.append(request.scheduled_len)
        if request.scheduled_len >= 75 and short.scheduled_len >= 30:
            break
    assert ends[-1] >= 75
    assert short.scheduled_len >= 30
    for end in ends:
        assert not any(start < end < start + count for start, count in images), ends


def checked_step(scheduler: Scheduler) -> None:
    """A step, and that: budget, decoding first, whole pages, half of the rest for the oldest prompt."""
    budget = scheduler.limits.max_num_batched_tokens
    decoding = [r for r in scheduler.running if r.planned_len - r.scheduled_len == 1]
    begun = [r for r in scheduler.running if r.planned_len - r.scheduled_len > 1]
    prompts = [*begun, *scheduler.waiting]
    oldest = min(prompts, key=lambda request: request.arrival, default=None)
    need = oldest.prompt_len - oldest.scheduled_len if oldest is not None else 0
    batch = step(scheduler)
    assert 0 < batch.num_tokens <= budget
    assert all(tokens_of(batch, request) == 1 for request in decoding if not request.finished)
    rows = zip(batch.requests, batch.start_positions, batch.num_new_tokens, batch.samples, strict=True)
    for request, start, count, samples in rows:
        if not samples and request is not oldest:
            assert (start + count) % PAGE == 0, f"{request.key}: a chunk ends within a page"
    if oldest is not None and (oldest.slot >= 0 or len(scheduler.running) < SEQS):
        half = (budget - len(decoding) + 1) // 2
        assert tokens_of(batch, oldest) >= min(need, max(1, half - PAGE + 1))


ARRIVALS = st.lists(
    st.lists(st.tuples(st.integers(1, 120), st.integers(1, 6)), max_size=3), min_size=1, max_size=25
)


@settings(max_examples=settings().max_examples // 3)  # each of them has hundreds of steps
@given(arrivals=ARRIVALS, budget=st.integers(SEQS + 2, 64))
def test_every_prompt_is_done_within_the_work_of_its_elders(
    arrivals: list[list[tuple[int, int]]], budget: int
) -> None:
    """A prompt waits at most for what older prompts need, at half the budget, whatever arrives later, and
    however short.

    With it in every step: the budget holds, each decode gets its token, chunks are whole pages.
    """
    scheduler = roomy(budget, SEQS)
    requests: list[Request] = []
    seen: dict[str, int] = {}
    pace = max(1, (budget - SEQS + 1) // 2 - PAGE + 1)
    done_by: dict[str, int] = {}
    for number in range(100_000):
        for length, output in arrivals[number] if number < len(arrivals) else ():
            request = make_request(f"r{len(requests)}", prompt_of(len(requests), length), max_tokens=output)
            scheduler.add(request)
            requests.append(request)
            elders = [r for r in requests if not r.finished]
            outputs = sum(r.params.max_tokens for r in elders)
            work = sum(-(-(r.prompt_len - r.computed_len) // pace) for r in elders)
            # Its slot comes free at the latest when all elders have also given all of their output.
            done_by[request.key] = number + work + outputs
        if not scheduler.has_work:
            if number >= len(arrivals):
                break
            continue
        checked_step(scheduler)
        for request in requests:
            if request.output_token_ids:
                seen.setdefault(request.key, number)
    late = {key: (at, done_by[key]) for key, at in seen.items() if at > done_by[key]}
    assert not late, f"first tokens later than bounded: {late}"
    assert len(seen) == len(requests)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """After 8000 tokens it has its first token after one step, and the long one loses hardly any."""
    scheduler = roomy(512)
    long = make_request("long", prompt_of(1, 8000), max_tokens=1)
    scheduler.add(long)
    step(scheduler)
    short = make_request("short", prompt_of(2, 20), max_tokens=4)
    scheduler.add(short)
    batch = step(scheduler)
    assert (tokens_of(batch, short), len(short.output_token_ids)) == (20, 1)
    assert tokens_of(batch, long) == 492
    steps = 2
    while not long.finished:
        step(scheduler)
        steps += 1
    assert steps == 16


def test_a_stream_of_short_prompts_leaves_a_long_one_its_half() -> None:
    """More short prompts than a step can take arrive in every step: the long one goes on at half speed."""
    scheduler = roomy(64, num_seqs=16)
    long = make_request("long", prompt_of(1, 640), max_tokens=1)
    scheduler.add(long)
    for number in range(20):
        for index in range(3):
            scheduler.add(make_request(f"s{number}-{index}", prompt_of(2 + number, 30), max_tokens=1))
        batch = step(scheduler)
        assert tokens_of(batch, long) >= 32 or long.finished
        assert batch.num_tokens > 56
    assert long.finished


def test_of_long_prompts_the_older_is_done_first() -> None:
    """Dividing evenly would delay the first and hasten none: equal prompts follow one another."""
    scheduler = roomy(64)
    requests = [make_request(f"r{n}", prompt_of(n, 256), max_tokens=1) for n in range(4)]
    for request in requests:
        scheduler.add(request)
    ended: list[int] = []
    for number in range(1, 17):
        step(scheduler)
        ended += [number] * (sum(r.finished for r in requests) - len(ended))
    assert ended == [4, 8, 12, 16]


def test_a_lower_priority_is_not_overtaken_by_a_shorter_prompt() -> None:
    """Shortness decides among equals only."""
    scheduler = roomy(64)
    first = make_request("first", prompt_of(1, 400), max_tokens=1)
    urgent = make_request("urgent", prompt_of(2, 200), max_tokens=1)
    urgent.priority = -1
    for request in (first, urgent, make_request("short", prompt_of(3, 8), max_tokens=1)):
        scheduler.add(request)
    batch = step(scheduler)
    assert tokens_of(batch, urgent) == 64


def test_a_cached_prefix_makes_a_prompt_short() -> None:
    """Turn is by what is left to compute: a long conversation's next question need not wait."""
    scheduler = roomy(64)
    talk = make_request("talk", prompt_of(1, 400), max_tokens=1)
    scheduler.add(talk)
    while not talk.finished:
        step(scheduler)
    for request in (make_request("a", prompt_of(2, 500)), make_request("b", prompt_of(3, 300))):
        scheduler.add(request)
    again = make_request("again", [*prompt_of(1, 400), 1, 2, 3], max_tokens=1)
    scheduler.add(again)
    step(scheduler)
    assert again.finished
    assert again.cached_len == 400


@pytest.mark.parametrize("cost", [2, 5])
def test_scored_prompt_tokens_take_more_of_the_budget(cost: int) -> None:
    """A prompt whose every position goes through the head gets shorter chunks, so that steps stay short."""
    scheduler = roomy(64, scored_token_cost=cost)
    echoed = make_request("echoed", prompt_of(1, 300), max_tokens=2, prompt_logprobs=0)
    scheduler.add(echoed)
    assert tokens_of(step(scheduler), echoed) == 64 // cost // PAGE * PAGE
    short = make_request("short", prompt_of(2, 16), max_tokens=1)
    scheduler.add(short)
    batch = step(scheduler)
    assert short.finished
    assert tokens_of(batch, echoed) == 48 // cost // PAGE * PAGE
    while not echoed.finished:
        step(scheduler)


def test_no_short_prompt_starts_with_pages_that_an_older_one_will_take() -> None:
    """It would be preempted by it, and computed again; it starts when the long one's pages are had."""
    scheduler = build_scheduler(Knobs(num_pages=41, page_size=4, budget=32, context_limit=1000))
    long = make_request("long", prompt_of(1, 140), max_tokens=2)
    scheduler.add(long)
    step(scheduler)
    short = make_request("short", prompt_of(2, 24), max_tokens=2)
    scheduler.add(short)
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("steps_between", [1.0, 3.3, 10.4])
@pytest.mark.parametrize("steps", [2, 3, 4, 9, 30])
def test_turns_divide_the_time_until_a_prompt_ends(steps: int, steps_between: float) -> None:
    """Between its first step and its last one others have as many steps as take as long as all of its own."""
    turns = PromptTurns(steps_between=steps_between)
    others = 0
    for step in range(steps):
        between = 0
        while not turns.is_due:
            turns.took(False, (steps - step) * 100, 100)
            between += 1
        assert between <= 2 * steps_between + 0.5
        others += between
        turns.took(True, (steps - step - 1) * 100, 100)
    assert abs(others - steps * steps_between) <= 1
    turns.ended()
    assert turns.is_due
