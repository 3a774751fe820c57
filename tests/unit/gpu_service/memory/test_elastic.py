"""Invariant: whatever moves between KV pages and experts, each step computes every expert that a row chose
once, finds in its pages what was written there, and touches no memory that it does not own.

Everything together: a scheduler with arrivals, aborts, preemptions, shared prefixes and a prefill lane;
exchanges by the engine's own placement; slots and pages that lend each other memory; damage, and expert
servers that are lost with steps in flight, which are run again; on a simulated device whose streams advance
at random. Memory is really unmapped, and each page has bytes of its own: a touch of what is not mapped ends
the process, and one of another owner's memory is seen. 5 * 10^3 steps, 10^5 with --full.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

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
from gpu_service.experts.adaptive import placement as placement_module
from gpu_service.experts.costs import ExpertCosts
from gpu_service.memory import elastic
from gpu_service.memory.elastic import ElasticMemory, first_groups
from gpu_service.scheduler.scheduler import Scheduler
from tests.helpers.engine_harness import make_request
from tests.helpers.exchanging_engine import Engine, Step

CHUNK, PAGE, ROW, PAGES = 4096, 4, 1500, 90
STEPS, WORLDS, FULL_WORLDS, DEPTH = 500, 4, 200, 2


@dataclass
class Planned:
    """A batch that was launched."""

    batch: Batch
    step: Step
    # Pages that it reads and those that it writes.
    reads: list[int]
    writes: list[int]
    replays: int = 0


class PoolEngine(Engine):
    """Whose steps are a scheduler's, and whose pages share memory with its slots."""

    def __init__(self, seed: int) -> None:
        pool = PhysicalPool(HostVirtualMemory(), CHUNK)
        super().__init__(seed, pool)
        assert self.placement is not None
        self.pages = ElasticPages(pool, PAGES, ROW)
        pool.add(8)
        self.tensor = self.pages.allocate((PAGES, ROW), torch.uint8, torch.device("cpu"))
        self.pages.add(first_groups(self.pages, pool.free, PAGES))
        books = PagePool(PAGES, self.pages.absent_pages())
        self.cache = RequestCache(books, RadixCache(PAGE), prefix_caching=True)
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=4,
                max_num_batched_tokens=24,
                context_limit=PAGE * 40,
                watermark_pages=1,
                prefill_chunk_max=96,
            ),
            self.cache,
        )
        self.now, self.stale_s, self.names = 0.0, math.inf, 0
        self.memory = ElasticMemory(
            self.pages,
            self.cache,
            self.placement,
            HostDeviceStream(),
            8,
            lambda share: self.stale_s,
            lambda: self.now,
        )
        self.scheduler.supply = self.memory
        self.planned: deque[Planned] = deque()
        self.open_lane: Planned | None = None
        self.requests: list[Request] = []

    def step(self) -> None:
        """Takes the engine's turn, with what may happen before it."""
        self.now += self.rng.choice([0.01, 0.2])
        self.happen()
        self.come_and_go()
        self.tend_lane()
        if len(self.planned) < DEPTH and (batch := self.scheduler.schedule()) is not None:
            self.change()
            self.planned.append(planned := self.plan(batch))
            self.run(planned)
        self.device.advance(self.rng.randrange(24))
        if self.planned and (self.planned[0].step.has_ended or self.rng.random() < 0.5):
            self.commit()

    def come_and_go(self) -> None:
        """Prompts of a few topics, long and short, and aborts."""
        if len(self.scheduler.waiting) < 4 and self.rng.random() < 0.3:
            length, topic = self.rng.choice([3, 20, 60, 140]), self.rng.randrange(4)
            prompt = [3 + (k * k + 7 * k + 31 * topic) % 190 for k in range(length)]
            self.names += 1
            request = make_request(str(self.names), prompt, max_tokens=self.rng.randrange(1, 20))
            self.requests.append(request)
            self.scheduler.add(request)
        if self.requests and self.rng.random() < 0.03:
            self.scheduler.abort(self.rng.choice(self.requests).request_id)
        self.stale_s = self.rng.choice([0.0, 0.1, math.inf])

    def tend_lane(self) -> None:
        """Does what `Engine._tend` does: nothing of the main lane is in flight when a step is
        planned here.
        """
        books = self.scheduler.pacing
        if self.open_lane is not None and self.open_lane.step.has_ended:
            self.open_lane, ended = None, self.open_lane
            self.resident.is_held = False
            self.settle(ended)
        books.is_ready, books.min_tokens, books.idle_min_tokens = self.rng.random() < 0.8, 30, 30
        if not self.scheduler.wants_lane():
            return
        while self.planned:
            self.commit()
        if not self.scheduler.wants_lane() or (batch := self.scheduler.schedule_lane()) is None:
            return
        launched = self.device.record_read()
        self.device.current = "lane"
        self.device.compute_waits(launched)
        self.resident.is_held = True
        self.open_lane = self.plan(batch)
        self.run(self.open_lane, is_lane=True)

    def plan(self, batch: Batch) -> Planned:
        """Returns what is known of a step once it is launched."""
        reads, writes = [0], set[int]()
        for request, start, count in zip(
            batch.requests, batch.start_positions, batch.num_new_tokens, strict=True
        ):
            reads += request.pages[: start // PAGE]
            writes |= set(request.pages[start // PAGE : -(-(start + count) // PAGE)])
        return Planned(batch, self.new_step(), reads, sorted(writes))

    def run(self, planned: Planned, is_lane: bool = False) -> None:
        """Experts of all layers, between what is read and what is written in pages."""
        stream = "lane" if is_lane else "main"
        self.device.current = stream
        self.device.launch(lambda: self.touch(planned))
        self.launch(planned.step, is_lane)
        self.device.current = stream
        self.device.launch(lambda: self.touch(planned))
        self.device.current = "main"

    def touch(self, planned: Planned) -> None:
        """Each page has a byte of its own, but for the dummy page."""
        for page in planned.writes:
            self.tensor[page] = _mark(page)
        for page in planned.reads[1:]:
            if not (self.tensor[page] == _mark(page)).all():
                self.wrong.append(f"page {page} was overwritten")
        self.tensor[0] = self.tensor[0] + 1

    def commit(self) -> None:
        """Waits for the oldest step; where it was lost it is run again, with those after it, as
        `StepsInFlight` does.
        """
        while True:
            while not self.planned[0].step.has_ended:
                self.device.advance(1)
            if not self.planned[0].step.is_lost:
                break
            self.device.drain()
            self.servers_are_there = True
            for planned in self.planned:
                planned.step, planned.replays = Step(planned.step.ids), planned.replays + 1
                self.run(planned)
        self.settle(self.planned.popleft())

    def settle(self, planned: Planned) -> None:
        """Applies what a step has computed."""
        self.check(planned.step)
        results = [RowResult(5 if samples else None) for samples in planned.batch.samples]
        self.scheduler.commit(planned.batch, results, replayed=planned.replays > 0)

    def check_pool(self) -> None:
        """Every chunk has one owner, and every page and slot in use has memory."""
        assert self.placement is not None
        assert self.placement.supply is not None
        self.scheduler.check_integrity()
        self.memory.check_integrity()
        self.placement.supply.check_integrity()
        slots = [slots.memory for slots in self.resident.slots.values() if slots.memory is not None]
        holders = [*self.memory.holders(), *(handle for memory in slots for handle in memory.holders())]
        assert len(holders) == len(set(holders)), "a chunk has two owners"
        assert len(holders) + self.memory.pool.free == self.memory.pool.size, "a chunk is lost"

    def finish(self) -> None:
        """Steps until no request is left."""
        self.servers_are_there = True
        for _ in range(3000):
            if not (self.scheduler.has_work or self.planned or self.open_lane):
                break
            self.device.drain()
            self.tend_lane()
            if len(self.planned) < DEPTH and (batch := self.scheduler.schedule()) is not None:
                self.change()
                self.planned.append(planned := self.plan(batch))
                self.run(planned)
            elif self.planned:
                self.commit()
            self.now += 0.1
        assert not self.scheduler.has_work, "requests starve"
        self.end()


def _mark(page: int) -> int:
    return 1 + page % 250


@pytest.mark.parametrize(
    "seed",
    [*range(WORLDS), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(WORLDS, FULL_WORLDS))],
)
def test_pages_and_experts_share_one_pool(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until every request has ended, with the tokens that it was to have."""
    monkeypatch.setattr(ExpertCosts, "copy_price", lambda costs, nbytes: 0.1)
    monkeypatch.setattr(placement_module, "READ_EVERY_S", 0.0)
    monkeypatch.setattr(placement_module, "_CAREFUL_S", 0.01)
    monkeypatch.setattr(elastic, "_HELD_S", 0.3)
    monkeypatch.setattr(elastic, "_HEADROOM_TOKENS", 8)
    engine = PoolEngine(seed)
    for number in range(STEPS):
        engine.step()
        assert engine.wrong == []
        if number % 16 == 0:
            engine.check_pool()
    engine.finish()
    engine.check_pool()
    assert engine.wrong == []
    for request in engine.requests:
        assert request.error_message == ""
        is_aborted = request.finish_reason is not None and request.finish_reason.name == "ABORT"
        assert is_aborted or len(request.output_token_ids) == request.params.max_tokens
    assert engine.memory.taken_bytes > 0
    assert engine.memory.given_bytes > 0
    assert engine.ended > STEPS // 4
