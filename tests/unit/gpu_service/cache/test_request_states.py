"""Invariant: a state that a step in flight may read again is never written, and prefixes end in states.

A scheduler without a model: slots of states are only numbers here, and the books are checked after each step.
"""

from __future__ import annotations

import random

import pytest

from gpu_service.cache.radix_cache import RadixCache
from gpu_service.cache.request_cache import PagePool, RequestCache
from gpu_service.cache.request_states import SLOTS_PER_REQUEST, OutOfStates, RequestStates, StatePool
from gpu_service.core.request import Request, SamplingParams, SchedulerLimits
from gpu_service.core.results import RowResult
from gpu_service.core.step import Batch
from gpu_service.scheduler.scheduler import Scheduler

PAGE = 4


def _scheduler(snapshots: int = 8, pages: int = 64, requests: int = 4, budget: int = 32) -> Scheduler:
    states = RequestStates(StatePool(1 + SLOTS_PER_REQUEST * requests + snapshots), snapshots)
    cache = RequestCache(PagePool(pages), RadixCache(PAGE, states.forget), True, states)
    return Scheduler(SchedulerLimits(requests, budget, (pages - 1) * PAGE, 1), cache)


def _request(name: str, prompt: list[int], max_tokens: int = 6) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def _commit(scheduler: Scheduler, batch: Batch, token: int = 5) -> None:
    scheduler.commit(batch, [RowResult(token_id=token) for _ in batch.requests])
    scheduler.check_integrity()


def _finish(scheduler: Scheduler, request: Request) -> None:
    scheduler.add(request)
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert batch is not None
        _commit(scheduler, batch)


def test_a_prompt_stops_where_its_whole_pages_end_and_the_next_one_starts_there() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("a", list(range(10, 21)), max_tokens=1))
    first = scheduler.schedule()
    assert first is not None
    assert first.num_new_tokens == [8]
    _commit(scheduler, first)
    second = scheduler.schedule()
    assert second is not None
    assert (second.num_new_tokens, second.state_reads) == ([3], first.state_writes)
    _commit(scheduler, second)
    again = _request("b", list(range(10, 21)))
    scheduler.add(again)
    batch = scheduler.schedule()
    assert batch is not None
    assert (again.cached_len, batch.num_new_tokens, batch.state_reads) == (8, [3], first.state_writes)


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (8, 4), (9, 8), (13, 8), (21, 8)])
def test_a_prefix_is_only_as_long_as_the_deepest_state(length: int, cached: int) -> None:
    """For a prompt of 21 tokens, states were kept after 8 of an earlier prompt's, and nowhere later."""
    scheduler = _scheduler()
    _finish(scheduler, _request("short", list(range(9)), max_tokens=1))
    _finish(scheduler, _request("shorter", list(range(5)), max_tokens=1))
    probe = _request("probe", list(range(length)), max_tokens=1)
    _finish(scheduler, probe)
    assert probe.cached_len == cached


def test_the_output_can_be_continued() -> None:
    """A conversation's next turn starts from the last whole page of the answer."""
    scheduler = _scheduler()
    turn = _request("turn", list(range(6)), max_tokens=9)
    _finish(scheduler, turn)
    following = _request("next", [*turn.known_tokens(0, turn.total_len), 1, 2, 3])
    _finish(scheduler, following)
    assert following.cached_len == 12


def test_what_steps_in_flight_read_is_not_written() -> None:
    """Two steps in flight, aborts and preemptions in between: either step may be run again as planned."""
    chance = random.Random(3)
    scheduler = _scheduler(snapshots=3, pages=14, requests=3, budget=16)
    in_flight: list[Batch] = []
    for number in range(300):
        if len(scheduler.waiting) < 3:
            length = chance.randrange(1, 24)
            scheduler.add(_request(f"{number}", [chance.randrange(2) for _ in range(length)], 9))
        if chance.random() < 0.1 and scheduler.running:
            scheduler.abort(chance.choice(scheduler.running).request_id)
        if len(in_flight) == 2:
            _commit(scheduler, in_flight.pop(0), token=chance.randrange(2))
        batch = scheduler.schedule()
        if batch is None:
            continue
        for earlier in in_flight:
            assert not set(batch.state_writes) & set(earlier.state_reads)
            assert not set(batch.state_writes) & set(earlier.state_writes)
        assert not set(batch.state_writes) & set(batch.state_reads)
        kept = {node.state_slot for node in scheduler.cache.tree.nodes()}
        assert not set(batch.state_writes) & kept
        in_flight.append(batch)
        scheduler.check_integrity()
    assert scheduler.num_preemptions > 0
    assert scheduler.cache.hit_tokens > 0


def test_a_failed_step_gives_its_slots_back() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("a", list(range(9))))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.abort("a")
    states = scheduler.cache.states
    assert states is not None
    taken = states.pool.available
    scheduler.ended(batch)
    scheduler.check_integrity()
    assert states.pool.available == taken + 1


def test_snapshots_are_bounded_and_the_oldest_prefix_goes_first() -> None:
    scheduler = _scheduler(snapshots=2)
    for seed in (0, 20, 40):
        _finish(scheduler, _request(f"{seed}", list(range(seed, seed + 6)), max_tokens=1))
    states = scheduler.cache.states
    assert states is not None
    assert states.num_snapshots == 2
    for seed, cached in ((20, 4), (40, 4), (0, 0)):
        again = _request(f"again {seed}", list(range(seed, seed + 6)), max_tokens=1)
        _finish(scheduler, again)
        assert again.cached_len == cached


def test_without_snapshots_nothing_is_split_or_kept() -> None:
    scheduler = _scheduler(snapshots=0)
    for name in ("a", "b"):
        request = _request(name, list(range(10)))
        _finish(scheduler, request)
        assert request.cached_len == 0
    assert scheduler.cache.tree.num_pages == 0


def test_slots_have_holders() -> None:
    pool = StatePool(3)
    first, second = pool.alloc(), pool.alloc()
    with pytest.raises(OutOfStates, match="all 2 slots"):
        pool.alloc()
    pool.hold(first)
    pool.drop(first)
    assert pool.available == 0
    pool.drop(first)
    with pytest.raises(ValueError, match="is not held"):
        pool.drop(first)
    with pytest.raises(ValueError, match="is free"):
        pool.hold(first)
    pool.drop(0)
    with pytest.raises(AssertionError):
        pool.check_integrity([first, second])
    pool.check_integrity([second])
