"""An engine in virtual time: the scheduler, the drafter, the policy and the clock's books are the real ones.

A token's successor is fixed, and prompts hold their outputs with a share of other tokens, as in `moebius
bench speculation`. What a step takes is a function of its rows, or what a simulated machine says of it.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gpu_service.cache.radix_cache import RadixCache
from gpu_service.cache.request_cache import PagePool, RequestCache
from gpu_service.core.request import Request, SchedulerLimits
from gpu_service.core.step import Batch
from gpu_service.engine.sampler import RowResult  # type: ignore[attr-defined]
from gpu_service.scheduler.scheduler import Scheduler
from gpu_service.speculation.ngram import NGramDrafter
from gpu_service.speculation.pace import DraftPace
from gpu_service.speculation.policy import Speculation
from tests.helpers.engine_harness import make_request

_VOCAB = 100_000
# Seconds of the host's work for a step, which a step that overlaps with another one hides.
_HOST_SECONDS = 2.2e-3
_MOST_ROWS = 64
# Seconds that the model's own layer takes for each draft token, and the host to launch it.
_PASS_SECONDS, _PASS_HOST_SECONDS = 0.25e-3, 0.6e-3
# The first steps load and compile something.
_SLOW_STEPS, _SLOW = 4, 3.0


def _successor(token: int) -> int:
    return (token + 61803) % _VOCAB


# One H200 with all of Qwen3-30B-A3B's experts: milliseconds of a step by its largest number of rows.
_RESIDENT = {1: 3.31, 2: 3.8, 4: 4.82, 8: 6.75, 16: 13.8, 24: 15.0, 32: 16.6, 64: 19.0}


def resident(rows: int) -> float:
    """Returns the seconds of the GPU, of which captured graphs make stairs."""
    sizes = sorted(_RESIDENT)
    return _RESIDENT[sizes[min(bisect_left(sizes, rows), len(sizes) - 1)]] * 1e-3


def in_memory(rows: int) -> float:
    """Returns seconds with all experts on the CPUs: each different one of 128 has to be read."""
    return 2.7e-3 + 1e-3 * 128 * (1 - (1 - 8 / 128) ** rows)


class SimulatedMachine(Protocol):
    """What a step takes."""

    def seconds(self, batch: Batch) -> float:
        """Returns the seconds of the device for a step that is launched; asked once."""

    def committed(self, batch: Batch, results: Sequence[RowResult]) -> NDArray[np.int32] | None:
        """The step has ended with these results; returns its rows' choices, see `DraftPace.committed`."""


class RowsMachine:
    """Steps take what their number of rows takes."""

    def __init__(self, seconds_of: Callable[[int], float]) -> None:
        self._seconds_of = seconds_of

    def seconds(self, batch: Batch) -> float:
        return self._seconds_of(min(batch.num_tokens, _MOST_ROWS))

    def committed(self, batch: Batch, results: Sequence[RowResult]) -> None:
        """Nothing follows from it, and no choices are known."""


