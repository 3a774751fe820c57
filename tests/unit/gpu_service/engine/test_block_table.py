"""Guards the host's block table: a row is the pages of the request that runs in its slot, of no other."""

from __future__ import annotations

import random

import numpy as np

from gpu_service.core.results import RowResult
from gpu_service.engine.input_builder import BlockTable
from gpu_service.scheduler.scheduler import Scheduler
from tests.helpers.engine_harness import Knobs, build_scheduler, make_request, prompt_of

PAGE_SIZE = 4


def synced_rows(table: BlockTable, scheduler: Scheduler) -> None:
    """One step, after which every scheduled request's row must be its own pages and padding."""
    batch = scheduler.schedule()
    assert batch is not None
    slots = np.asarray([request.slot for request in batch.requests])
    rows = table.rows(slots, table.sync(batch.requests))
    assert rows.shape[1] == max(len(request.pages) for request in batch.requests)
    for request, row in zip(batch.requests, rows.tolist(), strict=True):
        padding = [0] * (len(row) - len(request.pages))
        assert row == request.pages + padding, f"{request.key} would read another request's pages"
    scheduler.commit(batch, [RowResult(5 if samples else None) for samples in batch.samples])


def test_rows_of_ended_requests_are_never_taken_for_those_of_new_ones() -> None:
    """A slot's next request may live at the memory address of the ended one, with as many pages."""
    scheduler = build_scheduler(Knobs(num_pages=40, page_size=PAGE_SIZE, max_num_seqs=2, budget=64))
    table = BlockTable(num_slots=2, max_pages=16)
    lengths = random.Random(7)
    for number in range(200):
        prompt = prompt_of(number, lengths.randrange(1, 24))
        scheduler.add(make_request(f"r{number}", prompt, max_tokens=lengths.randrange(1, 4)))
        while scheduler.has_work:
            synced_rows(table, scheduler)


def test_rows_follow_pages_that_the_prefix_tree_replaces() -> None:
    """Requests with one prompt swap their duplicates for the tree's pages while they run."""
    scheduler = build_scheduler(Knobs(num_pages=60, page_size=PAGE_SIZE, max_num_seqs=4, budget=64))
    table = BlockTable(num_slots=4, max_pages=16)
    for number in range(12):
        scheduler.add(make_request(f"r{number}", prompt_of(number % 2, 17), max_tokens=6))
    while scheduler.has_work:
        synced_rows(table, scheduler)
