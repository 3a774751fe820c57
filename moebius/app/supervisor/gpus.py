"""Which GPUs this machine has, without a driver library: what the kernel's files say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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
