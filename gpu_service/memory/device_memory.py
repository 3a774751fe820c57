"""What a device says of its memory; the one place that asks torch for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from gpu_service.device.virtual_memory import pooled_bytes

# torch leaves these untyped.
_cuda: Any = torch.cuda


def gib(nbytes: int) -> str:
    """Returns bytes as GiB with two decimals, for messages and tables."""
    return f"{nbytes / 2**30:.2f}"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A snapshot, in bytes; filled by `DeviceMemory.use`."""

    # Of the whole device, and what no process holds.
    total: int
    free: int
    # Of this process: in living tensors and in pools of chunks, and the most there was since `reset_peak`.
    allocated: int
    peak: int
    reserved: int  # Held by torch's allocator for tensors, living or to come, and by pools of chunks.
    device_allocations: int  # Times the allocator asked the driver for memory since the start.

    @property
    def outside(self) -> int:
        """Held outside torch's allocator: CUDA context, modules, libraries, and other processes."""
        return self.total - self.free - self.reserved


class DeviceMemory(ABC):
    """The memory of one device."""

    @abstractmethod
    def use(self) -> MemoryUse:
        """Returns what is used now. Waits for what was launched."""

    @abstractmethod
    def device_allocations(self) -> int:
        """Returns the allocations as in `use`, from any thread, without waiting for the device."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Makes `peak` count from now on."""

    @abstractmethod
    def release_cache(self) -> None:
        """Gives reserved memory that no tensor lives in back to the device."""


class CudaMemory(DeviceMemory):
    """The memory of a CUDA device, by the driver and torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def use(self) -> MemoryUse:
        torch.cuda.synchronize(self._device)
        free, total = _cuda.mem_get_info(self._device)
        statistics = _cuda.memory_stats(self._device)
        pooled = pooled_bytes(self._device)
        return MemoryUse(
            total=int(total),
            free=int(free),
            allocated=pooled + int(statistics.get("allocated_bytes.all.current", 0)),
            peak=pooled + int(statistics.get("allocated_bytes.all.peak", 0)),
            reserved=pooled + int(statistics.get("reserved_bytes.all.current", 0)),
            device_allocations=self.device_allocations(),
        )

    def device_allocations(self) -> int:
        return int(_cuda.memory_stats(self._device).get("num_device_alloc", 0))

    def reset_peak(self) -> None:
        _cuda.reset_peak_memory_stats(self._device)

    def release_cache(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def make_device_memory(device: torch.device) -> DeviceMemory | None:
    """Returns the memory of a GPU; None for a CPU, whose memory is shared with the expert servers."""
    return CudaMemory(device) if device.type == "cuda" else None
