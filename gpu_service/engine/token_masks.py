"""Which tokens the rows of a step may become, for requests with constraints.

A row's mask follows from the tokens before it, so a step that is launched before the last of them is known
awaits its masks: the layers run meanwhile, and sampling is launched when the step before is committed. A
step none of whose rows has a constraint is never held up. Where a row's own mask takes long, as those of
ambiguous grammars do, the row is left out of steps until a thread has computed it. Which rows those are
depends on time: it is decided where messages enter the engine, and ranks receive it like everything else that
steps follow from, so that they plan alike.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import torch
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from gpu_service.core.constraint import OutputConstraint, Words
from gpu_service.core.request import Request, SchedulerLimits, stop_token_ids
from gpu_service.core.step import Batch, SamplingPlan, TokenMasks

# Threads that compute masks where there are enough CPUs, and rows from which it is worth waking them.
_THREADS, _ROWS = 4, 3
# Processor time of one mask, seconds, from which others should not wait for it.
_SLOW_S = 0.004
Rows = list[tuple[int, Request, OutputConstraint]]  # rows of the logits and who has them


class MaskBuilder:
    """Used by the engine thread."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._executor: LLExecutor | None = None
        # The latest masks took long together: whose it was is found out by the next ones.
        self._looks_closer = False
        self._pool: ThreadPoolExecutor | None = None
        # Who sits out, by `Request.key`: as was said last, and as is said here, which is where it is decided.
        self._held: frozenset[str] = frozenset()
        self.announced: set[str] = set()
        # What those who sit out wait for; an output that is gone takes its own along.
        self._awaited: weakref.WeakKeyDictionary[OutputConstraint, Future[Words]] = (
            weakref.WeakKeyDictionary()
        )

    def message(self, running: Collection[Request]) -> str | None:
        """Returns who is to skip steps from now on, for `read` of all ranks; None: nothing has changed.

        Depends on time, so it is asked on the rank where messages enter only.
        """
        held = {request.key for request in running if self._waits(request)}
        if held == self.announced:
            return None
        self.announced = held
        return json.dumps(sorted(held))

    def read(self, message: str) -> None:
        """Applies `message`, at the same place on every rank. Raises ValueError for anything else."""
        self._held = frozenset(json.loads(message))

    def holds(self, request: Request) -> bool:
        """Returns whether the request skips steps, as its slow mask was being computed."""
        if request.key not in self._held or request.constraint is None:
            return False
        # Every draft would need a mask more. That this is said to all ranks makes them decide alike.
        request.speculates = False
        if request.inflight_tokens == 0:
            self._begin(request.constraint)
        return True

    def wait_for_held(self) -> bool:
        """Where nothing can be scheduled: whether a request sits out. Where that is decided it blocks until
        a mask is there; elsewhere the next message says so."""
        if self._awaited and self.announced:
            wait(list(self._awaited.values()), return_when=FIRST_COMPLETED)
            for constraint, ahead in list(self._awaited.items()):
                if ahead.done():
                    del self._awaited[constraint]
        return bool(self._held)

    def _waits(self, request: Request) -> bool:
        constraint = request.constraint
        if constraint is None or not (constraint.is_slow and constraint.follows_grammar):
            return False
        if request.inflight_tokens > 0:
            return True
        if self._begin(constraint).done():
            self._awaited.pop(constraint, None)
            return False
        return True

    def _begin(self, constraint: OutputConstraint) -> Future[Words]:
        if constraint.ahead is None:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="slow masks")
            constraint.ahead = self._awaited[constraint] = self._pool.submit(_mask_of, constraint)
        return constraint.ahead

    def plan(self, batch: Batch, sampling: SamplingPlan) -> SamplingPlan:
        """Returns the same with the batch's masks, or awaiting them."""
        rows = _constrained(batch)
        if not rows:
            return sampling
        places = _places(batch)
        if any(
            constraint.depends_on(places[row] - len(request.output_token_ids))
            for row, request, constraint in rows
        ):
            return replace(sampling, awaits_masks=True)
        return replace(sampling, masks=self.build(batch))

    def build(self, batch: Batch) -> TokenMasks | None:
        """Returns the masks, now that the tokens before are known; None: every row may become anything.

        A request that has ended meanwhile, or that was sent back to wait, has none: its token is dropped.
        """
        places = _places(batch)
        known = [
            entry
            for entry in _constrained(batch)
            if not entry[1].finished and places[entry[0]] == len(entry[1].output_token_ids)
        ]
        rows = _after_drafts(known, batch.preceding_drafts)
        if not rows:
            return None
        words = np.full((len(rows), rows[0][2].num_words), -1, dtype=np.int32)
        self._match(rows, words)
        kept = [
            index
            for index, (_, request, constraint) in enumerate(rows)
            if constraint.finish_mask(words[index], self._banned(request, constraint.num_accepted))
        ]
        if not kept:
            return None
        return TokenMasks(
            rows=torch.tensor([rows[index][0] for index in kept]),
            words=torch.from_numpy(words if len(kept) == len(rows) else words[kept]),
        )

    def _match(self, rows: Rows, words: Words) -> None:
        matchers = [
            (constraint.matcher, index)
            for index, (_, _, constraint) in enumerate(rows)
            if constraint.matcher is not None and constraint.follows_grammar and constraint.ahead is None
        ]
        for index, (_, _, constraint) in enumerate(rows):
            if constraint.ahead is not None:
                words[index] = constraint.ahead.result()
        if len(matchers) < _ROWS or self._looks_closer:
            self._looks_closer = False
            for _, index in matchers:
                _fill(rows[index][2], words, index)
            return
        if self._executor is None:
            self._executor = LLExecutor(min(_THREADS, len(os.sched_getaffinity(0))))
        started = time.perf_counter()
        fill_next_token_bitmask_par(self._executor, matchers, words)
        self._looks_closer = time.perf_counter() - started > _SLOW_S

    def _banned(self, request: Request, num_tokens: int) -> frozenset[int]:
        """`num_tokens`: of the output before the row's token."""
        params = request.params
        if num_tokens < params.min_tokens:
            return stop_token_ids(request, self._limits)
        return self._limits.eos_token_ids if params.ignore_eos else frozenset()


