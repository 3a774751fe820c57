"""What experts cost this rank, the check of steps against it, and what is done when they take much longer."""

from __future__ import annotations

from concurrent.futures import Future

import structlog
import torch

from gpu_service.assembly.experts import RankMoe
from gpu_service.core.interface import EngineObserver
from gpu_service.device.stream import DeviceStream
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.engine.step_check import StepCheck, StepFacts
from gpu_service.experts.costs import ExpertCosts
from gpu_service.experts.streaming.make import measure_while_serving
from moebius.config import MoebiusConfig
from moebius.errors import brief

# The operation of every rank's engine that `StepCheck.measure_again` calls.
MEASURE_AGAIN = "measure what experts cost again"
_log = structlog.get_logger(__name__)


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
    """Returns a check of step times that wraps the observer of metrics."""
    experts, resident, streamer = runner.experts, runner.resident, runner.streamer
    if moe is None:
        return StepCheck(observer, ExpertCosts(1, 1.0), StepFacts(0, 0.0))
    geometry = moe.geometry
    layers = [layer for layer in moe.layers if layer in geometry.passed_layers]
    slots = [] if resident is None else [layer for layer in layers if layer in resident.slots]

    def busy_seconds() -> float:
        return 0.0 if experts is None else max(experts.stats().compute_seconds, default=0.0)

    def resident_share() -> float:
        if resident is None or not slots:
            return 0.0
        if runner.placement is not None:
            return runner.placement.hit_share * len(slots) / len(layers)
        return sum(len(resident.experts(n)) for n in slots) / (len(layers) * geometry.num_experts)

    def hit_share() -> float:
        found = resident_share()
        return found if runner.fetcher is None else found + (1.0 - found) * runner.fetcher.share

    def has_lane_step() -> bool:
        return streamer is not None and streamer.has_lane_step

    def on_decode(rows: int, seconds: float, has_copies: bool | None) -> None:
        if runner.placement is not None:
            runner.placement.budget.observe(rows, seconds, has_copies)

    def measure_again() -> None:
        """Measures costs on all ranks at once, with no step in flight; steps choose by the new costs from
        then on.
        """
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