class SimulatedEngine:
    """Schedules as `Engine.turn` does: the next step while one is in flight, unless it waits."""

    def __init__(
        self,
        seconds_of: Callable[[int], float] | SimulatedMachine,
        speculates: bool,
        right: float | Sequence[float] | None = None,
        text: bool = False,
        num_drafts: int = 3,
        adaptive: bool = True,
    ) -> None:
        """`right`: the acceptance rate of drafts by layers of the model, of all alike or of each place; None:
        there are none, but of n-grams from the text; `text`: these, too. `adaptive` false: all are verified.
        """
        limits = SchedulerLimits(
            max_num_seqs=_MOST_ROWS,
            max_num_batched_tokens=1 << 16,
            context_limit=1 << 16,
            watermark_pages=1,
            eos_token_ids=frozenset(),
            prefill_chunk_max=0,
            max_rows=_MOST_ROWS,
        )
        drafter = NGramDrafter(3, 8) if right is None or text else None
        self._right = right if not isinstance(right, (int, float)) else [right] * num_drafts
        self._launches = 0
        self.policy = None
        if speculates:
            on_device = right is not None
            self.policy = Speculation(
                limits, num_drafts, drafter, has_device_drafter=on_device, adaptive=adaptive
            )
        cache = RequestCache(PagePool(20_000), RadixCache(16), prefix_caching=False)
        self._scheduler = Scheduler(limits, cache, self.policy)
        self._pace = DraftPace(lambda: self._now) if adaptive else None
        self.machine = RowsMachine(seconds_of) if callable(seconds_of) else seconds_of
        self._now = self._device_free = 0.0
        self._rng = random.Random(1)
        self._count = 0

    def decode(self, streams: int, changed: float, length: int = 256) -> float:
        """Returns the tokens per second of `streams` that repeat their prompts but for a share of
        the tokens.
        """
        requests = [self._request(changed, length) for _ in range(streams)]
        for request in requests:
            self._scheduler.add(request)
        in_flight: deque[tuple[Batch, float, bool]] = deque()
        begin, at_begin = 0.0, 0
        while not any(request.finished for request in requests):
            launched = len(in_flight) < 2 and self._launch(in_flight)
            if in_flight and (not launched or len(in_flight) == 2):
                self._commit(*in_flight.popleft())
            if not begin and all(request.output_token_ids for request in requests):
                begin, at_begin = self._now, _tokens(requests)
        seconds, tokens = self._now - begin, _tokens(requests) - at_begin
        while in_flight or self._scheduler.has_work:
            launched = len(in_flight) < 2 and self._launch(in_flight)
            if in_flight and not launched:
                self._commit(*in_flight.popleft())
        if self._pace is not None:
            self._pace.idled()
        for request in requests:
            text = request.prompt_token_ids[-1:] + request.output_token_ids
            assert all(_successor(one) == other for one, other in pairwise(text))
        return tokens / seconds

    def _request(self, changed: float, length: int) -> Request:
        text = [self._rng.randrange(_VOCAB)]
        while len(text) < length:
            text.append(_successor(text[-1]))
        others = [self._rng.randrange(_VOCAB) if self._rng.random() < changed else token for token in text]
        self._count += 1
        return make_request(f"r{self._count}", others + text[:3], max_tokens=length - 3)

    def _launch(self, in_flight: deque[tuple[Batch, float, bool]]) -> bool:
        batch = self._scheduler.schedule()
        if batch is None:
            return False
        # It runs in every step in which it does not rest, and once more for each further draft token.
        passes = max(1, batch.num_drafts) if batch.runs_drafter else 0
        self._now += _HOST_SECONDS / 2 + passes * _PASS_HOST_SECONDS
        self._launches += 1
        noise = (1 + self._rng.gauss(0, 0.01)) * (_SLOW if self._launches <= _SLOW_STEPS else 1.0)
        seconds = (self.machine.seconds(batch) + passes * _PASS_SECONDS) * noise
        self._device_free = max(self._device_free, self._now) + seconds
        in_flight.append((batch, self._device_free, bool(in_flight)))
        return True

    def _commit(self, batch: Batch, ready: float, overlaps: bool) -> None:
        self._now = max(self._now, ready) + _HOST_SECONDS / 2
        drafts = batch.drafts or [[]] * len(batch.requests)
        results = []
        for request, samples, own in zip(batch.requests, batch.samples, drafts, strict=True):
            if not samples:
                results.append(RowResult(None))
                continue
            [last] = request.known_tokens(request.total_len - 1, request.total_len)
            result = RowResult(_successor(last))
            draft_tokens = self._draft_tokens(last, own, batch.num_drafts)
            verified = [RowResult(_successor(token)) for token in own]
            results.append(replace(result, verified=verified, drafts=draft_tokens))
        self._scheduler.commit(batch, results)
        choices = self.machine.committed(batch, results)
        if self.policy is not None and self._pace is not None:
            self._pace.committed(batch, overlaps, choices)
            message = self._pace.message()
            if message is not None:
                self.policy.read(message)

    def _draft_tokens(self, last: int, verified: list[int], count: int) -> list[int]:
        """Returns the draft tokens of a layer of the model after the newest token that the step gives."""
        newest = _successor(last)
        for token in verified:
            if token != newest:
                break
            newest = _successor(newest)
        found = list[int]()
        for rate in (self._right or ())[:count]:
            newest = _successor(newest) if self._rng.random() < rate else self._rng.randrange(_VOCAB)
            found.append(newest)
        return found


def _tokens(requests: list[Request]) -> int:
    return sum(len(request.output_token_ids) for request in requests)
