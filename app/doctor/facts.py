"""What the kernel's files say of a machine and of the container one is in; nothing is judged here."""

from __future__ import annotations

import os
import re
import resource
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from app.supervisor.placement import find_gpus
from moebius.host.instruction_sets import cpu_flags
from moebius.host.kernel_files import file_text
from moebius.host.topology import Topology, parse_cpu_list
from moebius.kernels import isa_level
from moebius.process.limits import MOST_FILES, is_on_windows

HUGE_PAGE = 2 << 20
_DEVICE = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)


@dataclass(frozen=True)
class Volume:
    """A directory and the file system below it; filled by `read_volume`."""

    path: Path
    exists: bool
    writable: bool
    # "tmpfs", "hugetlbfs", "ext4", ...; "": not known.
    kind: str
    total_bytes: int
    free_bytes: int

    @property
    def in_memory(self) -> bool:
        """Returns whether what is written there lies in memory."""
        return self.kind in ("tmpfs", "hugetlbfs", "ramfs")


@dataclass(frozen=True)
class GpuLink:
    """One GPU and its place on the PCI bus; filled by `read_gpu_links`."""

    address: str
    # -1: not known.
    numa_node: int
    # Lanes and transfers a second (GT/s), now and at most; 0: not known. Idle GPUs slow their link down.
    width: int
    max_width: int
    speed: float
    max_speed: float


@dataclass(frozen=True)
class Facts:
    """One look; filled by `read_facts`."""

    topology: Topology
    # Instruction-set level of our kernels, and the processor's flags; empty: not known.
    isa: str
    cpu_flags: frozenset[str]
    # Nodes whose memory this process may use.
    memory_nodes: tuple[int, ...]
    # Bytes; None: no limit.
    memory_limit: int | None
    # Periods in which the cgroup's CPU limit stopped this container.
    throttled: int
    # NUMA node -> free and all reserved 2 MiB pages, bytes.
    huge_pages: dict[int, tuple[int, int]]
    # "always", "advise", "never", ...; "": the kernel has no such file.
    shmem_huge_pages: str
    huge_pages_mode: str
    numa_balancing: bool
    governors: frozenset[str]
    isolated_cpus: tuple[int, ...]
    swap_bytes: int
    page_size: int
    # Bytes; None: no limit.
    memlock: int | None
    open_files: int
    num_gpus: int
    gpu_links: tuple[GpuLink, ...]
    # Of the NVIDIA driver; "": none is loaded.
    driver: str
    # Hardware threads of a core that are used; 0: not known.
    threads_per_core: int = 0
    # NUMA nodes that one socket is divided into (NPS, sub-NUMA clusters); 0: not known.
    nodes_per_socket: int = 0
    swappiness: int = 0  # vm.swappiness
    # Linux below Windows, whose driver limits what can be pinned.
    is_wsl: bool = False
    # Memory modules by the kernel's EDAC: how many of each kind, such as "Registered-DDR4"; empty: not known.
    memory_modules: tuple[tuple[str, int], ...] = ()
    # Places of modules that are empty, in channels that EDAC shows.
    empty_places: int = 0


def read_facts(root: Path = Path("/")) -> Facts:
    """Reads files below `root`, and the process's own limits.

    Raises RuntimeError as `Topology.detect`, ValueError as `isa_level`.
    """
    sys, proc = root / "sys", root / "proc"
    topology = Topology.detect(str(sys), str(proc), str(sys / "fs/cgroup"))
    status = file_text(proc / "self/status")
    memory_nodes = re.search(r"^Mems_allowed_list:\s*(\S+)", status, re.MULTILINE)
    known = tuple(node.id for node in topology.nodes)
    allowed = parse_cpu_list(memory_nodes[1]) if memory_nodes else known
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # every process takes what is allowed
    isolated = file_text(sys / "devices/system/cpu/isolated")
    governors = {
        file_text(path) for path in sys.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    }
    version = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", file_text(proc / "driver/nvidia/version"))
    return Facts(
        topology=topology,
        isa=isa_level(),
        cpu_flags=cpu_flags(proc / "cpuinfo"),
        memory_nodes=tuple(node for node in allowed if node in known),
        memory_limit=read_memory_limit(root),
        throttled=_throttled(root),
        huge_pages={node: _huge_pages(sys, node) for node in known},
        shmem_huge_pages=_chosen(sys / "kernel/mm/transparent_hugepage/shmem_enabled"),
        huge_pages_mode=_chosen(sys / "kernel/mm/transparent_hugepage/enabled"),
        numa_balancing=file_text(proc / "sys/kernel/numa_balancing") not in ("", "0"),
        governors=frozenset(governors - {""}),
        isolated_cpus=parse_cpu_list(isolated) if isolated else (),
        swap_bytes=_swap(proc / "swaps"),
        page_size=os.sysconf("SC_PAGE_SIZE"),
        memlock=None if soft == resource.RLIM_INFINITY else soft,
        open_files=files if files >= 0 else MOST_FILES,
        num_gpus=len(find_gpus(root)),
        gpu_links=read_gpu_links(root),
        driver=version[1] if version else "",
        threads_per_core=_threads_per_core(sys, topology),
        nodes_per_socket=_nodes_per_socket(sys, topology),
        swappiness=int(_number(proc / "sys/vm/swappiness")),
        is_wsl=is_on_windows(root),
        memory_modules=_memory_modules(sys),
        empty_places=sum(file_text(size) == "0" for size in sys.glob(_MODULES + "/size")),
    )


