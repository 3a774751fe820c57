"""On what, when and how something was measured: a figure without these says little."""

from __future__ import annotations

import datetime
import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebius.kernel_times import cpu_name
from moebius.topology import Topology

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "triton", "flashinfer-python")


def facts(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """For the JSON files of benches on an engine."""
    import torch

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "command": ["moebius", *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(cpuinfo),
        "cpus": len(Topology.detect().usable_cpus()),
        "gpu": gpu,
        "gpus": torch.cuda.device_count() if gpu else 0,
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    """None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
