"""How much of each layer's experts a step streams: the split that a step takes least time with.

While a layer is computed, the link copies the streamed share of a later one, expert servers compute the rest,
and the GPU multiplies what has arrived. So a layer takes

    max(copy * s,  max(cpu(rows) * (1 - s),  gpu(rows) * s))

with s the streamed share of its experts, `copy` the seconds that the link needs for all of them, `cpu` and
`gpu` those that servers and GPU need for all of them with so many rows. Until earlier steps showed otherwise
(`routing.py`) routing is taken to be even; experts with twice as many rows take as long as with twice `rows`.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high, median_low
from typing import Literal

import structlog

from gpu_service.experts.streaming.plan import SHARES

_log = structlog.get_logger(__name__)
# Expert servers lose about so much of their speed to copies out of the same memory: with 15 readers 122 to
# 134 GB/s became 104 to 123 while a GPU copied 53 GB/s.
SHARED_MEMORY = 1.12
# Streaming has to take so much less than servers alone: it costs launches that the model does not count, and
# memory that decoding wants. Dividing a layer, so much less than streaming all of it.
_WORTH, _WORTH_DIVIDING = 0.8, 0.9
# Rows from which streaming everything is taken to be faster where nothing was measured.
_UNMEASURED_BREAK_EVEN = 256
# Tokens of a streamed step are a multiple of this where costs decide.
_TOKENS = 256
# Decode batches below this are left to captured graphs and expert servers.
_LEAST_DECODE_ROWS = 65
# A measured time is corrected to the median of what so many steps showed: one that took long for a reason of
# its own changes nothing, two or three alike are enough. How far one step is believed, and the bounds of all.
_STEPS_KEPT, _LARGEST_STEP, _LARGEST_SCALE = 5, 2.0, 4.0
# A link that was busy for so much of a step had nothing to wait for; what servers' time is then taken to be
# of what was expected.
_NEVER_IDLE, _TRIED = 0.93, 0.9


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a layer by token rows: linear between what was measured, and beyond it."""

    # (rows, seconds), rows ascending; at least one.
    points: tuple[tuple[int, float], ...]

    @staticmethod
    def of(measured: Sequence[tuple[int, float]]) -> CostCurve:
        """Sorted; times that fall with more rows are taken for noise."""
        points: list[tuple[int, float]] = []
        for rows, seconds in sorted(measured):
            points.append((rows, max(seconds, points[-1][1] if points else 0.0)))
        if not points:
            raise ValueError("a cost curve needs at least one measurement")
        return CostCurve(tuple(points))

    def at(self, rows: float) -> float:
        """Below the first point as there, beyond the last one in proportion or along the last slope."""
        last = len(self.points) - 1
        place = bisect.bisect_left(self.points, (rows, 0.0))
        if place == 0:
            return self.points[0][1]
        if place > last:
            (rows_then, seconds) = self.points[-1]
            slope = seconds / rows_then
            if last > 0:
                before, less = self.points[-2]
                slope = min(slope, (seconds - less) / (rows_then - before))
            return seconds + (rows - rows_then) * slope
        (low, less), (high, more) = self.points[place - 1], self.points[place]
        return less + (more - less) * (rows - low) / (high - low)


