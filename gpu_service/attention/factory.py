"""The attention that a model's cache belongs to: over keys and values of heads, or over latents."""

from __future__ import annotations

import torch

from gpu_service.attention.base import AttentionBackend
from gpu_service.attention.mla.base import MlaAttentionBackend
from gpu_service.attention.mla.registry import make_mla_attention, mla_dimensions
from gpu_service.attention.registry import TryOut
from gpu_service.attention.registry import make_attention as make_gqa_attention
from gpu_service.cache.kv_cache import MlaCache, PagedCache
from gpu_service.model_config import ModelConfig

Attention = AttentionBackend | MlaAttentionBackend


def make_attention(
    config: ModelConfig,
    cache: PagedCache,
    device: torch.device | str,
    name: str = "auto",
    try_out: TryOut | None = None,
) -> Attention:
    """The backend for a rank's own configuration and its cache; the rest is as in `registry`."""
    if isinstance(cache, MlaCache):
        return make_mla_attention(mla_dimensions(config), cache, device, name, try_out)
    return make_gqa_attention(config, cache, device, name, try_out)
