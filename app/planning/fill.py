"""What is on GPUs where no setting says so: as many experts as fit, decided before any process starts.

The arithmetic is the engine's (`Planner`), with the memory that is free now. It is done in a process of its
own, since it imports torch, whose memory the supervisor would keep.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import structlog

from app.planning.capacity import DoesNotFit
from app.planning.gpu_models import GpuModel
from app.planning.hardware import Hardware
from app.planning.memory import has_placement
from moebius.config import MoebiusConfig, PlacementConfig
from moebius.process.limits import available_memory

_log = structlog.get_logger(__name__)
_MIB = 2**20
_NVIDIA_SMI_S = 20.0


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One GPU's memory, bytes; filled by `gpu_memory`."""

    total: int
    free: int


def gpu_memory() -> tuple[DeviceUse, ...]:
    """Returns the memory of every GPU that the driver shows; empty where it cannot be asked."""
    command = ["nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
        return parse_gpu_memory(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _log.debug("the driver does not say how much memory GPUs have", error=str(error))
        return ()


def parse_gpu_memory(text: str) -> tuple[DeviceUse, ...]:
    """Returns the total and free memory by lines such as `143771, 143165`, both in MiB.

    Raises ValueError for other lines.
    """
    found = []
    for line in text.splitlines():
        if line.strip():
            total, free = (int(number) * _MIB for number in line.split(","))
            found.append(DeviceUse(total, free))
    return tuple(found)


def with_filled_gpus(config: MoebiusConfig) -> MoebiusConfig:
    """The same settings with what they leave open about the placement of experts, if there is a GPU.

    Where it cannot be known the settings stay: then the engine says what is wrong, or nothing is resident.
    Raises UserError for a setting that cannot be.
    """
    from app.supervisor.placement import find_gpus, runs_on_gpus

    if config.experts.expert_transport == "local":
        return config
    if not runs_on_gpus(config, find_gpus()):
        return _dropped(config)
    if has_placement(config) and config.placement.drop_resident != "auto":
        return config
    ranks = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    memory = gpu_memory()[:ranks]
    if config.parallel.rank_hosts > 1 or not memory:
        return config
    context = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        placement = pool.submit(filled_placement, config, memory).result()
    if placement is None:
        return config
    _log.info(
        "experts on GPUs are chosen by what fits",
        gpu_experts_ratio=placement.gpu_experts_ratio,
        placement_strategy=placement.placement_strategy,
        drop_resident=placement.drop_resident,
    )
    return config.model_copy(update={"placement": placement})


def _dropped(config: MoebiusConfig) -> MoebiusConfig:
    """Returns the settings of an engine on a CPU, which exchanges nothing: its experts need not be in RAM
    twice.
    """
    if config.placement.drop_resident != "auto":
        return config
    placement = config.placement.model_copy(update={"drop_resident": "drop"})
    return config.model_copy(update={"placement": placement})


def filled_placement(config: MoebiusConfig, memory: tuple[DeviceUse, ...]) -> PlacementConfig | None:
    """Returns the placement of experts for GPUs of which so much is free; None: the model does not fit there,
    whatever is resident.

    Raises UserError for a setting that cannot be.
    """
    from app.planning.planner import Planner
    from moebius.host.topology import Topology

    share = config.gpu.gpu_memory_utilization
    # As on an empty GPU that leaves as much.
    usable = min(min(use.total, int(use.free / share)) for use in memory)
    topology = Topology.detect()
    hardware = Hardware(
        gpus=len(memory),
        gpu=GpuModel("GPU", usable, 0.0, 0.0, 0.0),
        ram_bytes=available_memory(),
        sockets=max(1, len(topology.server_nodes())),
        cores=topology.recommended_threads(),
        bandwidth=0.0,
        cpu_flops=0.0,
        isa="scalar",
        origin={"cores": "detected"},
    )
    try:
        return Planner(config, on_gpu=True).fill(hardware)
    except DoesNotFit:
        return None
