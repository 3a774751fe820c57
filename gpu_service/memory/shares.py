"""Who has the device memory that KV pages and experts take, at one moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpu_service.telemetry.figures import Figure


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Bytes of one rank; filled by `Built.memory_shares`."""

    kv: int  # KV pages that have memory.
    experts: int  # Slots of resident experts.
    stream: int  # The ring that streamed experts pass through.
    fetch: int  # Slots of experts that decode steps fetch.
    free: int  # Shared by pages and experts, and used by neither now.
    is_shared: bool  # Whether pages and experts lend each other memory.


def share_figures(shares: Callable[[], MemoryShares]) -> Callable[[], list[Figure]]:
    """Returns what Prometheus is given at a scrape."""

    def figures() -> list[Figure]:
        now = shares()
        parts = {
            "kv": now.kv,
            "experts": now.experts,
            "stream": now.stream,
            "fetch": now.fetch,
            "free": now.free,
        }
        text = "Device memory of KV pages and experts, by who has it now"
        return [Figure("gpu_pool_bytes", text, parts, is_counter=False, by="part")]

    return figures
