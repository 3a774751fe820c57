"""Guards what the process believes it may use: nodes, masks, cpusets and quotas of any machine's tree."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from ctypes import addressof, c_char
from pathlib import Path

import pytest

from moebius.host import topology
from moebius.host.topology import Topology, format_cpu_list, parse_cpu_list


class FakeMachine:
    """Trees of sysfs, procfs and cgroupfs."""

    def __init__(self, root: Path) -> None:
        """Empty trees: no NUMA, no limits."""
        self.sys, self.proc, self.cgroup = root / "sys", root / "proc", root / "cgroup"

    def write(self, path: Path, content: str) -> None:
        """One file and its directories."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")

    def node(self, number: int, cpus: str, total_kb: int = 2048, free_kb: int = 1024) -> None:
        """A node directory."""
        directory = self.sys / f"devices/system/node/node{number}"
        self.write(directory / "cpulist", cpus)
        lines = f"Node {number} MemTotal: {total_kb} kB\nNode {number} MemFree:  {free_kb} kB"
        self.write(directory / "meminfo", lines)

    def online(self, cpus: str) -> None:
        """Online CPUs."""
        self.write(self.sys / "devices/system/cpu/online", cpus)

    def allow(self, cpus: str, mems: str = "0-63") -> None:
        """The process's own masks."""
        lines = f"Cpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}"
        self.write(self.proc / "self/status", lines)

    def siblings(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Hyper-threads."""
        for group in groups:
            for cpu in group:
                path = self.sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
                self.write(path, ",".join(map(str, group)))

    def caches(self, groups: Sequence[str]) -> None:
        """Last-level caches, each by the CPUs that share it."""
        for group in groups:
            for cpu in parse_cpu_list(group):
                self.write(self.sys / f"devices/system/cpu/cpu{cpu}/cache/index3/shared_cpu_list", group)

    def group(self, path: str, **files: str) -> None:
        """A cgroup's files; `cpu_max` for cpu.max, `cpuset` for cpuset.cpus.effective."""
        names = {"cpu_max": "cpu.max", "cpuset": "cpuset.cpus.effective"}
        for key, content in files.items():
            self.write(self.cgroup / path / names[key], content)

    def detect(self) -> Topology:
        """Returns what kernels/topology makes of it."""
        return Topology.detect(str(self.sys), str(self.proc), str(self.cgroup))


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    """Returns a machine without anything."""
    return FakeMachine(tmp_path)


def test_no_numa_support(machine: FakeMachine) -> None:
    """A kernel without nodes still has CPUs, and gets one unbound server."""
    machine.online("0-3")
    found = machine.detect()
    assert found.nodes == ()
    assert found.usable_cpus() == (0, 1, 2, 3)
    assert found.server_nodes() == (-1,)
    with pytest.raises(ValueError, match="node 0 does not exist; allowed are -1"):
        found.usable_cpus(0)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_nodes(machine: FakeMachine, count: int) -> None:
    """Every node with its own CPUs and memory, in order of ids."""
    machine.online(f"0-{4 * count - 1}")
    for number in range(count):
        machine.node(number, f"{4 * number}-{4 * number + 3}", 2048 * (number + 1))
    found = machine.detect()
    assert [node.id for node in found.nodes] == list(range(count))
    assert found.nodes[-1].cpus == tuple(range(4 * count - 4, 4 * count))
    assert found.nodes[-1].memory_total_bytes == 2048 * 1024 * count
    assert found.nodes[0].memory_free_bytes == 1024 * 1024
    assert found.server_nodes() == tuple(range(count))
    with pytest.raises(ValueError, match=f"node {count} does not exist"):
        found.usable_cpus(count)


def test_interleaved_cpus_and_sparse_ids(machine: FakeMachine) -> None:
    """CPU lists need not be contiguous, nor node ids."""
    machine.online("0-7")
    machine.node(0, "0,2,4,6")
    machine.node(10, "1,3,5,7")
    found = machine.detect()
    assert [node.id for node in found.nodes] == [0, 10]
    assert found.usable_cpus(10) == (1, 3, 5, 7)


def test_memory_only_node_gets_no_server(machine: FakeMachine) -> None:
    """CXL or HBM nodes have no CPUs; CPU-only nodes no memory."""
    machine.online("0-3")
    machine.node(0, "0-1")
    machine.node(1, "2-3", total_kb=0, free_kb=0)
    machine.node(2, "")
    found = machine.detect()
    assert (found.nodes[2].cpus, found.usable_cpus(2)) == ((), ())
    assert found.server_nodes() == (0,)


def test_offline_cpus_are_not_used(machine: FakeMachine) -> None:
    """A node's list is cut to what is online."""
    machine.online("0-1,3")
    machine.node(0, "0-3")
    assert machine.detect().nodes[0].cpus == (0, 1, 3)


def test_affinity_mask_and_cpuset_both_limit(machine: FakeMachine) -> None:
    """Usable is what all limits leave; memory outside the cpuset is marked."""
    machine.online("0-7")
    machine.node(0, "0-3")
    machine.node(1, "4-7")
    machine.allow("1-5", mems="0")
    machine.write(machine.proc / "self/cgroup", "0::/pod/box")
    machine.group("pod", cpuset="0-4")
    found = machine.detect()
    assert found.allowed_cpus == (1, 2, 3, 4)
    assert (found.usable_cpus(0), found.usable_cpus(1)) == ((1, 2, 3), (4,))
    assert [node.memory_allowed for node in found.nodes] == [True, False]
    assert found.server_nodes() == (0,)


def test_smallest_quota_of_the_path_counts(machine: FakeMachine) -> None:
    """A parent's limit binds its children, and a quota bounds the threads."""
    machine.online("0-15")
    machine.write(machine.proc / "self/cgroup", "1:name=old:/x\n0::/a/b")
    machine.group("a/b", cpu_max="max 100000")
    machine.group("a", cpu_max="350000 100000")
    machine.group("", cpu_max="800000 100000")
    found = machine.detect()
    assert found.cpu_quota == 3.5
    assert found.recommended_threads() == 3


@pytest.mark.parametrize(
    ("cpu_max", "threads"), [("max 100000", 8), ("50000 100000", 1), ("900000 100000", 8)]
)
def test_quota_and_threads(machine: FakeMachine, cpu_max: str, threads: int) -> None:
    """There are never zero threads and never more than cores; a namespaced root group is read too."""
    machine.online("0-7")
    machine.write(machine.proc / "self/cgroup", "0::/")
    machine.group("", cpu_max=cpu_max)
    assert machine.detect().recommended_threads() == threads


@pytest.mark.parametrize(
    ("line", "mount"), [("4:cpu:/pod/box", "cpu"), ("4:cpu,cpuacct:/pod/box", "cpu,cpuacct")]
)
def test_quota_of_cgroup_version_1(machine: FakeMachine, line: str, mount: str) -> None:
    """Older hosts say the quota in two files; -1 is none, and a parent's limit binds its children."""
    machine.online("0-15")
    machine.write(machine.proc / "self/cgroup", f"5:cpuset:/other\n{line}\n0::/")
    for path, quota in (("pod/box", 800000), ("pod", 250000), ("", -1), ("../cpuset/other", 100000)):
        machine.write(machine.cgroup / mount / path / "cpu.cfs_quota_us", str(quota))
        machine.write(machine.cgroup / mount / path / "cpu.cfs_period_us", "100000")
    assert machine.detect().cpu_quota == 2.5


def test_one_thread_per_physical_core(machine: FakeMachine) -> None:
    """Hyper-threads add no memory bandwidth; a core counts even if only its second thread is allowed."""
    machine.online("0-7")
    machine.siblings([(0, 4), (1, 5), (2, 6), (3, 7)])
    machine.allow("0-1,4-5,7")
    found = machine.detect()
    assert len(found.usable_cpus()) == 5
    assert found.recommended_threads() == 3


def test_cores_are_the_usable_cpus_of_each_physical_core(machine: FakeMachine) -> None:
    """Siblings belong together; a core counts with half of its siblings; offline ones are no part of it."""
    machine.online("0-2,4-7")
    machine.node(0, "0-1,4-5")
    machine.node(1, "2-3,6-7")
    machine.siblings([(0, 4), (1, 5), (2, 6), (3, 7)])
    machine.allow("0-2,4,6-7")
    found = machine.detect()
    assert found.cores(0) == ((0, 4), (1,))
    assert found.cores(1) == ((2, 6), (7,))
    assert found.cores() == ((0, 4), (1,), (2, 6), (7,))
    assert [found.recommended_threads(node) for node in (0, 1, -1)] == [2, 2, 4]
    with pytest.raises(ValueError, match="node 2 does not exist"):
        found.cores(2)


def test_a_cpuset_with_one_sibling_of_each_core_has_as_many_cores(machine: FakeMachine) -> None:
    """Half of the CPUs are all of the cores."""
    machine.online("0-7")
    machine.siblings([(0, 1), (2, 3), (4, 5), (6, 7)])
    machine.write(machine.proc / "self/cgroup", "0::/box")
    machine.group("box", cpuset="1,3,5,7", cpu_max="300000 100000")
    found = machine.detect()
    assert found.cores() == ((1,), (3,), (5,), (7,))
    assert found.recommended_threads() == 3


def test_without_known_siblings_every_cpu_is_a_core(machine: FakeMachine) -> None:
    """A virtual machine that hides SMT gets a thread per CPU."""
    machine.online("0-3")
    found = machine.detect()
    assert found.cores() == ((0,), (1,), (2,), (3,))
    assert found.recommended_threads() == 4


@pytest.mark.parametrize("source", ["events", "capacity"])
def test_efficiency_cores_compute_only_where_there_are_no_others(machine: FakeMachine, source: str) -> None:
    """A layer ends with its slowest thread; favoured cores of one kind are no other kind."""
    machine.online("0-7")
    machine.siblings([(0, 1), (2, 3), (4,), (5,), (6,), (7,)])
    if source == "events":
        machine.write(machine.sys / "devices/cpu_core/cpus", "0-3")
        machine.write(machine.sys / "devices/cpu_atom/cpus", "4-7")
    else:
        for cpu, capacity in enumerate((1024, 1024, 980, 980, 600, 600, 600, 600)):
            machine.write(machine.sys / f"devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))
    found = machine.detect()
    assert found.cores() == ((0, 1), (2, 3))
    assert found.recommended_threads() == 2
    machine.allow("5-7")
    assert machine.detect().cores() == ((5,), (6,), (7,))


def test_first_cores_are_of_different_caches(machine: FakeMachine) -> None:
    """Each chiplet has a link of its own to memory: few threads have to use many of them."""
    machine.online("0-5")
    machine.caches(["0-2", "3-5"])
    assert [core[0] for core in machine.detect().cores()] == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("text", ["0-", "3-1", "a", "0,,1", "-1", "0-99999999999", "1 2"])
def test_malformed_list_names_the_file(machine: FakeMachine, text: str) -> None:
    """Garbage is an error, not an empty machine."""
    machine.online(text)
    with pytest.raises(RuntimeError, match=r"cpu/online: .* is not a CPU list"):
        machine.detect()


def test_malformed_quota_and_empty_machine(machine: FakeMachine) -> None:
    """Both are named."""
    with pytest.raises(RuntimeError, match="no usable CPU"):
        machine.detect()
    machine.online("0")
    machine.group("", cpu_max="lots 100000")
    with pytest.raises(RuntimeError, match=r"cpu\.max: 'lots 100000'"):
        machine.detect()


def test_cpu_lists() -> None:
    """CPUs are printed in the kernel's notation, and it reads back."""
    cpus = (0, 1, 2, 5, 8, 9)
    assert format_cpu_list(cpus) == "0-2,5,8-9"
    assert parse_cpu_list(format_cpu_list(cpus)) == cpus
    assert format_cpu_list(()) == "none"


def test_this_machine_and_pinning() -> None:
    """The real trees agree with the scheduler, and a pinned thread runs where it was pinned."""
    found = Topology.detect()
    assert set(found.allowed_cpus) <= os.sched_getaffinity(0)
    seen: list[set[int]] = []

    def pinned() -> None:
        assert topology.pin_thread([found.allowed_cpus[-1]]).applied
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert seen == [{found.allowed_cpus[-1]}]


def test_refusals_carry_a_reason() -> None:
    """An impossible placement degrades with a message; a senseless argument is an error."""
    absent = topology.bind_memory(900)
    assert not absent.applied
    assert "set_mempolicy to node 900" in absent.message
    with pytest.raises(ValueError, match="at least one CPU"):
        topology.pin_thread([])
    with pytest.raises(ValueError, match="allowed 0"):
        topology.bind_range(0, 4096, -3)


def test_pages_are_located() -> None:
    """Touched pages of this process lie on a node that exists (where the kernel answers at all)."""
    with mmap.mmap(-1, 8 * mmap.PAGESIZE) as pages:
        pages[:] = b"x" * len(pages)
        first = c_char.from_buffer(pages)
        try:
            nodes = topology.page_nodes(addressof(first), len(pages))
        except OSError as error:
            pytest.skip(f"move_pages is refused here: {error}")
        finally:
            del first
        assert len(nodes) == 8
        # Without /sys, as in a chroot, no nodes are known.
        assert set(nodes) <= ({node.id for node in Topology.detect().nodes} or {0})
