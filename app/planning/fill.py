"""What is on GPUs where no setting says so: as many experts as fit, decided before any process starts.

The arithmetic is the engine's (`Planner`), with the memory that is free now. It is done in a process of its
own, since it imports torch, whose memory the supervisor would keep.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from typing import TYPE_CHECKING

import structlog

from app.planning.capacity import DoesNotFit, Filled, Wish
from app.planning.dense import with_dense_choice
from app.planning.gpu_models import GpuModel, find_gpu_model, least_of
from app.planning.hardware import Hardware, HardwareOptions, gpu_names, hardware
from app.planning.memory import has_placement
from app.planning.stages import with_all_gpus
from moebius.config import GpuConfig, MoebiusConfig
from moebius.errors import ConfigError
from moebius.models.served import with_drafts, with_method, with_own_layers
from moebius.process.limits import available_memory

if TYPE_CHECKING:
    from app.planning.capacity import CapacityPlan
    from app.planning.planner import Planner

_log = structlog.get_logger(__name__)
_MIB = 2**20
_NVIDIA_SMI_S = 20.0
# Of a GPU whose name says nothing: as fast as any other such.
_UNKNOWN = GpuModel("GPU", 0, 1e12, 32e9, 100e12)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One GPU's memory, bytes; filled by `gpu_memory`."""

    total: int  # What processes may have together: without what the driver keeps for itself.
    free: int


