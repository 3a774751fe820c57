"""MiniMax-M2: queries and keys normed over all heads together, half of each head rotated."""

from __future__ import annotations

import torch

from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM
from gpu_service.models.gqa import build_gqa_lm
from gpu_service.parallel.context import SOLO, ParallelContext


def build(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, parallel: ParallelContext = SOLO
) -> CausalLM:
    """Compose the family, which has no biases."""
    return build_gqa_lm(
        config,
        qk_norm=True,
        bias=False,
        output_bias=False,
        full_width_norm=True,
        dtype=dtype,
        device=device,
        parallel=parallel,
    )
