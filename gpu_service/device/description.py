"""What of a device decides which kernels run on it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_DRIVER = Path("/proc/driver/nvidia/version")


def describe_device(device: torch.device) -> str:
    """Returns a text that changes with the GPU, its driver or the libraries of torch's build; of a CPU, its
    type.
    """
    if device.type != "cuda":
        return device.type
    found: Any = torch.cuda.get_device_properties(device)
    facts = [found.name, f"{found.major}.{found.minor}", found.total_memory, torch.version.cuda]
    with suppress(OSError):  # a container without it: the driver is its host's, which runs all the same
        facts.append(_DRIVER.read_text(encoding="utf-8").strip())
    return ", ".join(map(str, facts))
