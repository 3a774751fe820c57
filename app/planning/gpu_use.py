"""How many of a machine's GPUs a plan uses where no setting says it, and the plan that follows."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from app.planning.capacity import CapacityPlan, DoesNotFit, Wish
from app.planning.hardware import Hardware
from app.planning.planner import Planner
from app.planning.stages import with_all_gpus
from moebius.config import MoebiusConfig
from moebius.errors import ConfigError, UserError


def make_planner(config: MoebiusConfig, hardware: Hardware, fill: bool = True) -> Planner:
    """Returns a planner of these settings. With `fill` all GPUs that the model allows are tensor-parallel
    ranks, or pipeline stages where they are unequal, where no setting says how many.

    Raises UserError for more ranks than GPUs.
    """
    ranks = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    on_gpu = hardware.gpu is not None and config.gpu.device != "cpu"
    if config.gpu.device not in ("auto", "cpu") and not on_gpu:
        device = config.gpu.device
        raise UserError(
            f"device {device}: there is no GPU to plan with here; `moebius plan --gpus` names others"
        )
    if not on_gpu:
        return Planner(config, on_gpu)
    if ranks > hardware.gpus:
        raise UserError(f"{ranks} ranks need as many GPUs, there are {hardware.gpus}")
    if ranks > 1 or not fill:
        return Planner(config, on_gpu)
    if hardware.gpu is not None and hardware.gpu.is_mixed:
        with suppress(ConfigError):  # Layers that one stage has to have together.
            return Planner(with_all_gpus(config, hardware), on_gpu)
    for count in range(hardware.gpus, 1, -1):
        parallel = config.parallel.model_copy(update={"tensor_parallel_size": count})
        try:
            return Planner(config.model_copy(update={"parallel": parallel}), on_gpu)
        except ConfigError:
            continue
    return Planner(config, on_gpu)


def plan_capacity(
    config: MoebiusConfig, hardware: Hardware, wish: Wish, fill: bool, explain: bool = True
) -> CapacityPlan:
    """Returns the capacity, as `Planner.plan`; a refusal names how many GPUs, up to 8, would do, if asked to
    `explain`.
    """
    planner = make_planner(config, hardware, fill)
    if not planner.on_gpu:
        hardware = replace(hardware, gpus=0, gpu=None)
    try:
        return planner.plan(hardware, wish, fill, explain)
    except DoesNotFit as error:
        more = _enough_gpus(config, hardware, wish, fill) if explain else None
        if more is None:
            raise
        raise DoesNotFit(f"{error}; {more} such GPUs with tensor_parallel_size {more} would do") from error


def _enough_gpus(config: MoebiusConfig, hardware: Hardware, wish: Wish, fill: bool) -> int | None:
    parallel = config.parallel
    if hardware.gpu is None or hardware.gpu.is_mixed or parallel.num_ranks > 1:
        return None
    for count in (2, 4, 8):
        if count <= hardware.gpus:
            continue
        changed = parallel.model_copy(update={"tensor_parallel_size": count})
        try:
            planner = Planner(config.model_copy(update={"parallel": changed}), True)
            planner.plan(replace(hardware, gpus=count), wish, fill, explain=False)
        except UserError:
            continue
        return count
    return None
