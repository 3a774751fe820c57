"""Guards what adaptive drafts are for: on a simulated device, outputs are hardly ever slower with them.

The scheduler, the drafter, the policy and the clock's books are the engine's own; time is virtual. A token's
successor is fixed, and prompts hold their outputs with a share of other tokens, as in `moebius bench
speculation`.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

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


class SimulatedEngine:
    """Schedules as `Engine.turn` does: the next step while one is in flight, unless it waits."""

    def __init__(
        self,
        seconds_of: Callable[[int], float],
        speculates: bool,
        right: float | None = None,
        text: bool = False,
    ) -> None:
        """`right`: the acceptance rate of drafts by layers of the model; None: there are none, but of n-grams
        from the text; `text`: these, too."""
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
        self._right = right
        self._launches = 0
        self.policy = None
        if speculates:
            on_device = right is not None
            self.policy = Speculation(limits, 3, drafter, has_device_drafter=on_device, adaptive=True)
        cache = RequestCache(PagePool(20_000), RadixCache(16), prefix_caching=False)
        self._scheduler = Scheduler(limits, cache, self.policy)
        self._pace = DraftPace(lambda: self._now)
        self._seconds_of = seconds_of
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
        rows = min(batch.num_tokens, _MOST_ROWS)
        self._launches += 1
        noise = (1 + self._rng.gauss(0, 0.01)) * (_SLOW if self._launches <= _SLOW_STEPS else 1.0)
        seconds = (self._seconds_of(rows) + passes * _PASS_SECONDS) * noise
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
        if self.policy is not None:
            self._pace.committed(batch, overlaps)
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
        for _ in range(count if self._right is not None else 0):
            newest = _successor(newest) if self._rng.random() < self._right else self._rng.randrange(_VOCAB)
            found.append(newest)
        return found


def _tokens(requests: list[Request]) -> int:
    return sum(len(request.output_token_ids) for request in requests)


@pytest.mark.parametrize(
    ("seconds_of", "streams", "changed", "least"),
    [
        (resident, 1, 0.0, 1.8),
        (resident, 1, 0.1, 1.15),
        (resident, 4, 0.0, 1.15),
        (resident, 4, 0.1, 0.975),
        (resident, 16, 0.1, 1.3),
        (resident, 4, 0.3, 0.98),
        (resident, 4, 0.9, 0.98),
        (in_memory, 1, 0.0, 1.2),
        (in_memory, 1, 0.3, 0.97),
        (in_memory, 4, 0.1, 1.04),
        (in_memory, 16, 0.3, 0.99),
    ],
)
def test_drafts_are_worth_it_or_left_out(
    seconds_of: Callable[[int], float], streams: int, changed: float, least: float
) -> None:
    """Times the speed without drafts, after all drafts were accepted, which is the worst that the policy
    can have learned from: what drafts cost is known, and what they give is found out soon enough."""
    plain = SimulatedEngine(seconds_of, speculates=False).decode(streams, changed)
    engine = SimulatedEngine(seconds_of, speculates=True)
    for _ in range(2):
        engine.decode(streams, 0.0)
    speeds = [engine.decode(streams, changed, 512) for _ in range(3)]
    assert sum(speeds) / len(speeds) > least * plain
    assert engine.policy is not None
    assert engine.policy.num_accepted > 0


@pytest.mark.parametrize(
    ("seconds_of", "streams", "right", "least"),
    [
        # Where the layer ran in every step: 0.93 of the speed for one stream, 0.95 for four.
        (resident, 1, 0.5, 0.98),
        (resident, 1, 0.8, 0.98),
        (resident, 1, 0.95, 1.2),
        (resident, 4, 0.5, 0.98),
        (resident, 4, 0.8, 0.98),
        (resident, 4, 0.95, 0.98),
        (resident, 16, 0.8, 1.6),
        (in_memory, 1, 0.5, 0.98),
        (in_memory, 1, 0.8, 0.98),
        (in_memory, 1, 0.95, 0.98),
        (in_memory, 4, 0.5, 0.98),
        (in_memory, 4, 0.95, 1.25),
        (in_memory, 16, 0.8, 1.75),
    ],
)
def test_the_models_own_drafts_are_worth_it_or_left_out(
    seconds_of: Callable[[int], float], streams: int, right: float, least: float
) -> None:
    """The policy decides from the second text on: what the first steps took, which were slow, is not believed
    for long.
    """
    plain = SimulatedEngine(seconds_of, speculates=False).decode(streams, 0.0)
    engine = SimulatedEngine(seconds_of, speculates=True, right=right)
    speeds = [engine.decode(streams, 0.0) for _ in range(3)]
    assert sum(speeds[1:]) / 2 > least * plain


@pytest.mark.parametrize("seconds_of", [resident, in_memory])
@pytest.mark.parametrize("changed", [0.0, 0.9])
def test_two_drafters_are_worth_what_the_better_one_is(
    seconds_of: Callable[[int], float], changed: float
) -> None:
    """With n-grams and the model's layers, texts that repeat themselves and those that do not come as fast as
    with the drafter that suits them."""
    alone = []
    for right in (None, 0.9):
        engine = SimulatedEngine(seconds_of, speculates=True, right=right)
        alone.append(sum(engine.decode(16, changed) for _ in range(3)))
    engine = SimulatedEngine(seconds_of, speculates=True, right=0.9, text=True)
    assert sum(engine.decode(16, changed) for _ in range(3)) > 0.95 * max(alone)
