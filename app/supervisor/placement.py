"""Which CPUs and GPUs each engine process gets."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.supervisor.expert_placement import NodeCores
from moebius.config import MoebiusConfig
from moebius.errors import ConfigError

_DEVICE = re.compile(r"nvidia\d+")


@dataclass(frozen=True)
class Gpu:
    """One GPU; filled by `find_gpus`."""

    # -1: not known, or the machine has one node.
    numa_node: int


def find_gpus(root: Path = Path("/")) -> tuple[Gpu, ...]:
    """Returns NVIDIA GPUs that may be opened here, in the order of their PCI addresses.

    In a container only some of the machine's GPUs may be there; which ones is not visible in these files,
    so their NUMA nodes are then unknown.
    """
    count = sum(1 for path in (root / "dev").glob("nvidia*") if _DEVICE.fullmatch(path.name))
    addresses = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").glob("*"))
    if len(addresses) != count:
        return (Gpu(-1),) * count
    return tuple(Gpu(_numa_node(root / "sys/bus/pci/devices" / address.lower())) for address in addresses)


def _numa_node(device: Path) -> int:
    try:
        return int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


@dataclass(frozen=True)
class RankBinding:
    """One engine process; filled by `place_ranks`."""

    rank: int
    # Empty: those of the supervisor.
    cpus: tuple[int, ...]
    # torch threads when the device is a CPU; 0: the engine decides.
    threads: int
    # Which of several engines with requests of their own.
    engine: int = 0

    @property
    def name(self) -> str:
        """The process's name: rank 0, which serves requests, is the engine to everybody else."""
        number = self.rank or self.engine
        return f"gpu-{number}" if number else "gpu"


def runs_on_gpus(config: MoebiusConfig, gpus: Sequence[Gpu]) -> bool:
    """Returns whether the engine's device is a GPU, as far as that is known before it starts."""
    return config.gpu.device == "cuda" or (config.gpu.device == "auto" and bool(gpus))


def place_ranks(
    config: MoebiusConfig, gpus: Sequence[Gpu], node_cores: Mapping[int, NodeCores]
) -> tuple[RankBinding, ...]:
    """Returns one placement per rank of this host; `node_cores` maps NUMA node -> what we may use there.

    Raises ConfigError when there are more ranks than GPUs.
    """
    settings = config.parallel
    ranks = [(engine, rank) for engine in range(settings.data_parallel_size) for rank in settings.host_ranks]
    count = len(ranks)
    on_gpus = runs_on_gpus(config, gpus)
    if on_gpus and gpus and count > len(gpus):
        if settings.rank_hosts > 1:
            raise ConfigError(
                f"{settings.num_ranks} ranks on {settings.rank_hosts} hosts (rank_hosts) are {count} each; "
                f"there are {len(gpus)} GPUs here"
            )
        if settings.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size {settings.data_parallel_size} are as many engines with a GPU each, but "
                f"there are {len(gpus)} GPUs; allowed: at most {len(gpus)}"
            )
        raise ConfigError(
            f"tensor_parallel_size {settings.tensor_parallel_size} × pipeline_parallel_size "
            f"{settings.pipeline_parallel_size} are {count} ranks, but there are {len(gpus)} GPUs; "
            f"allowed: at most {len(gpus)} ranks"
        )
    if not on_gpus:
        usable = sum(len(found.cores) for found in node_cores.values())
        # Ranks on CPUs share the machine; alone, the engine leaves a core to its other threads itself.
        threads = config.gpu.gpu_threads or (max(1, usable // count) if count > 1 else 0)
        is_divided = any(found.others for found in node_cores.values())
        left = tuple(cpu for found in node_cores.values() for cpu in found.cpus) if is_divided else ()
        return tuple(RankBinding(rank, left, threads, engine) for engine, rank in ranks)
    threads = config.gpu.gpu_threads
    return tuple(
        RankBinding(rank, _near(number, gpus, node_cores), threads, engine)
        for number, (engine, rank) in enumerate(ranks)
    )


def _near(number: int, gpus: Sequence[Gpu], node_cores: Mapping[int, NodeCores]) -> tuple[int, ...]:
    """Returns all CPUs of the GPU's node, where that leaves any out."""
    node = gpus[number].numa_node if number < len(gpus) else -1
    return node_cores[node].cpus if len(node_cores) > 1 and node in node_cores else ()


def rank_address(config: MoebiusConfig) -> str:
    """Returns where the ranks meet: a free port of this machine, unless one is given; empty for one rank.

    Raises ConfigError when ranks are on several hosts and no address is given.
    """
    settings = config.parallel
    if settings.rank_address or settings.num_ranks == 1:
        return settings.rank_address
    if settings.rank_hosts > 1:
        raise ConfigError("rank_address: empty, but ranks of several hosts have to meet; allowed: host:port")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def rank_settings(config: MoebiusConfig, placed: RankBinding) -> MoebiusConfig:
    """Returns the settings of one engine process; only the first rank of each host has metrics and probes."""
    parallel = config.parallel.model_copy(update={"rank": placed.rank, "data_parallel_rank": placed.engine})
    own: dict[str, object] = {"gpu_threads": placed.threads}
    if placed.engine:
        own["gpu_address"] = config.gateway.engines[placed.engine]
        own["gpu_metrics_port"] = config.gpu.gpu_metrics_port and config.gpu.gpu_metrics_port + placed.engine
        model = config.model.model_copy(update={"sleep_file": f"{config.model.sleep_file}.{placed.engine}"})
        config = config.model_copy(update={"model": model})
    if placed.rank % (parallel.num_ranks // parallel.rank_hosts):
        own["gpu_metrics_port"] = 0
    return config.model_copy(update={"parallel": parallel, "gpu": config.gpu.model_copy(update=own)})


def refuse_data_parallel(config: MoebiusConfig) -> None:
    """Raises ConfigError for settings that several engines behind one port do not have yet."""
    parallel = config.parallel
    if parallel.data_parallel_size == 1:
        return
    if parallel.num_ranks > 1:
        raise ConfigError(
            f"data_parallel_size {parallel.data_parallel_size}: each engine has one GPU, so "
            "tensor_parallel_size and pipeline_parallel_size have to be 1; where other servers count the "
            "GPUs of all attention ranks in --tp, --data-parallel-size alone is that number"
        )
    if config.gateway.engines:
        raise ConfigError("engines names engines that run elsewhere; allowed with data_parallel_size 1 only")
