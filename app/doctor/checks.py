"""Judges facts: each check is one finding, with its remedy.

A host's checks are about speed, so what they find are warnings; a Pod's are about whether it can start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from app.doctor.facts import HUGE_PAGE, Facts, GpuLink, Volume
from moebius.config import SecurityConfig
from moebius.errors import ConfigError
from moebius.host.instruction_sets import what_it_costs
from moebius.host.topology import format_cpu_list, node_of_cpus

if TYPE_CHECKING:
    from app.supervisor.expert_placement import ServerBinding
    from app.supervisor.shortages import Shortage

Status = Literal["ok", "warning", "failure"]
GIB, MIB = 2**30, 2**20
FS_GROUP = "chart value podSecurityContext.fsGroup, which lets the image's user write to volumes"
# torch, the driver and our processes open about this many.
OPEN_FILES = 4096


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    status: Status
    found: str
    # How to fix it; empty where nothing has to be fixed.
    fix: str = ""


@dataclass(frozen=True)
class Expectation:
    """What a Pod is to find; filled by the command line and the configuration that all containers share."""

    gpus: int = 0
    servers: int = 0
    # "auto", "cpuset" or a number, as in the configuration.
    numa_node: int | str = "auto"
    # Whether this container itself is an expert server's, whose CPUs have to be of one node.
    own_cpus: bool = False
    # Bytes of the mailbox, and of every server's packed experts; 0, (): none, or the model is not known.
    mailbox_bytes: int = 0
    segments: tuple[int, ...] = ()
    # Bytes that the chart gives to them together; 0: not said.
    weights_bytes: int = 0


def _as(ok: bool, bad: Status, check: str, found: str, fix: str) -> Finding:
    return Finding(check, "ok", found) if ok else Finding(check, bad, found, fix)


def check_host(facts: Facts) -> Iterator[Finding]:
    """Yields the findings of a machine that serves without Kubernetes, or of a node as seen from a Pod."""
    # Nothing fixes it, so it is no warning.
    cost = what_it_costs(facts.isa, facts.cpu_flags, facts.num_gpus > 0)
    yield Finding("instruction set", "ok", facts.isa + (f": {cost}" if cost else ""))
    nodes = facts.topology.nodes
    usable = {node.id: facts.topology.usable_cpus(node.id) for node in nodes}
    listed = "; ".join(f"node {node}: {format_cpu_list(cpus)}" for node, cpus in usable.items())
    yield Finding("NUMA nodes", "ok", listed or "one")
    quota = facts.topology.cpu_quota
    allowed = len(facts.topology.allowed_cpus)
    yield _as(
        quota is None or quota >= allowed,
        "warning",
        "CPU limit",
        "none" if quota is None else f"{quota:g} of {allowed} CPUs",
        "a limit below the CPUs that may be used stops threads that others wait for: pin as many CPUs as "
        "the limit",
    )
    yield _as(
        facts.throttled == 0,
        "warning",
        "throttling",
        f"{facts.throttled} periods",
        "the cgroup stopped this container's threads: raise its CPU limit, or use whole CPUs of its own",
    )
    yield _as(
        not facts.numa_balancing,
        "warning",
        "kernel.numa_balancing",
        "on" if facts.numa_balancing else "off",
        "the kernel unmaps pages to see who uses them: sysctl kernel.numa_balancing=0",
    )
    slow = facts.governors - {"performance"}
    yield _as(
        not slow,
        "warning",
        "CPU governor",
        ", ".join(sorted(facts.governors)) or "not known",
        "cpupower frequency-set --governor performance",
    )
    computing = set(facts.isolated_cpus) & set(facts.topology.allowed_cpus)
    yield _as(
        not computing,
        "warning",
        "isolated CPUs",
        format_cpu_list(facts.isolated_cpus),
        "the kernel moves no thread between isolated CPUs: leave them out of this process's CPUs, or of "
        "isolcpus",
    )
    yield from _check_memory(facts)
    yield from _check_limits(facts)
    yield from _check_gpus(facts)


def _check_memory(facts: Facts) -> Iterator[Finding]:
    reserved = sum(everything for _, everything in facts.huge_pages.values())
    advised = facts.shmem_huge_pages in ("advise", "always", "within_size", "force")
    free = sum(free for free, _ in facts.huge_pages.values())
    yield _as(
        bool(reserved) or advised,
        "warning",
        "2 MiB pages of shared memory",
        f"{free / GIB:.1f} GiB reserved and free; shmem_enabled {facts.shmem_huge_pages or 'not known'}",
        "experts in 4 KiB pages are read about 7 % slower: echo advise > "
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled, or reserve pages (vm.nr_hugepages)",
    )
    yield _as(
        facts.huge_pages_mode in ("always", "madvise", ""),
        "warning",
        "transparent huge pages",
        facts.huge_pages_mode or "not known",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )
    yield _as(
        facts.swap_bytes == 0,
        "warning",
        "swap",
        f"{facts.swap_bytes / GIB:.1f} GiB" if facts.swap_bytes else "none",
        "weights that are swapped out stop every step: swapoff -a",
    )
    yield _as(
        facts.page_size == 4096,
        "warning",
        "page size",
        f"{facts.page_size} bytes",
        "measured with pages of 4096 bytes only",
    )
    limit = facts.memory_limit
    yield Finding("memory limit", "ok", "none" if limit is None else f"{limit / GIB:.1f} GiB")


def _check_limits(facts: Facts) -> Iterator[Finding]:
    memlock = facts.memlock
    yield _as(
        memlock is None or facts.num_gpus == 0,
        "warning",
        "memlock",
        "unlimited" if memlock is None else f"{memlock / MIB:.0f} MiB",
        "drivers may refuse to register the experts' memory for copies to the GPU: LimitMEMLOCK=infinity in "
        "the unit "
        "of the service or of containerd, `ulimits: {memlock: -1}` in compose",
    )
    yield _as(
        facts.open_files >= OPEN_FILES,
        "warning",
        "open files",
        str(facts.open_files),
        f"fewer clients can be connected: LimitNOFILE={OPEN_FILES} or more",
    )


def _check_gpus(facts: Facts) -> Iterator[Finding]:
    if not facts.num_gpus and not facts.driver:
        yield Finding("GPUs", "ok", "none")
        return
    text = f"{facts.num_gpus}, driver {facts.driver or 'not known'}"
    fix = "the driver is loaded, but no device may be opened: the device plugin, or the group of /dev/nvidia*"
    yield _as(facts.num_gpus > 0, "warning", "GPUs", text, fix)
    for link in facts.gpu_links:
        yield _as(
            link.width >= link.max_width,
            "warning",
            f"PCIe of {link.address}",
            _link_text(link),
            "experts are streamed over fewer lanes than the GPU has: another slot, or its riser",
        )


def _link_text(link: GpuLink) -> str:
    node = "not known" if link.numa_node < 0 else str(link.numa_node)
    text = f"x{link.width} of x{link.max_width}, {link.speed:g} of {link.max_speed:g} GT/s, NUMA node {node}"
    return text if link.speed >= link.max_speed else f"{text} (idle GPUs slow their link down)"


def check_pod(
    facts: Facts, expected: Expectation, shm: Volume, weights: Volume | None, places: Sequence[Volume]
) -> Iterator[Finding]:
    """Yields whether containers find what they need on this node. `places` have to be writable."""
    if expected.gpus or facts.num_gpus:
        yield _as(
            facts.num_gpus >= expected.gpus,
            "failure",
            "GPUs of the Pod",
            f"{facts.num_gpus} of {expected.gpus}",
            "chart value engine.gpus, the node's device plugin, and engine.runtimeClassName where it needs "
            "one",
        )
    yield from _check_nodes(facts, expected)
    if expected.mailbox_bytes:
        wanted = -(-expected.mailbox_bytes // MIB)
        yield _as(
            shm.writable and shm.total_bytes >= expected.mailbox_bytes,
            "failure",
            "/dev/shm",
            f"{shm.total_bytes / MIB:.0f} MiB, {shm.kind or 'not there'}, mailbox {wanted} MiB",
            f"chart value shmMiB of {wanted + 64} or more" if shm.writable or not shm.exists else FS_GROUP,
        )
        yield _as(
            shm.in_memory,
            "warning",
            "/dev/shm is memory",
            shm.kind or "not known",
            "a volume emptyDir with medium: Memory, mounted there in all containers",
        )
    if weights is not None:
        yield from _check_weights(facts, expected, weights)
    for place in places:
        yield _as(
            place.writable,
            "failure",
            f"{place.path} is writable",
            "yes" if place.writable else "no" if place.exists else "not there",
            FS_GROUP if place.exists else "a volume there, mounted in all containers",
        )


def _check_nodes(facts: Facts, expected: Expectation) -> Iterator[Finding]:
    nodes = facts.topology.nodes
    if expected.servers > 1:
        each_own = expected.numa_node == "cpuset"
        yield _as(
            len(nodes) >= expected.servers or not each_own,
            "failure",
            "NUMA nodes for expert servers",
            f"{max(1, len(nodes))} nodes, {expected.servers} servers",
            "chart values experts.servers (one for each node) or experts.numa: auto (they share)",
        )
    if expected.own_cpus:
        try:
            node = node_of_cpus(facts.topology, "cpuset", 0)
            cpus = format_cpu_list(facts.topology.allowed_cpus)
            yield Finding("CPUs of this container", "ok", f"{cpus}, node {node}")
        except ValueError as error:
            yield Finding("CPUs of this container", "failure", str(error), KUBELET_FIX)


KUBELET_FIX = (
    "kubelet settings cpuManagerPolicy: static, topologyManagerPolicy: restricted or single-numa-node, "
    "memoryManagerPolicy: Static; chart value experts.cpus: more than half of a node's CPUs; or "
    "experts.numa: auto"
)


def _check_weights(facts: Facts, expected: Expectation, weights: Volume) -> Iterator[Finding]:
    wanted = max(sum(expected.segments), 0)
    # A Pod that fills a volume in memory beyond its limit is evicted, however large the file system is.
    size = min(weights.total_bytes, expected.weights_bytes or weights.total_bytes)
    yield _as(
        weights.writable and size >= wanted,
        "failure",
        "volume for packed experts",
        f"{size / GIB:.2f} GiB of {weights.kind or 'nothing'} at {weights.path}"
        + (f", {wanted / GIB:.2f} GiB are needed" if wanted else ""),
        f"chart value experts.weightsMiB of {-(-max(expected.segments, default=0) // MIB)} or more for each "
        "server",
    )
    yield _as(
        weights.in_memory,
        "warning",
        "packed experts lie in memory",
        weights.kind or "not known",
        "chart value experts.weights.volume: memory, or a directory of a tmpfs or hugetlbfs on the node",
    )
    if weights.kind == "hugetlbfs":
        each = max(expected.segments, default=0)
        short = [node for node, (free, _) in facts.huge_pages.items() if free < each]
        fitting = len(facts.huge_pages) - len(short)
        yield _as(
            fitting >= expected.servers or expected.numa_node != "cpuset",
            "failure",
            "reserved 2 MiB pages",
            ", ".join(
                f"node {node}: {free / GIB:.1f} GiB free" for node, (free, _) in facts.huge_pages.items()
            ),
            f"reserve {-(-each // HUGE_PAGE)} pages on each node: /sys/devices/system/node/node*/hugepages/"
            "hugepages-2048kB/nr_hugepages",
        )


WANTED_POLICIES = {
    "cpuManagerPolicy": ("static",),
    "topologyManagerPolicy": ("restricted", "single-numa-node"),
    "memoryManagerPolicy": ("Static",),
}


def check_kubelet(settings: Mapping[str, Any], expected: Expectation) -> Iterator[Finding]:
    """The node's KubeletConfiguration, where a Pod may read it: what `experts.numa: kubelet` relies on."""
    needed: Status = "failure" if expected.numa_node == "cpuset" else "warning"
    for name, allowed in WANTED_POLICIES.items():
        found = str(settings.get(name, "none"))
        # Without the Memory Manager, memory lies where it is touched first, which pinned threads decide.
        status: Status = "warning" if name == "memoryManagerPolicy" else needed
        yield _as(
            found in allowed, status, name, found, f"{name}: {' or '.join(allowed)} in the kubelet's settings"
        )
    scope = str(settings.get("topologyManagerScope", "container"))
    whole = scope == "pod" and settings.get("topologyManagerPolicy") == "single-numa-node"
    yield _as(
        not (whole and expected.servers > 1),
        needed,
        "topologyManagerScope",
        scope,
        "topologyManagerScope: container; with pod and single-numa-node all expert servers would be on one "
        "node",
    )


