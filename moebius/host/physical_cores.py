"""Which CPUs are threads of one physical core, and which cores compute.

Sources: Documentation/admin-guide/cputopology.rst of the kernel (`thread_siblings_list`), its ABI files
`sysfs-devices-system-cpu` (`cache/index3/shared_cpu_list`, `cpu_capacity`) and `events/intel-hybrid`
(`devices/cpu_atom/cpus`, and `cpu_lowpower` of processors with a third kind of core).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from pathlib import Path

from moebius.host.kernel_files import file_text

_EFFICIENCY_LISTS = ("devices/cpu_atom/cpus", "devices/cpu_lowpower/cpus")
# Of the largest `cpu_capacity`: favoured cores of one kind differ by a few per cent, kinds by a third.
_EFFICIENCY_CAPACITY = 0.75


def physical_cores(
    cpus: Sequence[int], sysfs: Path, parse: Callable[[str], tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """The usable `cpus` of each physical core, in the order in which compute threads take the cores.

    A CPU whose siblings are not known, as in virtual machines that hide them, is a core of its own; so is
    one whose siblings are not usable. Efficiency cores of a hybrid processor are left out where others are
    usable: a layer ends with its slowest thread. Neighbours in the order have different last-level caches,
    so that any first part of it reaches as many of a processor's links to memory as it can.

    `cpus` ascend; `parse` reads the kernel's lists and raises RuntimeError for a malformed one.
    """
    usable = set(cpus)

    def listed(name: str) -> tuple[int, ...]:
        text = file_text(sysfs / name)
        return parse(text) if text else ()

    slow = _efficiency_cpus(cpus, sysfs, usable.intersection(chain(*map(listed, _EFFICIENCY_LISTS))))
    fast = [cpu for cpu in cpus if cpu not in slow] or list(cpus)
    by_cache: dict[str, list[tuple[int, ...]]] = {}
    seen: set[int] = set()
    for cpu in fast:
        if cpu in seen:
            continue
        directory = f"devices/system/cpu/cpu{cpu}"
        siblings = usable.intersection(listed(f"{directory}/topology/thread_siblings_list")) | {cpu}
        seen |= siblings
        cache = file_text(sysfs / directory / "cache/index3/shared_cpu_list")
        by_cache.setdefault(cache, []).append(tuple(sorted(siblings)))
    return tuple(core for turn in zip_longest(*by_cache.values()) for core in turn if core is not None)


def _efficiency_cpus(cpus: Sequence[int], sysfs: Path, listed: set[int]) -> set[int]:
    """Returns those the kernel lists as such, else those of a much smaller capacity than the largest."""
    if listed:
        return listed
    texts = {cpu: file_text(sysfs / f"devices/system/cpu/cpu{cpu}/cpu_capacity") for cpu in cpus}
    capacity = {cpu: int(text) for cpu, text in texts.items() if text.isdecimal()}
    most = max(capacity.values(), default=0)
    return {cpu for cpu, value in capacity.items() if value < _EFFICIENCY_CAPACITY * most}
