"""Qwen1.5-MoE and Qwen2-57B-A14B: biases before attention, shared experts behind a gate."""

from __future__ import annotations

import torch

from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM
from gpu_service.models.gqa import build_gqa_lm
from gpu_service.parallel.context import SOLO, ParallelContext


def build(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, parallel: ParallelContext = SOLO
) -> CausalLM:
    """Compose the family; a bias never covers the output projection."""
    return build_gqa_lm(
        config,
        qk_norm=False,
        bias=config.attention_bias,
        output_bias=False,
        dtype=dtype,
        device=device,
        parallel=parallel,
    )
