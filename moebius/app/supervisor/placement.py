"""Which CPUs and GPUs each process gets."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moebius.config import MoebiusConfig
from moebius.errors import ConfigError, StartupError

# Fewer CPUs of a node are too few to leave any of them to others.
SPARED_FROM = 8


@dataclass(frozen=True)
class ServerBinding:
    """Where one expert server runs; filled by `place_experts`."""

    # -1: not bound, because the machine has one node (or none that we may use).
    numa_node: int
    cpus: tuple[int, ...]
    threads: int


def usable_cpus() -> tuple[dict[int, tuple[int, ...]], float | None]:
    """NUMA node -> CPUs we may use there (-1: the machine tells no nodes), and the cgroup's limit in CPUs.

    Raises StartupError where neither /sys nor /proc says what CPUs there are.
    """
    from moebius.topology import Topology

    try:
        topology = Topology.detect()
    except RuntimeError as error:
        raise StartupError(f"{error}: both have to be mounted, as they are in any container") from None
    nodes = {node.id: tuple(topology.usable_cpus(node.id)) for node in topology.nodes}
    nodes = {node: cpus for node, cpus in nodes.items() if cpus} or {-1: tuple(topology.usable_cpus())}
    return nodes, topology.cpu_quota


def place_experts(
    node_cpus: Mapping[int, Sequence[int]], num_servers: int, quota: float | None, num_engines: int = 0
) -> tuple[ServerBinding, ...]:
    """Spreads servers over nodes, and each node's CPUs over its servers; every server gets one at least.

    `node_cpus` maps NUMA node -> CPUs we may use there (nodes without any are left out). `quota` is the
    cgroup's limit in CPUs: more runnable threads than that would only be throttled, so threads are cut
    to each server's part of it. With more servers than CPUs, servers share CPUs.

    `num_engines` processes drive GPUs: for each a CPU has no compute thread, on nodes of 8 CPUs or more. A
    thread there would be pushed aside several times a step, and all others wait for it.
    """
    nodes = [node for node, cpus in node_cpus.items() if cpus]
    if not nodes:
        raise ValueError("no CPU is usable")
    placements = []
    for index in range(num_servers):
        node = nodes[index % len(nodes)]
        neighbours = len(range(index % len(nodes), num_servers, len(nodes)))
        cpus = _share(sorted(node_cpus[node]), index // len(nodes), neighbours)
        threads = len(cpus)
        if neighbours == index // len(nodes) + 1 and len(node_cpus[node]) >= SPARED_FROM:
            threads = max(1, threads - -(-num_engines // len(nodes)))
        if quota is not None:
            threads = max(1, min(threads, int(quota / num_servers)))
        placements.append(ServerBinding(node if len(nodes) > 1 else -1, cpus, threads))
    return tuple(placements)


def _share(cpus: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """The index-th of `count` contiguous, nearly equal parts; one CPU, in turn, when there are too few."""
    if count > len(cpus):
        return (cpus[index % len(cpus)],)
    begin, end = index * len(cpus) // count, (index + 1) * len(cpus) // count
    return tuple(cpus[begin:end])


_DEVICE = re.compile(r"nvidia\d+")


@dataclass(frozen=True)
class Gpu:
    """One GPU; filled by `find_gpus`."""

    # -1: not known, or the machine has one node.
    numa_node: int


def find_gpus(root: Path = Path("/")) -> tuple[Gpu, ...]:
    """NVIDIA GPUs that may be opened here, in the order of their PCI addresses.

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

    @property
    def name(self) -> str:
        """The process's name: rank 0, which serves requests, is the engine to everybody else."""
        return f"gpu-{self.rank}" if self.rank else "gpu"


def runs_on_gpus(config: MoebiusConfig, gpus: Sequence[Gpu]) -> bool:
    """Whether the engine's device is a GPU, as far as that is known before it starts."""
    return config.gpu.device == "cuda" or (config.gpu.device == "auto" and bool(gpus))


def place_ranks(
    config: MoebiusConfig, gpus: Sequence[Gpu], node_cpus: Mapping[int, Sequence[int]]
) -> tuple[RankBinding, ...]:
    """One placement per rank of this host; `node_cpus` maps NUMA node -> CPUs we may use there.

    Raises ConfigError when there are more ranks than GPUs.
    """
    settings = config.parallel
    ranks = settings.host_ranks
    count = len(ranks)
    on_gpus = runs_on_gpus(config, gpus)
    if on_gpus and gpus and count > len(gpus):
        if settings.rank_hosts > 1:
            raise ConfigError(
                f"{settings.num_ranks} ranks on {settings.rank_hosts} hosts (rank_hosts) are {count} each; "
                f"there are {len(gpus)} GPUs here"
            )
        raise ConfigError(
            f"tensor_parallel_size {settings.tensor_parallel_size} × pipeline_parallel_size "
            f"{settings.pipeline_parallel_size} are {count} ranks, but there are {len(gpus)} GPUs; "
            f"allowed: at most {len(gpus)} ranks"
        )
    if not on_gpus:
        usable = sum(len(cpus) for cpus in node_cpus.values())
        # Ranks on CPUs share the machine; alone, the engine leaves a core to its other threads itself.
        threads = config.gpu.gpu_threads or (max(1, usable // count) if count > 1 else 0)
        return tuple(RankBinding(rank, (), threads) for rank in ranks)
    threads = config.gpu.gpu_threads
    return tuple(
        RankBinding(rank, _near(number, gpus, node_cpus), threads) for number, rank in enumerate(ranks)
    )


def _near(number: int, gpus: Sequence[Gpu], node_cpus: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """All CPUs of the GPU's node, where that leaves any out."""
    node = gpus[number].numa_node if number < len(gpus) else -1
    near = tuple(sorted(node_cpus.get(node, ())))
    return near if len(node_cpus) > 1 else ()


def rank_address(config: MoebiusConfig) -> str:
    """Where the ranks meet: a free port of this machine, unless one is given; empty for one rank.

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
    """The settings of one engine process; only rank 0 has metrics."""
    parallel = config.parallel.model_copy(update={"rank": placed.rank})
    own: dict[str, object] = {"gpu_threads": placed.threads}
    if placed.rank:
        own["gpu_metrics_port"] = 0
    return config.model_copy(update={"parallel": parallel, "gpu": config.gpu.model_copy(update=own)})