_MODULES = "devices/system/edac/mc/mc[0-9]*/dimm[0-9]*"


def _memory_modules(sys: Path) -> tuple[tuple[str, int], ...]:
    kinds = [
        file_text(place / "dimm_mem_type") or "not known"
        for place in sorted(sys.glob(_MODULES))
        if _number(place / "size") > 0
    ]
    return tuple(sorted(Counter(kinds).items()))


def _threads_per_core(sys: Path, topology: Topology) -> int:
    """Returns the most hardware threads that a usable CPU's core has."""
    listed = (
        file_text(sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        for cpu in topology.allowed_cpus
    )
    return max((len(parse_cpu_list(text)) for text in listed if text), default=0)


def _nodes_per_socket(sys: Path, topology: Topology) -> int:
    """Returns the most NUMA nodes with CPUs that one socket has."""
    nodes = Counter[str]()
    for node in topology.nodes:
        cpus = topology.usable_cpus(node.id)
        socket = sys / f"devices/system/cpu/cpu{cpus[0]}/topology/physical_package_id" if cpus else None
        if socket is not None and file_text(socket):
            nodes[file_text(socket)] += 1
    return max(nodes.values(), default=0)


def read_volume(path: Path, mounts: Path = Path("/proc/self/mounts")) -> Volume:
    """The nearest mount above the path says what kind of memory or disk it is."""
    if not path.is_dir():
        return Volume(path, False, False, "", 0, 0)
    found = os.statvfs(path)
    kind, longest = "", -1
    for line in file_text(mounts).splitlines():
        _, point, name, *_ = line.split()
        if path.resolve().is_relative_to(point) and len(point) >= longest:
            kind, longest = name, len(point)
    return Volume(
        path,
        True,
        os.access(path, os.W_OK | os.X_OK),
        kind,
        found.f_blocks * found.f_frsize,
        found.f_bavail * found.f_frsize,
    )


def read_memory_limit(root: Path = Path("/")) -> int | None:
    """Returns the smallest limit of the cgroups that this process is in, version 2 or 1; None: none."""
    limits = []
    for directory in _cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = file_text(directory / name)
            # Version 1 writes "no limit" as the largest multiple of a page.
            if text.isdecimal() and int(text) < 1 << 62:
                limits.append(int(text))
    return min(limits, default=None)


def read_gpu_links(root: Path = Path("/")) -> tuple[GpuLink, ...]:
    """Returns the PCIe links of the machine's NVIDIA GPUs, in the order of their addresses, also those that
    may not be opened.
    """
    names = sorted(path.name.lower() for path in (root / "proc/driver/nvidia/gpus").glob("*"))
    found = []
    for name in names:
        device = root / "sys/bus/pci/devices" / name
        if not _DEVICE.fullmatch(name) or not device.exists():
            continue
        width, most = (_number(device / f"{which}_link_width") for which in ("current", "max"))
        speed, fastest = (_number(device / f"{which}_link_speed") for which in ("current", "max"))
        node = int(_number(device / "numa_node", -1.0))
        found.append(GpuLink(name, node, int(width), int(most), speed, fastest))
    return tuple(found)


def _cgroups(root: Path, controller: str) -> list[Path]:
    """This process's groups of both versions, each with all above it that can be read."""
    base, found = root / "sys/fs/cgroup", []
    for line in file_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top = base
        elif controller in controllers.split(","):
            top = base / controllers if (base / controllers).exists() else base / controller
        else:
            continue
        place = top / path.lstrip("/")
        # In a container the group's own files are at the top, and its path is not there.
        while place != top:
            found.append(place)
            place = place.parent
        found.append(top)
    return found or [base]


def _throttled(root: Path) -> int:
    for directory in _cgroups(root, "cpu"):
        found = re.search(r"^nr_throttled (\d+)", file_text(directory / "cpu.stat"), re.MULTILINE)
        if found:
            return int(found[1])
    return 0


def _huge_pages(sys: Path, node: int) -> tuple[int, int]:
    directory = sys / f"devices/system/node/node{node}/hugepages/hugepages-2048kB"
    free, everything = (int(_number(directory / name)) for name in ("free_hugepages", "nr_hugepages"))
    return free * HUGE_PAGE, everything * HUGE_PAGE


def _swap(path: Path) -> int:
    return sum(int(line.split()[2]) * 1024 for line in file_text(path).splitlines()[1:])


def _chosen(path: Path) -> str:
    """Returns the word in brackets of a file that lists all choices."""
    found = re.search(r"\[(\w+)\]", file_text(path))
    return found[1] if found else ""


def _number(path: Path, missing: float = 0.0) -> float:
    """Returns the first number in a file."""
    found = re.match(r"-?[\d.]+", file_text(path))
    return float(found[0]) if found else missing
