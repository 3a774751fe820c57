"""The load of the engine, as its scheduler knows it."""

from __future__ import annotations

from gpu_service.core.interface import EngineLoad
from gpu_service.scheduler.scheduler import Scheduler


def load_of(scheduler: Scheduler) -> EngineLoad:
    """Of now; called by the engine thread."""
    cache, speculation = scheduler.cache, scheduler.speculation
    evictable = cache.tree.evictable_pages
    return EngineLoad(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        used_pages=cache.pool.usable - cache.pool.available - evictable,
        cached_pages=evictable,
        usable_pages=cache.pool.num_pages - 1,
        num_preemptions=scheduler.num_preemptions,
        query_tokens=cache.query_tokens,
        hit_tokens=cache.hit_tokens,
        **({} if speculation is None else speculation.counts),
    )