def check_model(path: str, error: str, fix: str) -> Finding:
    """`error`: why the checkpoint cannot be used; empty: it can."""
    return _as(not error, "failure", "checkpoint", error or path, fix)


def check_threads(servers: Sequence[ServerBinding]) -> Iterator[Finding]:
    """Yields the findings on threads of the expert servers that `moebius serve` would start now."""
    for server in servers:
        node = f" of node {server.numa_node}" if server.numa_node >= 0 else ""
        yield _as(
            not server.is_shared,
            "warning",
            f"expert threads{node}",
            str(server),
            "set expert_threads of each instance, so that together they have no more threads than cores",
        )


def check_process_limits(error: str) -> Finding:
    """`error`: which limit is too low for a process of ours, and how it is raised; empty: none."""
    problem, _, fix = error.partition("; needed: ")
    fix = f"needed: {fix}" if fix else "raise this limit"
    return _as(not error, "failure", "limits of a process", problem or "enough to start", fix)


def check_shortages(shortages: Sequence[Shortage]) -> Iterator[Finding]:
    """Yields what `moebius serve MODEL` refuses to start with."""
    for shortage in shortages:
        yield Finding(f"{shortage.of} for this model", "failure", shortage.problem, shortage.remedy)
    if not shortages:
        yield Finding("shared memory, address space and RAM for this model", "ok", "enough")


def check_plan(error: str, found: str = "fits") -> Finding:
    """`error`: what the planner refuses of the model with these settings; empty: nothing."""
    fix = "`moebius plan` with other settings says what would fit"
    return _as(not error, "failure", "memory plan", error or found, fix)


def check_certificates(settings: SecurityConfig) -> Iterator[Finding]:
    """The findings on certificates of gRPC, as the processes of this Pod will read them; nothing where they
    speak plain text."""
    from moebius.network.tls import SOON, grpc_files, read_credentials

    if settings.grpc_tls == "off":
        return
    secret = "the Secret of chart value tls.grpc.secretName, with tls.crt, tls.key and ca.crt of one CA"
    try:
        found = read_credentials(grpc_files(settings))
    except ConfigError as error:
        yield Finding("certificates of gRPC", "failure", str(error), secret)
        return
    # Servers need a certificate in either mode; grpc_files asks for one in `mutual` only.
    if found.not_after is None:
        yield Finding("certificates of gRPC", "failure", "grpc_cert_file is empty", secret)
        return
    is_late = found.not_after - datetime.now(UTC) >= SOON
    text = f"{found.subject}, until {found.not_after}"
    yield _as(is_late, "warning", "certificates of gRPC", text, "renew it: it expires soon")