def _fill(constraint: OutputConstraint, words: Words, index: int) -> None:
    """The matcher's mask into row `index`, and how long that takes."""
    assert constraint.matcher is not None
    started = time.thread_time()
    fill_next_token_bitmask(constraint.matcher, words, index)
    constraint.is_slow = time.thread_time() - started > _SLOW_S


def _mask_of(constraint: OutputConstraint) -> Words:
    words = np.full((1, constraint.num_words), -1, dtype=np.int32)
    _fill(constraint, words, 0)
    row: Words = words[0]
    return row


def _constrained(batch: Batch) -> Rows:
    sampled = [request for request, samples in zip(batch.requests, batch.samples, strict=True) if samples]
    return [
        (row, request, request.constraint)
        for row, request in enumerate(sampled)
        if request.constraint is not None
    ]


def _after_drafts(rows: Rows, preceding_drafts: Sequence[list[int]]) -> Rows:
    """The same rows, those that follow drafts with a constraint that has accepted them.

    Rows after a draft that the constraint refuses, or that ends the output, are left out: what they sample
    is of no use. `preceding_drafts`: as in `Batch`; if there are any, every entry of the batch is a row.
    """
    if not preceding_drafts:
        return rows
    following = Rows()
    latest: OutputConstraint | None = None
    for row, request, constraint in rows:
        drafts = preceding_drafts[row]
        if not drafts:
            latest = constraint
        elif latest is not None:
            latest = latest.after(drafts[-1])
        if latest is not None:
            following.append((row, request, latest))
    return following


def _places(batch: Batch) -> Sequence[int]:
    """Which output token each row of the logits becomes, or the first of the drafts that it follows."""
    positions = [
        position for position, samples in zip(batch.output_positions, batch.samples, strict=True) if samples
    ]
    if not batch.preceding_drafts:
        return positions
    return [
        position - len(drafts) for position, drafts in zip(positions, batch.preceding_drafts, strict=True)
    ]
