"""Qwen3-Next and Qwen3-Coder-Next: linear attention, its projections mixed by key head."""

from __future__ import annotations

import torch

from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM
from gpu_service.models.hybrid import build_hybrid_lm
from gpu_service.parallel.context import SOLO, ParallelContext


def build(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, parallel: ParallelContext = SOLO
) -> CausalLM:
    """Compose the family."""
    return build_hybrid_lm(config, interleaved=True, dtype=dtype, device=device, parallel=parallel)
