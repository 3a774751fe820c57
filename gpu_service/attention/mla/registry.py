"""Which backend of latent attention a device gets, by the same setting and rules as `attention.registry`."""

from __future__ import annotations

import torch

from gpu_service.attention.mla.base import IndexDimensions, MlaAttentionBackend, MlaDimensions
from gpu_service.attention.registry import ATTENTION_BACKENDS, BackendEntry, TryOut, choose_backend
from gpu_service.cache.kv_cache import MlaCache
from gpu_service.model_config import ModelConfig


def _entry(name: str, module: str, class_name: str) -> BackendEntry:
    """The same package is needed as for grouped-query attention."""
    base = ATTENTION_BACKENDS[name]
    path = f"gpu_service.attention.mla.{module}"
    return BackendEntry(path, class_name, base.package, base.install, base.needs_cuda, base.cost)


MLA_BACKENDS: dict[str, BackendEntry] = {
    "flashinfer": _entry("flashinfer", "flashinfer_backend", "FlashInferMlaAttention"),
    "triton": _entry("triton", "triton_backend", "TritonMlaAttention"),
    "torch": _entry("torch", "torch_reference", "TorchMlaAttention"),
}


def mla_dimensions(config: ModelConfig) -> MlaDimensions:
    """Of a rank's own configuration. Raises ValueError for a model without latents."""
    mla = config.mla
    if mla is None:
        raise ValueError(f"{config.model_type} has no latent attention")
    indexer = mla.indexer
    return MlaDimensions(
        num_heads=config.num_heads,
        latent_dim=mla.kv_lora_rank,
        nope_dim=mla.qk_nope_head_dim,
        rope_dim=mla.qk_rope_head_dim,
        value_dim=mla.v_head_dim,
        softmax_scale=mla.softmax_scale,
        index=IndexDimensions(indexer.num_heads, indexer.head_dim, indexer.top_k) if indexer else None,
    )


def make_mla_attention(
    dimensions: MlaDimensions,
    cache: MlaCache,
    device: torch.device | str,
    name: str = "auto",
    try_out: TryOut | None = None,
) -> MlaAttentionBackend:
    """As `attention.registry.make_attention`."""
    chosen: MlaAttentionBackend = choose_backend(
        MLA_BACKENDS, dimensions, cache, torch.device(device), name, try_out
    )
    return chosen
