"""Which cache a model has: keys and values of heads, or latents."""

from __future__ import annotations

import torch

from gpu_service.cache.kv_cache import KVCache, bytes_per_page
from gpu_service.cache.mla_cache import MlaCache, mla_bytes_per_page
from gpu_service.model_config import ModelConfig

PagedCache = KVCache | MlaCache


def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes one page takes over all layers; `dtype` is what pages hold."""
    if config.mla is None:
        return bytes_per_page(config, page_size, dtype)
    mla = config.mla
    return mla_bytes_per_page(config.num_layers, mla.kv_lora_rank, mla.qk_rope_head_dim, page_size, dtype)


def make_cache(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    storage_dtype: torch.dtype | None = None,
) -> PagedCache:
    """The cache of a rank whose own configuration is `config`; the rest is as in the classes."""
    if config.mla is None:
        return KVCache(config, num_pages, page_size, dtype, device, storage_dtype=storage_dtype)
    return MlaCache(
        config.num_layers,
        config.mla.kv_lora_rank,
        config.mla.qk_rope_head_dim,
        num_pages,
        page_size,
        dtype,
        device,
        storage_dtype,
    )
