"""Which cache a model has: keys and values of heads, or latents."""

from __future__ import annotations

import torch

from gpu_service.cache.index_keys import index_bytes_per_page
from gpu_service.cache.kv_cache import KVCache, bytes_per_page
from gpu_service.cache.mla_cache import MlaCache, mla_bytes_per_page
from gpu_service.model_config import ModelConfig

PagedCache = KVCache | MlaCache


def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes one page takes over all layers; `dtype` is what pages hold of latents, keys and values."""
    if config.mla is None:
        return bytes_per_page(config, page_size, dtype)
    mla, indexer = config.mla, config.mla.indexer
    latents = mla_bytes_per_page(config.num_layers, mla.kv_lora_rank, mla.qk_rope_head_dim, page_size, dtype)
    if indexer is None:
        return latents
    activations = config.torch_dtype
    return latents + index_bytes_per_page(len(indexer.layers), indexer.head_dim, page_size, activations)


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
    indexer = config.mla.indexer
    return MlaCache(
        config.num_layers,
        config.mla.kv_lora_rank,
        config.mla.qk_rope_head_dim,
        num_pages,
        page_size,
        dtype,
        device,
        storage_dtype,
        index_layers=len(indexer.layers) if indexer else 0,
        index_dim=indexer.head_dim if indexer else 0,
    )
