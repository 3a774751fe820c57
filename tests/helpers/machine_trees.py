"""/proc and /sys of machines that are not here, in the kernel's documented forms; none is a recording."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MachineTree:
    """A machine by what its kernel shows; `write` makes its files."""

    sockets: int = 1
    nodes_per_socket: int = 1
    cores_per_node: int = 4
    threads_per_core: int = 2
    swappiness: int = 60
    swap_kib: int = 0
    kernel: str = "Linux version 6.8.0"
    governor: str = "performance"
    # Of each node: kinds of its modules, "" where a place is empty.
    modules: tuple[str, ...] = ()

    @property
    def num_cores(self) -> int:
        """Cores of all sockets."""
        return self.sockets * self.nodes_per_socket * self.cores_per_node

    @property
    def num_cpus(self) -> int:
        """Hardware threads; the second ones of all cores come after the first ones, as on most machines."""
        return self.num_cores * self.threads_per_core

    def write(self, root: Path) -> Path:
        """Returns `root`, with the files below it."""
        nodes = self.sockets * self.nodes_per_socket
        cpus = f"0-{self.num_cpus - 1}"
        files = {
            "sys/devices/system/cpu/online": cpus,
            "sys/devices/system/node/online": f"0-{nodes - 1}" if nodes > 1 else "0",
            "sys/fs/cgroup/cpuset.cpus.effective": cpus,
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [advise] never",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "proc/self/status": f"Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t0-{nodes - 1}",
            "proc/self/cgroup": "0::/",
            "proc/sys/vm/swappiness": str(self.swappiness),
            "proc/version": self.kernel,
        }
        if self.swap_kib:
            files["proc/swaps"] = (
                f"Filename Type Size Used Priority\n/dev/sda2 partition {self.swap_kib} 0 -2"
            )
        for cpu in range(self.num_cpus):
            files |= self._cpu(cpu)
        for node in range(nodes):
            files |= self._node(node)
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return root

    def _cpu(self, cpu: int) -> dict[str, str]:
        core = cpu % self.num_cores
        place = f"sys/devices/system/cpu/cpu{cpu}"
        siblings = [str(core + index * self.num_cores) for index in range(self.threads_per_core)]
        socket = core // (self.nodes_per_socket * self.cores_per_node)
        return {
            f"{place}/topology/thread_siblings_list": ",".join(siblings),
            f"{place}/topology/physical_package_id": str(socket),
            f"{place}/cpufreq/scaling_governor": self.governor,
        }

    def _node(self, node: int) -> dict[str, str]:
        place = f"sys/devices/system/node/node{node}"
        first = node * self.cores_per_node
        ranges = [
            f"{first + index * self.num_cores}-{first + self.cores_per_node - 1 + index * self.num_cores}"
            for index in range(self.threads_per_core)
        ]
        files = {
            f"{place}/cpulist": ",".join(ranges),
            f"{place}/meminfo": f"Node {node} MemTotal: 1048576 kB\nNode {node} MemFree: 524288 kB",
            f"{place}/hugepages/hugepages-2048kB/nr_hugepages": "0",
            f"{place}/hugepages/hugepages-2048kB/free_hugepages": "0",
        }
        for index, kind in enumerate(self.modules):
            module = f"sys/devices/system/edac/mc/mc{node}/dimm{index}"
            files |= {f"{module}/size": "32768" if kind else "0", f"{module}/dimm_mem_type": kind or "Empty"}
        return files


MACHINES = {
    # Two EPYCs in four nodes a socket, every second place for a module empty.
    "nps4": MachineTree(2, 4, 4, modules=("Registered-DDR4", "")),
    "wsl2": MachineTree(swap_kib=8 * 2**20, kernel="Linux version 5.15.153.1-microsoft-standard-WSL2"),
    "laptop": MachineTree(threads_per_core=1, governor="powersave", swappiness=10, swap_kib=2**20),
}
