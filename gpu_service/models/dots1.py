"""dots.llm1: GLM's router, but queries and keys always normed per head and rotated whole."""

from __future__ import annotations

import torch

from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM
from gpu_service.models.gqa import build_gqa_lm
from gpu_service.parallel.context import SOLO, ParallelContext


def build(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, parallel: ParallelContext = SOLO
) -> CausalLM:
    """Compose the family; an attention bias covers the output projection too."""
    return build_gqa_lm(
        config,
        qk_norm=True,
        bias=config.attention_bias,
        output_bias=config.attention_bias,
        dtype=dtype,
        device=device,
        parallel=parallel,
    )
