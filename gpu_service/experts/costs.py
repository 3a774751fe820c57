"""What experts cost this engine: one model, measured at the start and corrected by what is served.

It says how much of each layer's experts a step streams, what an exchange of residents has to bring, and what
a step should take. Its parts:

| part | measured at the start by | corrected by |
|---|---|---|
| link, bytes per second | copies of a layer | every copy, of streamed steps and of exchanges |
| a layer on expert servers, by rows | calls with random rows | steps of prompts, as a factor |
| a layer on the GPU, by rows | products of random rows | another measurement only |
| servers' seconds per expert and row of decode steps | the fewest of those rows | decode steps |

While a layer is computed, the link copies the streamed share of a later one, expert servers compute the
rest, and the GPU multiplies what has arrived. So a layer takes

    max(copy * s,  max(cpu(rows) * (1 - s),  gpu(rows) * s))

with s the streamed share of its experts, `copy` the seconds that the link needs for all of them, `cpu` and
`gpu` those that servers and GPU need for all of them with that many rows. Until earlier steps showed
otherwise (`routing.py`) routing is taken to be even; experts with twice as many rows take as long as with
twice `rows`.
"""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median_high, median_low

from gpu_service.experts.streaming.plan import SHARES
from moebius.models.geometry import MoeGeometry

# Expert servers lose about so much of their speed to copies out of the same memory: with 15 readers 122 to
# 134 GB/s became 104 to 123 while a GPU copied 53 GB/s.
SHARED_MEMORY = 1.12
# Streaming has to take so much less than servers alone: it costs launches that the model does not count, and
# memory that decoding wants. Dividing a layer, so much less than streaming all of it.
_WORTH, _WORTH_DIVIDING = 0.8, 0.9
# A value is corrected to the median of this many samples: one that took long for a reason of its
# own changes nothing, two or three alike are enough.
_SAMPLES_KEPT = 5
# How far one step is believed about servers' speed, and how far all of them are.
_LARGEST_STEP, _LARGEST_SCALE = 2.0, 8.0
# A link that was busy for so much of a step had nothing to wait for; what servers' time is then taken to be
# of what was expected.
_NEVER_IDLE, _TRIED = 0.93, 0.9
# The link before any copy was timed, bytes per second.
UNMEASURED_LINK = 40e9
# Weight of a single expert's copy, and by what factor it has to be off to count: it is timed with its launch,
# some microseconds that the much larger copies of streamed steps do not notice.
_ONE_COPY, _WITH_LAUNCH = 0.5, 1.5
# Tokens of a streamed step are a multiple of this where costs decide.
_TOKENS = 256
# How long a link's speed is believed without a copy.
_LINK_SEEN_FOR_S = 5.0
# Half-life of servers' seconds per expert and row, in seconds of steps.
_HALF_LIFE_S = 1.0
# What a copy lengthens a step by is its time on the link: on one H200 beside 16 AMX cores eight copies of
# 2.65 MB lengthened it by 0.36 ms, 45 us each, at 55 GB/s. An exchange has to bring this many times that,
# since a forecast may be wrong.
_EXCHANGE_MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class Estimate:
    """A positive quantity that samples correct: a median of the latest ones, approached by a decayed mean.

    The mean is of logarithms, so that five times too much and five times too little are corrected alike, and
    the value stays between the smallest and the largest of what it began with and what was shown.
    """

    value: float
    # The latest samples; what was taken for true before the first one counts as one.
    seen: tuple[float, ...] = ()

    def toward(self, shown: float, weight: float = 1.0) -> Estimate:
        """Returns the estimate after a sample; `weight` in [0, 1]: what part of the way to the median it is
        taken.

        What is no positive finite number is not a sample.
        """
        if not (math.isfinite(shown) and shown > 0):
            return self
        seen = (*(self.seen or (self.value,)), shown)[-_SAMPLES_KEPT:]
        # Of two medians the nearer.
        medians = median_low(seen), median_high(seen)
        now = math.log(self.value)
        target = min((math.log(median) for median in medians), key=lambda median: abs(median - now))
        low, high = min(self.value, *seen), max(self.value, *seen)
        moved = math.exp(now + min(1.0, max(0.0, weight)) * (target - now))
        return Estimate(min(high, max(low, moved)), seen)


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
        # Rounded, the sum may be more than what it approaches.
        return min(more, less + (more - less) * (rows - low) / (high - low))

    def expert_seconds(self, num_experts: int, top_k: float) -> float:
        """Seconds per expert that is read, by the fewest rows that were measured, evenly routed."""
        rows, seconds = self.points[0]
        return seconds / (num_experts * (1 - (1 - top_k / num_experts) ** rows))


