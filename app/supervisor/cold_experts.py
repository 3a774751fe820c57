"""Where experts of a model that `serve` starts are: in RAM, or on disk with some of them in RAM."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from app.supervisor.placement import find_gpus, runs_on_gpus
from app.supervisor.shortages import find_shortages, needs_of
from moebius.config import MoebiusConfig
from moebius.errors import ConfigError, StartupError, UserError
from moebius.host.kernel_times import cache_directory
from moebius.models.geometry import MoeGeometry
from moebius.process.limits import available_memory

if TYPE_CHECKING:
    from app.planning.capacity import CapacityPlan

GIB = 2**30
# Of available memory, what packed experts may take without a plan that counts everything else.
SURELY_FITS = 0.5

_log = structlog.get_logger(__name__)


def with_cold_experts(config: MoebiusConfig, given: MoebiusConfig, model: MoeGeometry) -> MoebiusConfig:
    """Returns the settings with what `cold_experts` becomes and, of experts on disk, their directory and RAM.

    Logs what that will cost. Arguments as of `shortages.needs_of`. Raises ConfigError for experts on disk
    beside a GPU, StartupError where they fit neither in RAM nor, as asked, on disk.
    """
    experts = config.experts
    in_ram = config.model_copy(update={"experts": experts.model_copy(update={"cold_experts": "ram"})})
    if experts.cold_experts == "ram" or not experts.expert_servers:
        return in_ram
    on_gpu = runs_on_gpus(config, find_gpus())
    if on_gpu and experts.cold_experts == "auto":
        return in_ram
    if on_gpu:
        raise ConfigError("cold_experts: disk is for engines without a GPU; allowed: ram, auto")
    try:
        needs = needs_of(given, in_ram, model)
    except (UserError, ValueError):
        return in_ram  # What cannot be packed is refused by the process that reads it, in its words.
    packed = sum(needs.segments)
    if experts.cold_experts == "auto" and packed < SURELY_FITS * available_memory():
        return in_ram
    try:
        plan = _planned(config, given)
    except UserError as error:
        # RAM that is free now may be too little for a plan and enough after all; a machine's RAM is not.
        is_short = any(one.of == "RAM" for one in find_shortages(needs, given.experts.expert_weights_dir))
        if experts.cold_experts == "disk" or is_short:
            raise StartupError(str(error)) from error
        _log.warning("RAM may be too small", reason=str(error))
        return in_ram
    if plan.cold is None:
        return in_ram
    return _on_disk(config, plan, _directory(config, given), packed)


def _planned(config: MoebiusConfig, given: MoebiusConfig) -> CapacityPlan:
    """Raises DoesNotFit, with what would fit."""
    from app.planning.capacity import DoesNotFit, Wish
    from app.planning.gpu_use import make_planner
    from app.planning.hardware import HardwareOptions, hardware
    from app.planning.report import quiet, what_fits

    servers = {"expert_servers": config.experts.expert_servers}
    asked = given.model_copy(update={"experts": given.experts.model_copy(update=servers)})
    with quiet():
        host = hardware(HardwareOptions(gpus="none"))
        try:
            return make_planner(asked, host, fill=False).plan(host, Wish(), fill=False)
        except DoesNotFit as error:
            remedy = what_fits(asked, given, host, Wish(), fill=False)
            raise DoesNotFit(f"does not fit: {error}; {remedy}") from error


def _on_disk(config: MoebiusConfig, plan: CapacityPlan, directory: Path, file_bytes: int) -> MoebiusConfig:
    """Raises StartupError for a directory that cannot be made, or whose disk has no room."""
    assert plan.cold is not None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        system = os.statvfs(directory)
        there = sum(file.stat().st_blocks * 512 for file in directory.glob("*.weights"))
    except OSError as error:
        raise StartupError(
            f"experts on disk: {directory} cannot be used: {error.strerror} (--expert-weights-dir)"
        ) from error
    free = system.f_bavail * system.f_frsize
    if free + there < file_bytes:
        raise StartupError(
            f"experts on disk take {file_bytes / GIB:.2f} GiB in {directory}, where {free / GIB:.2f} GiB are "
            "free; --expert-weights-dir names another directory"
        )
    speed = plan.decode[0]
    _log.warning(
        "experts are on disk: RAM has no room for all",
        directory=str(directory),
        packed_gib=round(plan.cold.file_bytes / GIB, 2),
        in_ram_gib=round(plan.cold.memory_bytes / GIB, 2),
        missed=f"{plan.cold.missed:.1%}",
        routing=plan.cold.routing,
        disk=f"{plan.cold.disk_bandwidth / 1e9:.1f} GB/s ({plan.cold.disk_origin})",
        expected_tokens_per_second=round(speed.tokens_per_second, 2),
    )
    chosen = {
        "cold_experts": "disk",
        "expert_weights_dir": str(directory),
        "expert_memory_gib": plan.cold.memory_bytes / GIB,
    }
    return config.model_copy(update={"experts": config.experts.model_copy(update=chosen)})


def _directory(config: MoebiusConfig, given: MoebiusConfig) -> Path:
    """Returns what is set, or one of this model's own in the user's cache, which outlives everything."""
    if given.experts.expert_weights_dir:
        return Path(given.experts.expert_weights_dir).absolute()
    names = f"{config.model.model}\n{config.model.expert_checkpoint}\n{config.experts.expert_servers}"
    key = hashlib.blake2b(names.encode(), digest_size=6).hexdigest()
    try:
        return cache_directory() / "experts" / f"{Path(config.model.model).stem}-{key}"
    except FileNotFoundError as error:
        raise StartupError(f"experts on disk: {error.strerror}; needed: --expert-weights-dir") from None