@dataclass(frozen=True)
class LayerCosts:
    """Of one MoE layer on average; filled by measurement, changed by `refined`."""

    # Seconds for all of a layer's experts that are not resident.
    copy: float
    cpu: CostCurve
    gpu: CostCurve
    # What steps in service showed of `cpu` and `copy`: factors, and those of the last steps.
    cpu_scale: float = 1.0
    copy_scale: float = 1.0
    cpu_seen: tuple[float, ...] = ()
    copy_seen: tuple[float, ...] = ()
    # By streamed share, 0 to SHARES: the part of a step's (row, expert) pairs that is left to servers; empty:
    # as with even routing.
    left: tuple[float, ...] = ()

    def seconds(self, rows: int, share: int) -> float:
        """With `share` of SHARES streamed."""
        return max(self.parts(rows, share))

    def parts(self, rows: int, share: int) -> tuple[float, float, float]:
        """Of link, servers and GPU."""
        streamed = share / SHARES
        served = 1 - streamed
        left = self.left[share] if self.left else served
        # Rows with which even routing would give an expert as many as those here have on average.
        cpu = self.cpu.at(rows * left / served) if served else 0.0
        gpu = self.gpu.at(rows * (1 - left) / streamed) if streamed else 0.0
        servers = cpu * self.cpu_scale * served * (SHARED_MEMORY if share else 1.0)
        return self.copy * self.copy_scale * streamed, servers, gpu * streamed

    def best_share(self, rows: int, least: int = 0) -> int:
        """The share of SHARES that takes least, at least `least`; 0 or all unless a split is worth it."""
        best = min(range(least, SHARES + 1), key=lambda share: self.seconds(rows, share))
        is_worth_it = self.seconds(rows, best) < _WORTH_DIVIDING * self.seconds(rows, SHARES)
        chosen = best if is_worth_it else SHARES
        if least == 0 and self.seconds(rows, chosen) > _WORTH * self.seconds(rows, 0):
            return 0
        return chosen

    def step_tokens(self, most: int, wait_s: float) -> int:
        """Of a step that streams all, at most `most` and at least one unit of `_TOKENS`.

        As many as the GPU multiplies in `wait_s` a layer, which is the least that others wait for, or while
        the link copies a layer: with fewer the link would be all that a step waits for, and prompts slower.
        """
        bound, sizes = max(self.copy * self.copy_scale, wait_s), range(_TOKENS, most, _TOKENS)
        if self.gpu.at(most) <= bound:
            return most
        return max(_TOKENS, _TOKENS * bisect.bisect_right(sizes, bound, key=self.gpu.at))

    def refined(
        self, rows: int, share: int, seconds: float, copying: float, copied: float = 1.0
    ) -> LayerCosts:
        """After a step that took `seconds` a layer, in `copying` of which the link was busy.

        The link's time is what it was busy; `copied`: the part of the share's experts that were copied.
        """
        if seconds <= 0 or copying <= 0:
            return self
        link = self.parts(rows, share)[0] * copied
        copy_off = copying / link if link > 0 else None
        copy_scale, copy_seen = _corrected(self.copy_scale, self.copy_seen, copy_off)
        cpu_off = self._servers_off(rows, share, seconds, copying)
        cpu_scale, cpu_seen = _corrected(self.cpu_scale, self.cpu_seen, cpu_off)
        return replace(
            self, copy_scale=copy_scale, cpu_scale=cpu_scale, copy_seen=copy_seen, cpu_seen=cpu_seen
        )

    def _servers_off(self, rows: int, share: int, seconds: float, copying: float) -> float | None:
        """By what factor servers took longer than expected; None: the step does not show it.

        Where the link was idle they took the step's time: with their answers a layer ends, and its other
        kernels count as theirs. Where it never was they may have waited for it, nobody knows how long: they
        are taken to be a little faster, so that steps find out. Where all was streamed because they seemed
        slow, that is forgotten bit by bit.
        """
        _, servers, gpu = self.parts(rows, share)
        if share == SHARES:
            is_their_fault = self.cpu_scale > 1 and replace(self, cpu_scale=1.0).best_share(rows) < SHARES
            return max(_TRIED, 1 / self.cpu_scale) if is_their_fault else None
        # Fewer rows than were measured, and steps that the GPU's products bound, say nothing of servers.
        if rows < self.cpu.points[0][0] or servers <= gpu:
            return None
        was_idle = copying < _NEVER_IDLE * seconds
        return seconds / servers if was_idle else min(_TRIED, seconds / servers)