@dataclass(frozen=True)
class LayerCosts:
    """The costs of one MoE layer on average, as they are known at one moment; filled by
    `ExpertCosts.layer`.
    """

    # Seconds for all of a layer's experts that are not resident.
    copy: float
    cpu: CostCurve
    gpu: CostCurve
    # What steps in service showed of `cpu`: a factor; and one that it may fall to while no prompt asks
    # servers, because decode steps found them so much faster than was measured.
    cpu_scale: float = 1.0
    least_cpu_scale: float = 1.0
    # By streamed share, 0 to SHARES: the part of a step's (row, expert) pairs that is left to servers; empty:
    # as with even routing.
    left: tuple[float, ...] = ()

    def seconds(self, rows: int, share: int) -> float:
        """Returns the seconds of a layer with `share` of SHARES streamed."""
        return max(self.parts(rows, share))

    def parts(self, rows: int, share: int) -> tuple[float, float, float]:
        """Returns the seconds of link, servers and GPU."""
        streamed = share / SHARES
        served = 1 - streamed
        left = self.left[share] if self.left else served
        # Rows with which even routing would give an expert as many as those here have on average.
        cpu = self.cpu.at(rows * left / served) if served else 0.0
        gpu = self.gpu.at(rows * (1 - left) / streamed) if streamed else 0.0
        servers = cpu * self.cpu_scale * served * (SHARED_MEMORY if share else 1.0)
        return self.copy * streamed, servers, gpu * streamed

    def best_share(self, rows: int, least: int = 0) -> int:
        """Returns the share of SHARES that takes least, at least `least`; 0 or all unless a split is worth
        it.
        """
        best = min(range(least, SHARES + 1), key=lambda share: self.seconds(rows, share))
        is_worth_it = self.seconds(rows, best) < _WORTH_DIVIDING * self.seconds(rows, SHARES)
        chosen = best if is_worth_it else SHARES
        if least == 0 and self.seconds(rows, chosen) > _WORTH * self.seconds(rows, 0):
            return 0
        return chosen

    def step_tokens(self, most: int, wait_s: float) -> int:
        """Returns the tokens of a step that streams all, at most `most` and at least one unit of `_TOKENS`.

        As many as the GPU multiplies in `wait_s` a layer, which is the least that others wait for, or while
        the link copies a layer: with fewer the link would be all that a step waits for, and prompts slower.
        """
        bound, sizes = max(self.copy, wait_s), range(_TOKENS, most, _TOKENS)
        if self.gpu.at(most) <= bound:
            return most
        return max(_TOKENS, _TOKENS * bisect.bisect_right(sizes, bound, key=self.gpu.at))

    def servers_off(self, rows: int, share: int, seconds: float, copying: float) -> float | None:
        """Returns the factor by which servers took longer than expected; None: the step does not show it.

        Where the link was idle they took the step's time: with their answers a layer ends, and its other
        kernels count as theirs. Where it never was they may have waited for it, for an unknown time: they
        are taken to be a little faster, so that steps find out. Where all was streamed because they seemed
        slow, that is forgotten bit by bit, as far as decode steps say.
        """
        _, servers, gpu = self.parts(rows, share)
        if share == SHARES:
            least = self.least_cpu_scale
            is_their_fault = (
                self.cpu_scale > least and replace(self, cpu_scale=least).best_share(rows) < SHARES
            )
            return max(_TRIED, least / self.cpu_scale) if is_their_fault else None
        # Fewer rows than were measured, and steps that the GPU's products bound, say nothing of servers.
        if rows < self.cpu.points[0][0] or servers <= gpu:
            return None
        was_idle = copying < _NEVER_IDLE * seconds
        return seconds / servers if was_idle else min(_TRIED, seconds / servers)


@dataclass(frozen=True, slots=True)
class CostFigures:
    """The present costs for people and metrics; filled by `ExpertCosts.figures`. None: not measured."""

    link_bytes_per_second: float | None
    # Servers' of one expert and row of a decode step, and the GPU's of one expert in a slot.
    cpu_expert_seconds: float | None
    gpu_expert_seconds: float | None


