"""Room for the states of linear attention, and the books on it."""

from __future__ import annotations

import torch

from gpu_service.cache.page_pool import PagePool
from gpu_service.cache.radix_cache import RadixCache
from gpu_service.cache.request_cache import RequestCache
from gpu_service.cache.request_states import RequestStates, num_snapshots, num_state_slots
from gpu_service.cache.state_cache import StateCache, make_states
from gpu_service.cache.state_pool import StatePool
from gpu_service.model_config import ModelConfig
from moebius.config import GpuConfig


def allocate_states(gpu: GpuConfig, rank_config: ModelConfig, device: torch.device) -> StateCache | None:
    """All slots that the settings ask for; None where no layer has a state."""
    return make_states(rank_config, num_state_slots(gpu), rank_config.torch_dtype, device)


def make_request_cache(gpu: GpuConfig, states: StateCache | None, num_pages: int) -> RequestCache:
    """The books on pages, prefixes and, where there are some, states."""
    pool = PagePool(num_pages)
    if states is None:
        return RequestCache(pool, RadixCache(gpu.page_size), gpu.prefix_caching)
    held = RequestStates(StatePool(states.num_slots), num_snapshots(gpu))
    return RequestCache(pool, RadixCache(gpu.page_size, held.forget), gpu.prefix_caching, held)
