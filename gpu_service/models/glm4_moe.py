"""GLM-4.5 to 4.7: partial rotary, sigmoid router with correction bias, dense first layers, shared experts."""

from __future__ import annotations

import torch

from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM
from gpu_service.models.gqa import build_gqa_lm
from gpu_service.parallel.context import SOLO, ParallelContext


def build(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, parallel: ParallelContext = SOLO
) -> CausalLM:
    """Compose the family; an attention bias never covers the output projection."""
    return build_gqa_lm(
        config,
        qk_norm=config.qk_norm,
        bias=config.attention_bias,
        output_bias=False,
        dtype=dtype,
        device=device,
        parallel=parallel,
    )