def _corrected(scale: float, seen: tuple[float, ...], off: float | None) -> tuple[float, tuple[float, ...]]:
    """The scale and what showed it, after a step for which it was `off` by a factor.

    What was taken for true before the first step counts as one. Of two medians it is the nearer.
    """
    if off is None:
        return scale, seen
    believed = min(_LARGEST_STEP, max(1 / _LARGEST_STEP, off))
    shown = min(_LARGEST_SCALE, max(1 / _LARGEST_SCALE, scale * believed))
    seen = (*(seen or (scale,)), shown)[-_STEPS_KEPT:]
    return min(median_low(seen), median_high(seen), key=lambda median: abs(median - scale)), seen


@dataclass
class ShareChooser:
    """By the settings `prefill_experts` and `stream_min_rows`, and by what was measured. Thread safe."""

    mode: Literal["auto", "stream"]
    min_rows: int | None
    # MoE layers of this rank: a step's seconds are divided by them.
    num_layers: int
    _costs: LayerCosts | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def costs(self) -> LayerCosts | None:
        """None: nothing was measured yet."""
        return self._costs

    def measured(self, costs: LayerCosts) -> None:
        """What is known before serving."""
        with self._lock:
            self._costs = costs
        _log.info("experts are streamed by what was measured", **describe(costs))

    def may_stream(self, rows: int, is_decode: bool) -> bool:
        """By the settings alone, so that all ranks say the same."""
        if self.min_rows is not None:
            return rows >= self.min_rows
        if is_decode:
            return self.mode == "auto" and rows >= _LEAST_DECODE_ROWS
        return True

    def share(self, rows: int) -> int:
        """Of SHARES, for a step that may stream."""
        costs = self._costs
        if self.mode == "stream":
            return SHARES
        if costs is None:
            return 0 if self.min_rows is None else SHARES
        return costs.best_share(rows, 0 if self.min_rows is None else 1)

    def step_tokens(self, most: int, wait_s: float | None) -> int:
        """As `LayerCosts.step_tokens`; `most` while too little is known."""
        costs = self._costs
        return most if costs is None or wait_s is None else costs.step_tokens(most, wait_s)

    @property
    def break_even_rows(self) -> int:
        """Token rows from which streaming everything takes less time than streaming nothing."""
        costs = self._costs
        if costs is None:
            return self.min_rows or _UNMEASURED_BREAK_EVEN
        return next((n for n in _STEPS if costs.seconds(n, SHARES) < costs.seconds(n, 0)), _STEPS[-1])

    def routed(self, left: Sequence[float]) -> None:
        """How earlier steps' pairs would have been divided, by share; see `LayerCosts.left`."""
        with self._lock:
            if self._costs is not None:
                self._costs = replace(self._costs, left=tuple(left))

    @property
    def asks_servers(self) -> bool:
        """Whether steps leave to expert servers what is not worth a copy."""
        return self.mode == "auto"

    def observe(self, rows: int, share: int, seconds: float, copying: float, copied: float) -> None:
        """A step took `seconds`, `copying` of them the link was busy; 0: not known.

        `copied`: the part of the share's experts that were copied.
        """
        layers = max(1, self.num_layers)
        with self._lock:
            if self._costs is not None:
                each, link = seconds / layers, copying / layers
                self._costs = self._costs.refined(rows, share, each, link, copied)


def describe(costs: LayerCosts) -> dict[str, object]:
    """For the log: milliseconds a layer, and what follows from them."""
    break_even = next((rows for rows in _STEPS if costs.best_share(rows) > 0), None)
    return {
        "copy_ms": round(costs.copy * 1e3, 3),
        "server_ms": {rows: round(seconds * 1e3, 3) for rows, seconds in costs.cpu.points},
        "gpu_ms": {rows: round(seconds * 1e3, 3) for rows, seconds in costs.gpu.points},
        "scales": (round(costs.copy_scale, 3), round(costs.cpu_scale, 3)),
        "streams_from_rows": break_even,
        "share_at_512": round(costs.best_share(512) / SHARES, 2),
        # Of a step's pairs, with the other half of the experts streamed.
        "left_by_half": round(costs.left[SHARES // 2], 3) if costs.left else 0.5,
    }


_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
