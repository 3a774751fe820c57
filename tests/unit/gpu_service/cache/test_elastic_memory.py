"""Invariant: pages that a step may still touch, also when it is run again, have memory; requests get memory
before experts do; and it goes back only where it stays spare.

Pages are of a host's pool, and every launched step writes to all its pages, late and twice: one without
memory ends the process.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from dataclasses import replace

import pytest
import torch

from gpu_service.cache.elastic_pages import ElasticPages
from gpu_service.cache.radix_cache import RadixCache
from gpu_service.cache.request_cache import PagePool, RequestCache
from gpu_service.core.request import Request, SchedulerLimits
from gpu_service.core.results import RowResult
from gpu_service.core.step import Batch
from gpu_service.device.host_virtual_memory import HostVirtualMemory
from gpu_service.device.stream import HostDeviceStream
from gpu_service.device.virtual_memory import PhysicalPool
from gpu_service.memory import elastic
from gpu_service.memory.elastic import ElasticMemory, first_groups, stale_after
from gpu_service.scheduler.scheduler import Scheduler
from tests.helpers.engine_harness import make_request

CHUNK, PAGE, ROW = 4096, 4, 1500
CPU = torch.device("cpu")


class Experts:
    """Has chunks, and gives them up a step after they were claimed, or at once where it has to."""

    def __init__(self, pool: PhysicalPool, chunks: int) -> None:
        self.pool = pool
        self.handles = pool.take(chunks)
        self.wants_memory = True
        self.waits = 0

    def give_up_now(self) -> None:
        self.waits += 1
        self._give()

    def between_steps(self) -> None:
        """Gives what is claimed, or takes what is spare."""
        self._give()
        spare = self.pool.free - self.pool.claimed
        if spare > 0:
            self.handles += self.pool.take(spare, spares_claimed=True)

    def _give(self) -> None:
        lack = min(self.pool.claimed - self.pool.free, len(self.handles))
        if lack > 0:
            self.pool.give_back(self.handles[-lack:])
            del self.handles[-lack:]


class World:
    """A scheduler whose pages come and go, and steps in flight that write to theirs."""

    def __init__(self, most_pages: int = 120, chunks: int = 12, experts: int = 60, floor: int = 8) -> None:
        self.now, self.numbers = 0.0, itertools.count()
        self.stale_after_s = math.inf
        pool = PhysicalPool(HostVirtualMemory(), CHUNK)
        pool.add(chunks + experts)
        self.pages = ElasticPages(pool, most_pages, ROW)
        self.tensors = [self.pages.allocate((most_pages, size), torch.uint8, CPU) for size in (ROW, ROW // 3)]
        self.experts = Experts(pool, experts)
        self.pages.add(first_groups(self.pages, pool.free, most_pages))
        books = PagePool(most_pages, self.pages.absent_pages())
        self.cache = RequestCache(books, RadixCache(PAGE), prefix_caching=True)
        limits = SchedulerLimits(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            context_limit=PAGE * (most_pages - 1),
            watermark_pages=1,
        )
        self.scheduler = Scheduler(limits, self.cache)
        self.memory = ElasticMemory(
            self.pages,
            self.cache,
            self.experts,
            HostDeviceStream(),
            floor,
            lambda share: self.stale_after_s,
            lambda: self.now,
        )
        self.scheduler.supply = self.memory
        self.in_flight: deque[tuple[Batch, list[int]]] = deque()

    def add(self, name: int, length: int, outputs: int) -> Request:
        """Returns a prompt of its own."""
        prompt = [3 + (k * k + 7 * k + 31 * name) % 190 for k in range(length)]
        request = make_request(f"{name}-{next(self.numbers)}", prompt, max_tokens=outputs)
        self.scheduler.add(request)
        return request

    def launch(self) -> None:
        """Plans a step, if there is one; what it touches is known from then on."""
        self.now += 0.02
        batch = self.scheduler.schedule()
        self.experts.between_steps()
        if batch is not None:
            touched = [page for request in batch.requests for page in request.pages]
            self.in_flight.append((batch, [0, *touched]))

    def commit(self) -> None:
        """Every step in flight runs, and runs again; the oldest one has ended."""
        for _ in range(2):
            for _, touched in self.in_flight:
                for tensor in self.tensors:
                    tensor[touched] = 1
        batch, _ = self.in_flight.popleft()
        self.scheduler.commit(batch, [RowResult(5 if samples else None) for samples in batch.samples])

    def check(self) -> None:
        """Who owns what is consistent."""
        self.scheduler.check_integrity()
        self.memory.check_integrity()
        pool = self.pages.pool
        assert self.pages.mapped + len(self.experts.handles) + pool.free == pool.size

    def finish(self, depth: int = 2) -> None:
        """Steps until nothing is left."""
        for _ in range(3000):
            if len(self.in_flight) < depth and self.scheduler.has_work:
                self.launch()
            if not (self.in_flight or self.scheduler.has_work):
                return
            if self.in_flight:
                self.commit()
        raise AssertionError("requests starve")


@pytest.mark.parametrize("seed", range(12))
def test_steps_touch_pages_that_have_memory(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrivals in waves, aborts and prefixes that lose their worth, two steps in flight."""
    monkeypatch.setattr(elastic, "_HELD_S", 0.1)
    monkeypatch.setattr(elastic, "_HEADROOM_TOKENS", 16)
    rng, world = random.Random(seed), World()
    requests: list[Request] = []
    for number in range(600):
        if rng.random() < (0.02 if number // 100 % 2 else 0.1):
            requests.append(world.add(rng.randrange(6), rng.choice((3, 20, 90, 300)), rng.randrange(1, 30)))
        if requests and rng.random() < 0.05:
            world.scheduler.abort(rng.choice(requests).request_id)
        world.stale_after_s = rng.choice((0.0, 0.1, math.inf))
        # An engine with a prefill lane asks more often than it plans.
        world.memory.before_step(world.scheduler)
        if len(world.in_flight) < 2:
            world.launch()
        if world.in_flight and rng.random() < 0.7:
            world.commit()
        if number % 8 == 0:
            world.check()
    world.finish()
    world.check()
    assert world.memory.taken_bytes > 0
    assert world.memory.given_bytes > 0


def test_an_idle_engine_finds_memory_for_the_longest_request() -> None:
    """Nothing else runs, so memory would never be given up if that were not asked for at once."""
    world = World()
    limit = world.scheduler.limits.context_limit
    assert limit > PAGE * world.cache.pool.usable
    request = world.add(1, limit - 4, 4)
    world.finish()
    assert len(request.output_token_ids) == 4
    assert world.experts.waits == 1


def test_memory_goes_back_when_it_stays_spare() -> None:
    """After a long prompt, with one stream that goes on, all but a little goes back within half a second; and
    a prefix that is worth its memory keeps it.
    """
    world = World()
    stream, long = world.add(1, 4, 250), world.add(2, 300, 1)
    world.launch()
    while not long.finished:
        world.commit()
        world.launch()
    most, ended = world.cache.pool.usable, world.now
    while world.now < ended + 1.0 and not stream.finished:
        world.commit()
        world.launch()
    assert world.cache.pool.usable == most, "the prefix was worth its memory"
    world.stale_after_s = 0.0
    begin = world.now
    while world.cache.pool.usable == most:
        world.commit()
        world.launch()
    assert world.now - begin < 0.6
    for _ in range(10):
        world.commit()
        world.launch()
    assert world.cache.pool.usable < most - 40
    world.finish()
    world.check()


def test_streams_do_not_keep_the_memory_that_a_prompt_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go on while a prompt of many steps is computed, and take a page now and then: when it has ended
    all but the groups that they had before, and one more each, go back.
    """
    monkeypatch.setattr(elastic, "_HEADROOM_TOKENS", 16)
    world = World(most_pages=400, chunks=12, experts=200)
    world.scheduler.limits = replace(world.scheduler.limits, max_num_batched_tokens=64)
    streams = [world.add(n, 4, 400) for n in range(2)]
    world.launch()
    long = world.add(9, 900, 1)
    while not long.finished:
        world.commit()
        world.launch()
    most = world.cache.pool.usable
    world.stale_after_s = 0.0
    for _ in range(60):
        world.commit()
        world.launch()
    assert not any(stream.finished for stream in streams)
    held = sum(len(stream.pages) for stream in streams)
    assert most > 200
    assert world.cache.pool.usable < held + 8 + 6 * world.pages.pages_per_group
    world.finish()
    world.check()


def test_prefixes_are_kept_by_what_they_save() -> None:
    """Half of all tokens are found again, a token takes 1 ms and 1 kB, a byte of slots saves 1 us a second:
    after half a second a prefix is worth less. Without hits none has any worth; with nothing known all stay.
    """
    assert stale_after(0.5, 1e-3, 1e3, 1e-6) == pytest.approx(0.5)
    assert stale_after(0.0, 1e-3, 1e3, 1e-6) == 0.0
    assert stale_after(0.5, None, 1e3, 1e-6) == math.inf
    assert stale_after(0.0, None, 1e3, None) == 0.0
    assert stale_after(0.5, 1e-3, 1e3, None) == math.inf