def gpu_memory() -> tuple[DeviceUse, ...]:
    """Returns the memory of every GPU that the driver shows; empty where it cannot be asked."""
    command = ["nvidia-smi", "--query-gpu=memory.used,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
        return parse_gpu_memory(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _log.debug("the driver does not say how much memory GPUs have", error=str(error))
        return ()


def parse_gpu_memory(text: str) -> tuple[DeviceUse, ...]:
    """Returns the total and free memory by lines such as `15, 143140`: what is used and what is free, MiB.

    Raises ValueError for other lines.
    """
    found = []
    for line in text.splitlines():
        if line.strip():
            used, free = (int(number) * _MIB for number in line.split(","))
            found.append(DeviceUse(used + free, free))
    return tuple(found)


def as_empty(memory: Sequence[DeviceUse], gpu: GpuConfig) -> list[int]:
    """Returns the bytes of empty GPUs that leave an engine as much as these: displays and other processes
    may hold some.
    """
    share = gpu.gpu_memory_utilization if gpu.gpu_memory_gib is None else 1.0
    return [min(use.total, int(use.free / share)) for use in memory]


def with_free_memory(host: Hardware, settings: GpuConfig) -> Hardware:
    """Returns this host as its driver describes it now; as it is where the driver does not answer."""
    memory = gpu_memory()[: host.gpus]
    if host.gpu is None or len(memory) < host.gpus:
        return host
    origin = {**host.origin, "gpu": "memory that is free now, the rest table"}
    return replace(host.with_gpu_memory(as_empty(memory, settings)), origin=origin)


def with_filled_gpus(config: MoebiusConfig) -> MoebiusConfig:
    """The same settings with what they leave open about the placement of experts and dense weights, if there
    is a GPU, and about draft tokens (`speculative_method` auto).

    Where it cannot be known the settings stay: then the engine says what is wrong, or nothing is resident.
    Raises UserError for a setting that cannot be.
    """
    # No process starts, and no driver is asked, before something is to be decided.
    asked = cache(lambda: (gpu_memory(), tuple(gpu_names())))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return _filled_placement(_with_chosen_drafts(config, pool, asked), pool, asked)


# Memory and names of this host's GPUs, as `filled` has them.
Asked = Callable[[], tuple[tuple[DeviceUse, ...], tuple[str, ...]]]


def _with_chosen_drafts(config: MoebiusConfig, pool: Executor, asked: Asked) -> MoebiusConfig:
    """Returns the settings without `speculative_method` auto, and logs why a model with layers that draft is
    served without them.
    """
    from app.supervisor.placement import find_gpus, runs_on_gpus

    drafting, reason = with_own_layers(config)
    if drafting is None:
        return with_drafts(config)
    decided = with_method(config, "off")
    if not reason and config.experts.expert_transport == "local":
        reason = "expert_transport local is not planned"
    if not reason:
        memory, names = asked() if runs_on_gpus(config, find_gpus()) else (None, ())
        parallel = config.parallel
        if parallel.rank_hosts > 1 or (memory is not None and len(memory) < parallel.num_ranks):
            reason = "the memory of the GPUs is not known here"
        else:
            decided, reason = pool.submit(drafts_here, config, memory, names).result()
    if reason:
        _log.info("speculative_method auto: no draft tokens", reason=reason)
    else:
        _log.info("speculative_method auto: draft tokens by the model's own layers")
    return decided


def drafts_here(
    config: MoebiusConfig, memory: tuple[DeviceUse, ...] | None, names: tuple[str, ...] = ()
) -> tuple[MoebiusConfig, str]:
    """Returns what `decided_drafts` does on this host; `memory`, `names`: as `filled` has them, None: the
    engine runs on the CPU.
    """
    from app.planning.drafts import decided_drafts
    from app.planning.planner import Planner

    host = _cpu_host() if memory is None else _gpu_host(config, memory, names)

    def planned(each: MoebiusConfig) -> CapacityPlan:
        planner = Planner(each, on_gpu=False) if memory is None else _planner(each, host)
        return planner.plan(host, explain=False)

    return decided_drafts(config, planned, Wish())


def _filled_placement(config: MoebiusConfig, pool: Executor, asked: Asked) -> MoebiusConfig:
    from app.supervisor.placement import find_gpus, runs_on_gpus

    if config.experts.expert_transport == "local":
        return config
    if not runs_on_gpus(config, find_gpus()):
        return _dropped(config)
    parallel = config.parallel
    has_layers = parallel.pipeline_parallel_size == 1 or parallel.pipeline_layers
    is_open = "auto" in (config.placement.drop_resident, config.model.dense_weights)
    if has_placement(config) and not is_open and has_layers:
        return config
    memory, names = asked()
    if parallel.rank_hosts > 1 or len(memory) < parallel.num_ranks:
        return config
    found = pool.submit(filled, config, memory, names).result()
    if found is None:
        return config
    if found.parallel != config.parallel:
        _log.info(found.reason, pipeline_layers=",".join(map(str, found.parallel.pipeline_layers)))
        config = config.model_copy(update={"parallel": found.parallel})
    if found.dense is not None:
        _log.info(f"dense weights: {found.dense.line}")
        config = with_dense_choice(config, found.dense)
    placement = found.placement
    _log.info(
        "experts on GPUs are chosen by what fits",
        gpu_experts_ratio=placement.gpu_experts_ratio,
        placement_strategy=placement.placement_strategy,
        drop_resident=placement.drop_resident,
        max_num_seqs=found.max_num_seqs,
    )
    num_seqs = found.max_num_seqs or config.gpu.max_num_seqs
    gpu = config.gpu.model_copy(update={"max_num_seqs": num_seqs})
    return config.model_copy(update={"placement": placement, "gpu": gpu})


def _dropped(config: MoebiusConfig) -> MoebiusConfig:
    """Returns the settings of an engine on a CPU, which exchanges nothing: its experts need not be in RAM
    twice.
    """
    if config.placement.drop_resident != "auto":
        return config
    placement = config.placement.model_copy(update={"drop_resident": "drop"})
    return config.model_copy(update={"placement": placement})


def filled(
    config: MoebiusConfig, memory: tuple[DeviceUse, ...], names: tuple[str, ...] = ()
) -> Filled | None:
    """Returns what GPUs of these names hold of which so much is free; None: the model does not fit there,
    whatever is resident.

    All of them are used where they are of several kinds, no setting says how many, and the first alone does
    not hold every expert. Raises UserError for a setting that cannot be.
    """
    host = _gpu_host(config, memory, names)
    try:
        return _planner(config, host).fill(host)
    except DoesNotFit:
        return None


def _planner(config: MoebiusConfig, host: Hardware) -> Planner:
    """Returns the planner of one GPU for each rank, or of a stage for each GPU; raises as `filled`, and
    DoesNotFit.
    """
    from app.planning.planner import Planner

    planner = Planner(config, on_gpu=True)
    assert host.gpu is not None
    is_one = config.parallel.num_ranks == config.parallel.data_parallel_size == 1
    if is_one and host.gpu.is_mixed and planner.fill(host).placement.gpu_experts_ratio != 1.0:
        with suppress(ConfigError):  # Layers that one stage has to have together.
            return Planner(with_all_gpus(config, host), on_gpu=True)
    return planner


def _cpu_host() -> Hardware:
    return replace(hardware(HardwareOptions(gpus="none")), ram_bytes=available_memory())


def _gpu_host(config: MoebiusConfig, memory: tuple[DeviceUse, ...], names: tuple[str, ...]) -> Hardware:
    gpus = [(find_gpu_model(name) if name else None) or _UNKNOWN for name in names[: len(memory)]]
    gpus += [_UNKNOWN] * (len(memory) - len(gpus))
    host = _cpu_host()
    host = replace(host, gpus=len(gpus), gpu=least_of(gpus), sockets=max(1, host.sockets))
    return host.with_gpu_memory(as_empty(memory, config.gpu))
