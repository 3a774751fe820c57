"""The cores that an instance computes on: measured once, divided with the other instances of the host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from app.supervisor.core_claims import DIRECTORY, CoreClaims, OtherInstance, open_claims
from app.supervisor.expert_placement import NodeCores, ServerBinding, usable_nodes
from moebius.config import ExpertConfig
from moebius.host.kernel_times import cpu_name, times_file
from moebius.host.read_curves import MeasuredCores, ReadCurve, read_curves, write_curves
from moebius.host.topology import format_cpu_list

# A busier host, by processes that want to run for each core, is not measured: what was found would stay.
_BUSY = 0.25

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class HostCores:
    """Filled by `known_cores` and `divided_cores`."""

    # NUMA node -> what is left to us there; -1: the machine tells no nodes.
    nodes: Mapping[int, NodeCores]
    # The cgroup's limit in CPUs.
    quota: float | None


def known_cores(experts: ExpertConfig, others: Sequence[OtherInstance] = ()) -> HostCores:
    """What this host is known to have, less the cores of `others`; measures nothing.

    Raises StartupError as `usable_nodes`.
    """
    nodes, quota = usable_nodes()
    servers = -(-(experts.expert_servers or len(nodes)) // len(nodes))
    wanted = experts.expert_threads * servers
    curves = _known_curves()
    for node, found in nodes.items():
        measured = replace(found, curve=curves.get(_key(found, quota)))
        nodes[node] = measured.without(others, wanted)
    return HostCores(nodes, quota)


class CoreDivision:
    """The cores of one starting instance; filled by `divided_cores`."""

    def __init__(self, cores: HostCores, claims: CoreClaims | None) -> None:
        self.cores, self._claims = cores, claims

    def hold(self, name: str, placements: Sequence[ServerBinding]) -> CoreClaims | None:
        """Claims what servers are placed on, for as long as the answer lives. None: nothing to claim."""
        cpus = sorted({cpu for placed in placements for cpu in placed.cpus})
        for placed in placements:
            if placed.is_shared:
                node = placed.numa_node
                log.warning("cores are shared with other instances", numa_node=node, threads=placed.reason)
        if self._claims is None or not cpus:
            return None
        try:
            self._claims.hold(name, cpus)
        except OSError as error:
            log.warning("other instances will not see which cores are taken", why=error.strerror)
            return None
        return self._claims


@contextlib.contextmanager
def divided_cores(experts: ExpertConfig, measures: bool) -> Iterator[CoreDivision]:
    """Holds what other instances leave of this host; no other instance starts until the block ends.

    With `measures`, nodes whose read bandwidth is not known are measured first, where no other instance
    computes and expert_threads is not set. Raises StartupError as `usable_nodes`.
    """
    claims = open_claims(DIRECTORY)
    with contextlib.ExitStack() as stack:
        if claims is not None:
            try:
                stack.enter_context(claims.exclusive())
            except TimeoutError as error:
                log.warning("other instances of this host are not seen", why=str(error))
                claims = None
        others = claims.others() if claims else ()
        if measures and not experts.expert_threads and not others:
            measure_missing(*usable_nodes())
        yield CoreDivision(known_cores(experts, others), claims)


def measure_missing(nodes: Mapping[int, NodeCores], quota: float | None) -> None:
    """Measures and remembers how fast each node's memory is read, unless that is known.

    What cannot be measured or remembered is logged: then all cores compute.
    """
    known = _known_curves()
    missing = {
        node: found
        for node, found in nodes.items()
        if len(found.cores) > 1 and _key(found, quota) not in known
    }
    if not missing:
        return
    load = os.getloadavg()[0]
    if load > _BUSY * sum(len(found.cores) for found in nodes.values()):
        log.info("memory bandwidth is not measured: this host is busy", load=load)
        return
    try:
        curves = measure_cores(missing, quota)
    except (OSError, ValueError, MemoryError) as error:
        log.warning("memory bandwidth by threads is not measured", why=str(error))
        return
    for node, curve in curves.items():
        log.info("memory bandwidth by threads", numa_node=node, gb_per_second=str(curve), knee=curve.knee)


def measure_cores(nodes: Mapping[int, NodeCores], quota: float | None) -> dict[int, ReadCurve]:
    """NUMA node -> how fast its memory is read by up to `quota` threads; measured now, and remembered.

    Raises ValueError or MemoryError where it cannot be measured, OSError where it cannot be remembered.
    """
    from app.bench.read_curve import measure_read_curves

    most = max(len(found.cores) for found in nodes.values())
    if quota is not None:
        most = max(1, min(most, int(quota / len(nodes))))
    measured = measure_read_curves({node: found.leaders for node, found in nodes.items()}, most)
    curves = {node: ReadCurve(_key(nodes[node], quota), points) for node, points in measured.items()}
    write_curves(times_file(), curves.values())
    return curves


def _known_curves() -> dict[MeasuredCores, ReadCurve]:
    try:
        return read_curves(times_file())
    except (OSError, ValueError) as error:
        log.debug("measured bandwidths cannot be read", why=str(error))
        return {}


def _key(node: NodeCores, quota: float | None) -> MeasuredCores:
    return MeasuredCores(cpu_name(), format_cpu_list(node.leaders), quota)
