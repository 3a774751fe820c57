"""Qwen3.5-MoE's language model: linear attention, its projections apart."""

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
    return build_hybrid_lm(config, interleaved=False, dtype=dtype, device=device, parallel=parallel)