class ExpertCosts:
    """The costs of one rank. Any thread may ask and report."""

    def __init__(self, num_experts: int, top_k: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`top_k`: experts of a token."""
        self._num_experts, self._top_k, self._clock = num_experts, top_k, clock
        self._link_seen = clock()
        self._lock = threading.Lock()
        self._link: Estimate | None = None
        # Servers' seconds per expert and row of decode steps, and the GPU's per expert in a slot.
        self._pair: Estimate | None = None
        self._slot: float | None = None
        # As measured; None: it was not, and nothing is streamed by costs.
        self._layer: LayerCosts | None = None
        self._layer_bytes = self._measured_pair = 0.0
        self._cpu_scale = Estimate(1.0)
        self._left: tuple[float, ...] = ()

    @property
    def layer(self) -> LayerCosts | None:
        """Returns what a layer costs by all that is known now; None: it was not measured."""
        with self._lock:
            return self._layer_now()

    def _layer_now(self) -> LayerCosts | None:
        if self._layer is None or self._link is None:
            return None
        copy = self._layer_bytes / self._link.value
        least = 1.0
        if self._pair is not None:
            least = min(1.0, max(1 / _LARGEST_SCALE, self._pair.value / self._measured_pair))
        scale = self._cpu_scale.value
        return replace(self._layer, copy=copy, cpu_scale=scale, least_cpu_scale=least, left=self._left)

    @property
    def link(self) -> float:
        """Bytes per second to the device; until a copy was timed a usual link's."""
        with self._lock:
            return UNMEASURED_LINK if self._link is None else self._link.value

    @property
    def pair_seconds(self) -> float | None:
        """Expert servers' seconds of one expert and row of a decode step; None: not known yet."""
        with self._lock:
            return None if self._pair is None else self._pair.value

    @property
    def figures(self) -> CostFigures:
        """The present figures."""
        with self._lock:
            return CostFigures(
                None if self._link is None else self._link.value,
                None if self._pair is None else self._pair.value,
                self._slot,
            )

    @property
    def link_is_unseen(self) -> bool:
        """Returns whether no copy was timed for so long that one should be, whatever it seems to cost.

        A link that seems too slow to be used would seem so for ever.
        """
        return self._clock() - self._link_seen > _LINK_SEEN_FOR_S

    def copy_price(self, nbytes: int) -> float | None:
        """Returns how many choices in decode steps an expert of `nbytes` bytes has to bring, copied into a
        slot.

        Seconds on the link over the seconds that a choice takes less in a slot than on expert servers, times
        a margin. Infinite where slots are no faster than servers; None: servers' time is not known yet.
        """
        with self._lock:
            if self._pair is None:
                return None
            saved = self._pair.value - (self._slot or 0.0)
            link = UNMEASURED_LINK if self._link is None else self._link.value
        return _EXCHANGE_MARGIN * nbytes / link / saved if saved > 0 else math.inf

    def measured(self, layer: LayerCosts, layer_bytes: float) -> None:
        """Takes what a measurement found, instead of everything before.

        `layer_bytes`: what is copied in `layer.copy` seconds.
        """
        experts, top_k = self._num_experts, self._top_k
        with self._lock:
            self._layer, self._layer_bytes, self._link_seen = layer, layer_bytes, self._clock()
            self._link = Estimate(layer_bytes / layer.copy)
            self._measured_pair = layer.cpu.expert_seconds(experts, top_k)
            self._pair = Estimate(self._measured_pair)
            self._slot = layer.gpu.expert_seconds(experts, top_k)
            self._cpu_scale = Estimate(1.0)

    def forget(self) -> None:
        """What was learnt is wrong: the next steps and copies say what is true, as after a start."""
        with self._lock:
            self._pair, self._cpu_scale = None, Estimate(1.0)
            if self._layer is None:
                self._link = None

    def routed(self, left: Sequence[float]) -> None:
        """How earlier steps' pairs would have been divided, by share; see `LayerCosts.left`."""
        with self._lock:
            self._left = tuple(left)

    def copied(self, nbytes: int, seconds: float) -> None:
        """A copy of one expert took so long on the link."""
        shown = nbytes / seconds if seconds > 0 else math.nan
        known = self.figures.link_bytes_per_second
        if known is None or not 1 / _WITH_LAUNCH < shown / known < _WITH_LAUNCH:
            self._note_link(shown, _ONE_COPY)
        self._link_seen = self._clock()

    def served(self, pairs: float, seconds: float, elapsed: float) -> None:
        """Expert servers computed `pairs` (row, expert) of decode steps in `seconds`, while the steps took
        `elapsed`.
        """
        shown = seconds / pairs if pairs > 0 else math.nan
        with self._lock:
            if self._pair is not None:
                self._pair = self._pair.toward(shown, 1 - 0.5 ** (elapsed / _HALF_LIFE_S))
            elif math.isfinite(shown) and shown > 0:
                self._pair = Estimate(shown)

    def observe(self, rows: int, share: int, seconds: float, copying: float, nbytes: float) -> None:
        """A step that streamed `share` of SHARES took `seconds` a layer, in `copying` of which the link
        copied `nbytes`. Times that are not known are 0, and teach nothing.
        """
        if not (seconds > 0 and (copying > 0 or share == 0)):
            return
        layer = self.layer
        if copying > 0:
            self._note_link(nbytes / copying)
            self._link_seen = self._clock()
        off = None if layer is None else layer.servers_off(rows, share, seconds, copying)
        if off is None:
            return
        believed = min(_LARGEST_STEP, max(1 / _LARGEST_STEP, off))
        with self._lock:
            scale = self._cpu_scale
            shown = min(_LARGEST_SCALE, max(1 / _LARGEST_SCALE, scale.value * believed))
            self._cpu_scale = scale.toward(shown)

    def _note_link(self, shown: float, weight: float = 1.0) -> None:
        with self._lock:
            if self._link is not None:
                self._link = self._link.toward(shown, weight)
            elif math.isfinite(shown) and shown > 0:
                self._link = Estimate(shown)


@dataclass(frozen=True, slots=True)
class RankMoe:
    """The routed experts of this rank's layers; filled by the assembly."""

    geometry: MoeGeometry
    layers: tuple[int, ...]  # the rank's decoder layers that have routed experts
    costs: ExpertCosts
