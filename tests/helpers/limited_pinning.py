"""A driver with a limit to the bytes that it page-locks."""

from __future__ import annotations

from gpu_service.device.pinned import Registrar


class Limited(Registrar):
    """Refuses what would be more than `limit` bytes together."""

    def __init__(self, limit: int) -> None:
        self.limit, self.locked, self.refused = limit, dict[int, int](), 0

    def register(self, address: int, nbytes: int) -> str:
        assert address not in self.locked
        if sum(self.locked.values()) + nbytes > self.limit:
            self.refused += 1
            return "out of memory"
        self.locked[address] = nbytes
        return ""

    def unregister(self, address: int) -> None:
        del self.locked[address]
