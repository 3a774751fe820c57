"""What each step should take, by what experts cost and such steps took before, against what it took.

A step that streams experts is predicted by the costs that its share was chosen by. Any other is predicted as

    fixed(rows, tokens of KV) + choices * (1 - hits) * seconds per expert and row

The second part is that of expert servers in decode steps and follows the placement of experts. The first
part is what such steps took besides, over the last minutes in which they took about what was predicted. Where
steps take much longer for a minute, something has changed that serving does not correct by itself, and all is
measured again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import structlog
import torch
from prometheus_client import REGISTRY, CollectorRegistry

from gpu_service.core.interface import Emission, EngineLoad, EngineObserver, OutputDelta
from gpu_service.core.request import Request
from gpu_service.core.results import StepResult
from gpu_service.core.step import Batch
from gpu_service.device.stream import DeviceStream
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.experts.adaptive.counts import DECODE_ROWS
from gpu_service.experts.costs import ExpertCosts, RankMoe
from gpu_service.experts.streaming.make import measure_while_serving
from gpu_service.telemetry.figures import Figure, export_figures
from moebius.config import MoebiusConfig
from moebius.errors import brief

if TYPE_CHECKING:
    from opentelemetry.context import Context

# The operation of every rank's engine that `StepCheck.measure_again` calls.
MEASURE_AGAIN = "measure what experts cost again"
_log = structlog.get_logger(__name__)
# Predicted over measured: below this for this many seconds, all is measured again; where that does not help,
# after twice the time, and so on.
TOO_SLOW, _PATIENCE_S, _MOST_PATIENCE_S = 0.6, 60.0, 3600.0
# Rows from which a step that streams nothing says what a layer takes on servers: with fewer, what it does
# besides takes as long.
_PROMPT_ROWS = 256
# What is left of the sums of steps with prompts when another one comes.
_KEPT = 0.9
# Half-life of the sums that are compared, in seconds of steps.
_HALF_LIFE_S = 5.0
# A pause between two steps counts as so much of the time in which steps are too slow.
_LONGEST_PAUSE_S = 1.0
# Of this many first steps of a kind the median counts; of later ones all that were not too slow, decayed with
# a half-life in seconds of such steps.
_FIRST_STEPS, _KIND_HALF_LIFE_S = 8, 600.0
# A line says predicted and measured times after this many seconds, and again when the ratio
# has changed by this much.
_SAID_AFTER_S, _SAID_AGAIN = 60.0, 0.1


@dataclass
class _Kind:
    """Steps of about as many rows and tokens of KV; filled by `StepCheck`."""

    first: list[float] = field(default_factory=list)
    # Decayed sum of steps' seconds that are not servers', and of steps.
    total: float = 0.0
    count: float = 0.0

    @property
    def fixed(self) -> float | None:
        """Their mean; None: there were too few."""
        return self.total / self.count if self.count else None

    def learn(self, own: float, seconds: float) -> None:
        """`own` of a step's `seconds` are not servers'."""
        if self.count:
            kept = 0.5 ** (seconds / _KIND_HALF_LIFE_S)
            self.total, self.count = kept * self.total + own, kept * self.count + 1
            return
        self.first.append(own)
        if len(self.first) == _FIRST_STEPS:
            self.total, self.count = _FIRST_STEPS * median(self.first), _FIRST_STEPS


@dataclass(frozen=True)
class StepFacts:
    """What a check asks of the engine's parts; filled by the assembly."""

    # MoE layers that every step computes on this rank, and experts of a token.
    num_layers: int
    top_k: float
    # False in a pipeline of stages: a step's time is not that of these layers.
    has_all_layers: bool = True
    # Seconds that expert servers have computed so far, the busiest one; of choices, those that are no
    # server's; whether another lane's step uses the device, too.
    busy_seconds: Callable[[], float] = float
    hit_share: Callable[[], float] = float
    has_lane_step: Callable[[], bool] = bool
    # Is given the rows of a decode step, its seconds, and what `StepResult.has_copies` says of it.
    on_decode: Callable[[int, float, bool | None], None] = lambda rows, seconds, has_copies: None


