"""From settings and hardware to a plan: how many ranks, and what a refusal can propose."""

from __future__ import annotations

from dataclasses import replace

from moebius.app.planning.capacity import CapacityPlan, Wish
from moebius.app.planning.hardware import Hardware
from moebius.app.planning.planner import Planner
from moebius.app.planning.refusal import DoesNotFit
from moebius.config import MoebiusConfig
from moebius.errors import ConfigError, UserError


def make_planner(config: MoebiusConfig, hardware: Hardware, fill: bool = True) -> Planner:
    """With `fill` all GPUs that the model allows are tensor-parallel ranks, where no setting says how many.

    Raises UserError for more ranks than GPUs.
    """
    ranks = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    on_gpu = hardware.gpu is not None and config.gpu.device != "cpu"
    if config.gpu.device == "cuda" and not on_gpu:
        raise UserError("device cuda: there is no GPU to plan with; --gpus names some")
    if not on_gpu:
        return Planner(config, on_gpu)
    if ranks > hardware.gpus:
        raise UserError(f"{ranks} ranks need as many GPUs, there are {hardware.gpus}")
    if ranks > 1 or not fill:
        return Planner(config, on_gpu)
    for count in range(hardware.gpus, 1, -1):
        parallel = config.parallel.model_copy(update={"tensor_parallel_size": count})
        try:
            return Planner(config.model_copy(update={"parallel": parallel}), on_gpu)
        except ConfigError:
            continue
    return Planner(config, on_gpu)


def make_plan(config: MoebiusConfig, hardware: Hardware, wish: Wish, fill: bool) -> CapacityPlan:
    """As `Planner.plan`; a refusal names how many GPUs of the kind would do, where up to 8 do."""
    planner = make_planner(config, hardware, fill)
    if not planner.on_gpu:
        hardware = replace(hardware, gpus=0, gpu=None)
    try:
        return planner.plan(hardware, wish, fill)
    except DoesNotFit as error:
        more = _enough_gpus(config, hardware, wish, fill)
        if more is None:
            raise
        raise DoesNotFit(f"{error}; {more} such GPUs with tensor_parallel_size {more} would do") from error


def _enough_gpus(config: MoebiusConfig, hardware: Hardware, wish: Wish, fill: bool) -> int | None:
    parallel = config.parallel
    if hardware.gpu is None or parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        return None
    for count in (2, 4, 8):
        if count <= hardware.gpus:
            continue
        changed = parallel.model_copy(update={"tensor_parallel_size": count})
        try:
            planner = Planner(config.model_copy(update={"parallel": changed}), True)
            planner.plan(replace(hardware, gpus=count), wish, fill)
        except UserError:
            continue
        return count
    return None
