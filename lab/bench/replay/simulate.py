"""Replays steps against one strategy, in simulated time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.bench.replay.routing import Counts
from lab.bench.replay.strategies import Costs, SimulatedStrategy

# Steps whose hit rate is one figure, where it is followed over time; and what it has to come back to.
_WINDOW, _RECOVERED = 128, 0.95


@dataclass(frozen=True)
class Replayed:
    """What one strategy made of the steps that count; filled by `replay`. The keys of the JSON rows."""

    tokens_per_second: float
    hit_rate: float  # Of all choices, those of a resident expert.
    step_ms: float
    exchanges_per_step: float
    copied_bytes_per_step: float
    # Tokens of a stream from a change of what is chosen until the hit rate is at 95 % of its later level; the
    # longest of all changes. None: nothing changes, or it never was.
    recovery_tokens: int | None = None


def replay(
    counts: Counts, strategy: SimulatedStrategy, costs: Costs, settle: int, top_k: int, phases: int = 1
) -> Replayed:
    """`counts` int16 `[steps, layers, num_experts]`, of which the first `settle` steps do not count.

    phases: equal parts of the steps between which what is chosen changes.
    """
    steps, layers, _ = counts.shape
    seconds, hits, copies = np.empty(steps), np.empty(steps), np.zeros(steps)
    now = step_s = 0.0
    rows = int(counts[0, 0].sum()) // top_k
    for step, chosen in enumerate(counts):
        begun = strategy.begin_step(now, step_s)
        hits[step] = chosen[strategy.resident].sum()
        copied, experts_s = strategy.end_step(chosen, rows)
        # Copies that steps do not wait for take RAM bandwidth from servers.
        seconds[step] = layers * costs.layer_s + experts_s + begun * costs.copy_price * costs.read_s
        copies[step] = begun + copied
        now += seconds[step]
        step_s = seconds[step] if step == 0 else step_s + 0.1 * (seconds[step] - step_s)
    rates = hits / counts.sum(axis=(1, 2))
    counted, copied_each = seconds[settle:], float(copies[settle:].mean())
    return Replayed(
        tokens_per_second=rows / float(counted.mean()),
        hit_rate=float(rates[settle:].mean()),
        step_ms=float(counted.mean()) * 1e3,
        exchanges_per_step=copied_each,
        copied_bytes_per_step=copied_each * costs.expert_bytes,
        recovery_tokens=recovery(rates, phases),
    )


def recovery(rates: NDArray[np.float64], phases: int) -> int | None:
    """Steps after a change until the mean of a window is at 95 % of the phase's second half; the longest.

    rates: float64 `[steps]`, hit rates. None: there is one phase only, or a window never was.
    """
    longest = None
    bounds = [len(rates) * phase // phases for phase in range(phases + 1)]
    for begin, end in itertools.pairwise(bounds[1:]):
        part = rates[begin:end]
        level = part[len(part) // 2 :].mean()
        means = np.convolve(part, np.full(_WINDOW, 1 / _WINDOW), "valid")
        back = np.flatnonzero(means >= _RECOVERED * level)
        if not len(back):
            return None
        longest = max(longest or 0, int(back[0]))
    return longest