class StepCheck(EngineObserver):
    """An observer around another one. Called by the engine thread; sums may be read by any."""

    def __init__(
        self,
        inner: EngineObserver,
        costs: ExpertCosts,
        facts: StepFacts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.costs = costs
        self._inner, self._facts, self._clock = inner, facts, clock
        # Called by the engine thread: by the first rank where steps are too slow, and then, with nothing in
        # flight, by all.
        self.on_too_slow: Callable[[], object] = lambda: None
        self.measure_again: Callable[[], None] = self.forget
        # Seconds of all steps that were predicted.
        self.predicted_seconds = self.measured_seconds = 0.0
        self.steps = 0
        self.times_measured_again = 0
        self._patience_s = _PATIENCE_S
        self._busy: float | None = None
        self._said: float | None = None
        # Decayed sums of seconds and tokens of steps that are mostly prompts.
        self._prompts = 0.0, 0.0
        self.forget()

    def forget(self) -> None:
        """Forgets what steps took so far, which says nothing of later ones; the sums stay."""
        self._kinds: dict[tuple[int, int], _Kind] = {}
        # Decayed sums of predicted and measured seconds.
        self._recent = 0.0, 0.0
        # For how long steps have been too slow, or not; when the latest ended.
        self._slow_s = self._well_s = 0.0
        self._last: float | None = None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured time of the latest steps; None: none was predicted."""
        predicted, measured = self._recent
        return predicted / measured if measured > 0 else None

    def committed(self, batch: Batch, result: StepResult | None, emission: Emission) -> None:
        """Compares, and learns from the step."""
        self._inner.committed(batch, result, emission)
        before, self._busy = self._busy, self._facts.busy_seconds()
        # Servers that came back count from 0.
        busy = 0.0 if before is None else max(0.0, self._busy - before)
        if result is None or result.seconds <= 0 or result.num_replays or self._facts.has_lane_step():
            return
        if batch.num_tokens >= 2 * len(batch.requests):
            seconds, tokens = self._prompts
            self._prompts = _KEPT * seconds + result.seconds, _KEPT * tokens + batch.num_tokens
        if batch.is_uniform_decode:
            self._facts.on_decode(batch.num_tokens, result.seconds, result.has_copies)
        predicted = result.predicted_seconds
        if not result.is_streamed:
            predicted = self._predict_plain(batch, result.seconds, busy)
        if predicted is not None:
            self._compare(predicted, result.seconds)

    @property
    def prompt_token_seconds(self) -> float | None:
        """The seconds by token of the latest steps with prompts; None: there was none."""
        seconds, tokens = self._prompts
        return seconds / tokens if tokens else None

    def _predict_plain(self, batch: Batch, seconds: float, busy: float) -> float | None:
        """Returns the prediction before the step is learnt from; None: there were too few of the kind."""
        rows, servers = batch.num_tokens, 0.0
        if rows <= DECODE_ROWS:
            left = 1.0 - min(1.0, max(0.0, self._facts.hit_share()))
            pairs = rows * self._facts.top_k * self._facts.num_layers * left
            servers = pairs * (self.costs.pair_seconds or 0.0)
            self.costs.served(pairs, busy, seconds)
        elif rows >= _PROMPT_ROWS and self._facts.num_layers and self._facts.has_all_layers:
            self.costs.observe(rows, 0, seconds / self._facts.num_layers, 0.0, 0.0)
        tokens = sum(batch.start_positions) + rows
        key = rows.bit_length(), tokens.bit_length()
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind()
        predicted = None if kind.fixed is None else kind.fixed + servers
        if predicted is None or predicted >= TOO_SLOW * seconds:
            kind.learn(max(0.0, seconds - (busy if rows <= DECODE_ROWS else 0.0)), seconds)
        return predicted

    def _compare(self, predicted: float, measured: float) -> None:
        kept = 0.5 ** (measured / _HALF_LIFE_S)
        self._recent = self._recent[0] * kept + predicted, self._recent[1] * kept + measured
        self.predicted_seconds += predicted
        self.measured_seconds += measured
        self.steps += 1
        now, ratio = self._clock(), self._recent[0] / self._recent[1]
        passed = measured if self._last is None else min(now - self._last, _LONGEST_PAUSE_S)
        self._last = now
        if ratio >= TOO_SLOW:
            self._slow_s, self._well_s = 0.0, self._well_s + passed
            if self._well_s >= _PATIENCE_S:
                self._patience_s = _PATIENCE_S
            self._say(ratio)
            return
        self._slow_s, self._well_s = self._slow_s + passed, 0.0
        if self._slow_s >= self._patience_s:
            _log.warning(
                "steps take longer than predicted: costs are measured again, and experts chosen again",
                predicted_over_measured=round(ratio, 2),
                for_seconds=round(self._slow_s),
                predicted_ms=round(1e3 * predicted, 2),
                measured_ms=round(1e3 * measured, 2),
            )
            self._patience_s = min(2 * self._patience_s, _MOST_PATIENCE_S)
            self.times_measured_again += 1
            self.forget()
            self.on_too_slow()

    def _say(self, ratio: float) -> None:
        """One line a minute at most, and only where there is news."""
        if self._well_s < _SAID_AFTER_S or (self._said is not None and abs(ratio - self._said) < _SAID_AGAIN):
            return
        self._said, self._well_s = ratio, 0.0
        _log.info(
            "steps take what was predicted" if ratio < 1 / TOO_SLOW else "steps take less than was predicted",
            predicted_over_measured=round(ratio, 2),
            predicted_s=round(self.predicted_seconds, 1),
            measured_s=round(self.measured_seconds, 1),
        )

    # ---- what only the inner observer hears ----

    def submitted(self, request: Request) -> None:
        self._inner.submitted(request)

    def launched(self, batch: Batch) -> Context | None:
        return self._inner.launched(batch)

    def ended(self, deltas: list[OutputDelta]) -> None:
        self._inner.ended(deltas)

    def loaded(self, load: EngineLoad) -> None:
        self._inner.loaded(load)

    def corrupted(self, error: AssertionError) -> None:
        self._inner.corrupted(error)


def export(check: StepCheck, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Adds the check's figures to a registry."""

    def figures() -> list[Figure]:
        text = "What steps should have taken by their costs"
        return [
            Figure("step_predicted_seconds", text, check.predicted_seconds),
            Figure("step_measured_seconds", "What the same steps took", check.measured_seconds),
        ]

    export_figures(figures, model_name, registry)


def report_failure(done: Future[None]) -> None:
    """Logs why the operation failed; no caller waits for it, and steps go on with the costs they have."""
    error = done.exception()
    if error is not None:
        _log.error("what experts cost could not be measured again", error=brief(error))


def make_check(
    observer: EngineObserver,
    config: MoebiusConfig,
    moe: RankMoe | None,
    runner: ModelRunner,
    stream: DeviceStream,
    dtype: torch.dtype,
) -> StepCheck:
    """Returns the check of this rank's steps, around the observer that metrics hang on."""
    experts, resident, streamer = runner.experts, runner.resident, runner.streamer
    if moe is None:
        return StepCheck(observer, ExpertCosts(1, 1.0), StepFacts(0, 0.0))
    geometry = moe.geometry
    layers = [layer for layer in moe.layers if layer in geometry.passed_layers]
    slots = [] if resident is None else [layer for layer in layers if layer in resident.slots]

    def busy_seconds() -> float:
        return 0.0 if experts is None else experts.busy_seconds()

    # Without a placement residents stay: counted once, since every step asks, and of all layers that takes
    # longer than launching a step.
    held = 0 if resident is None else sum(len(resident.experts(layer)) for layer in slots)

    def resident_share() -> float:
        if not slots:
            return 0.0
        if runner.placement is not None:
            return runner.placement.hit_share * len(slots) / len(layers)
        return held / (len(layers) * geometry.num_experts)

    def hit_share() -> float:
        found = resident_share()
        return found if runner.fetcher is None else found + (1.0 - found) * runner.fetcher.share

    def has_lane_step() -> bool:
        return streamer is not None and streamer.has_lane_step

    def on_decode(rows: int, seconds: float, has_copies: bool | None) -> None:
        if runner.placement is not None:
            runner.placement.budget.observe(rows, seconds, has_copies)

    def measure_again() -> None:
        """For all ranks at once, with no step in flight; steps choose by the new costs from then on."""
        check.forget()
        moe.costs.forget()
        measure_while_serving(config, streamer, experts, stream, dtype)
        if runner.placement is not None:
            runner.placement.choose_again()

    has_all_layers = config.parallel.pipeline_parallel_size == 1
    facts = StepFacts(
        len(layers), geometry.mean_top_k, has_all_layers, busy_seconds, hit_share, has_lane_step, on_decode
    )
    check = StepCheck(observer, moe.costs, facts)
    check.measure_again = measure_again
    return check
