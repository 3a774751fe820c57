"""Mixtral: no biases, no dense layers, weights of the chosen experts sum to one."""

from __future__ import annotations

import torch

from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM
from gpu_service.models.gqa import build_gqa_lm
from gpu_service.parallel.context import SOLO, ParallelContext


def build(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, parallel: ParallelContext = SOLO
) -> CausalLM:
    """Compose the family."""
    return build_gqa_lm(
        config,
        qk_norm=False,
        bias=False,
        output_bias=False,
        dtype=dtype,
        device=device,
        parallel=parallel,
    )
