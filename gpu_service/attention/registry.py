"""Which attention backend a device gets: decided once, at start."""

from __future__ import annotations

import torch

from gpu_service.attention.base import AttentionBackend
from gpu_service.attention.torch_reference import TorchReferenceAttention
from gpu_service.cache.kv_cache import KVCache
from gpu_service.model_config import ModelConfig

# Device type -> backend; a device that is not listed gets the reference, which is plain torch.
ATTENTION_BACKENDS: dict[str, type[AttentionBackend]] = {"cpu": TorchReferenceAttention}


def make_attention(config: ModelConfig, kv_cache: KVCache, device: torch.device | str) -> AttentionBackend:
    """The backend for a device."""
    backend = ATTENTION_BACKENDS.get(torch.device(device).type, TorchReferenceAttention)
    return backend(config, kv_cache)
