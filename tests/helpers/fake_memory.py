"""A device's memory by numbers: what a test says is allocated, and what the driver then has left."""

from __future__ import annotations

from gpu_service.memory.device_memory import DeviceMemory, MemoryUse

GIB = 2**30


class FakeMemory(DeviceMemory):
    """`context` bytes lie outside the allocator; freed tensors stay reserved, as in torch's allocator."""

    def __init__(self, total: int, context: int = 0) -> None:
        self.total = total
        self.context = context
        self.allocated = self.peak = self.reserved = self.asked = 0

    def allocate(self, nbytes: int) -> None:
        """A tensor; asks the device for what is not reserved yet."""
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)
        if self.allocated > self.reserved:
            self.reserved = self.allocated
            self.asked += 1
        assert self.reserved + self.context <= self.total, "out of memory"

    def free(self, nbytes: int) -> None:
        """The end of a tensor."""
        self.allocated -= nbytes

    def use(self) -> MemoryUse:
        free = self.total - self.context - self.reserved
        return MemoryUse(self.total, free, self.allocated, self.peak, self.reserved, self.asked)

    def device_allocations(self) -> int:
        return self.asked

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def release_cache(self) -> None:
        self.reserved = self.allocated
