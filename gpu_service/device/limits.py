"""What one GPU gives a kernel: the one place that tiles and number formats are chosen by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Filled by `device_limits`; a key of what was found to fit on such a device."""

    architecture: int  # Compute capability without its point: 86 is 8.6.
    # Bytes of shared memory that one program may have.
    shared_bytes: int
    num_sms: int

    @property
    def has_fp8(self) -> bool:
        """Returns whether kernels may name 8-bit floats; without them, they decode the bits of bytes."""
        return self.architecture >= 89

    @property
    def kernels_overlap(self) -> bool:
        """Returns whether a kernel may begin before the last one ends (programmatic dependent launch)."""
        return self.architecture >= 90

    @property
    def multiplies_from_shared_memory(self) -> bool:
        """Returns whether tensor cores read operands from there (wgmma, tcgen05), not from
        registers (mma).
        """
        return 90 <= self.architecture < 120


# Where there is no GPU (Triton's interpreter, and its compiler in tests): an H200.
WITHOUT_GPU = DeviceLimits(90, 227 * 1024, 132)


def device_limits(device: torch.device) -> DeviceLimits:
    """Returns the limits of a CUDA device; `WITHOUT_GPU` for any other."""
    if device.type != "cuda":
        return WITHOUT_GPU
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _of_gpu(index: int) -> DeviceLimits:
    # torch leaves one of its fields out of its types.
    properties: Any = torch.cuda.get_device_properties(index)
    return DeviceLimits(
        10 * properties.major + properties.minor,
        properties.shared_memory_per_block_optin,
        properties.multi_processor_count,
    )
