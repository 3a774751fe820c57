"""The engine processes of one model: one per rank, each with its GPU's neighbouring CPUs."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moebius.app.supervisor.gpus import Gpu
from moebius.config import MoebiusConfig
from moebius.errors import ConfigError


@dataclass(frozen=True)
class RankPlacement:
    """One engine process; filled by `place_ranks`."""

    rank: int
    # Empty: those of the supervisor.
    cpus: tuple[int, ...]
    # torch threads when the device is a CPU; 0: the engine decides.
    threads: int

    @property
    def name(self) -> str:
        """The process's name: rank 0, which serves requests, is the engine to everybody else."""
        return f"gpu-{self.rank}" if self.rank else "gpu"


def runs_on_gpus(config: MoebiusConfig, gpus: Sequence[Gpu]) -> bool:
    """Whether the engine's device is a GPU, as far as that is known before it starts."""
    return config.gpu.device == "cuda" or (config.gpu.device == "auto" and bool(gpus))


def place_ranks(
    config: MoebiusConfig, gpus: Sequence[Gpu], node_cpus: Mapping[int, Sequence[int]]
) -> tuple[RankPlacement, ...]:
    """One placement per rank; `node_cpus` maps NUMA node -> CPUs we may use there.

    Raises ConfigError when there are more ranks than GPUs.
    """
    settings = config.parallel
    count = settings.tensor_parallel_size * settings.pipeline_parallel_size
    on_gpus = runs_on_gpus(config, gpus)
    if on_gpus and gpus and count > len(gpus):
        raise ConfigError(
            f"tensor_parallel_size {settings.tensor_parallel_size} × pipeline_parallel_size "
            f"{settings.pipeline_parallel_size} are {count} ranks, but there are {len(gpus)} GPUs; "
            f"allowed: at most {len(gpus)} ranks"
        )
    if not on_gpus:
        usable = sum(len(cpus) for cpus in node_cpus.values())
        # Ranks on CPUs share the machine; alone, the engine leaves a core to its other threads itself.
        threads = config.gpu.gpu_threads or (max(1, usable // count) if count > 1 else 0)
        return tuple(RankPlacement(rank, (), threads) for rank in range(count))
    threads = config.gpu.gpu_threads
    return tuple(RankPlacement(rank, _near(rank, gpus, node_cpus), threads) for rank in range(count))


def _near(rank: int, gpus: Sequence[Gpu], node_cpus: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """All CPUs of the GPU's node, where that leaves any out."""
    node = gpus[rank].numa_node if rank < len(gpus) else -1
    near = tuple(sorted(node_cpus.get(node, ())))
    return near if len(node_cpus) > 1 else ()


def rank_address(config: MoebiusConfig) -> str:
    """Where the ranks meet: a free port of this machine, unless one is given; empty for one rank."""
    settings = config.parallel
    alone = settings.tensor_parallel_size * settings.pipeline_parallel_size == 1
    if settings.rank_address or alone:
        return settings.rank_address
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def rank_settings(config: MoebiusConfig, placed: RankPlacement) -> MoebiusConfig:
    """The settings of one engine process; only rank 0 has metrics."""
    parallel = config.parallel.model_copy(update={"rank": placed.rank})
    own: dict[str, object] = {"gpu_threads": placed.threads}
    if placed.rank:
        own["gpu_metrics_port"] = 0
    return config.model_copy(update={"parallel": parallel, "gpu": config.gpu.model_copy(update=own)})
