"""From `model_type` to the function that composes it."""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_service.model_config import ModelConfig, ModelConfigError
from gpu_service.models import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    dots1,
    ernie4_5_moe,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    step3p5,
)
from gpu_service.models.common import CausalLM
from gpu_service.parallel.context import SOLO, ParallelContext
from gpu_service.parallel.partition import check_divisible


class ModelBuilder(Protocol):
    """What a family file provides as `build`."""

    def __call__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelContext = SOLO,
    ) -> CausalLM: ...


MODEL_BUILDERS: dict[str, ModelBuilder] = {
    "deepseek_v2": deepseek_v2.build,
    "deepseek_v3": deepseek_v3.build,
    "deepseek_v32": deepseek_v32.build,
    "dots1": dots1.build,
    "ernie4_5_moe": ernie4_5_moe.build,
    "glm4_moe": glm4_moe.build,
    "glm4_moe_lite": glm4_moe_lite.build,
    "glm4v_moe": glm4_moe.build,
    "glm_moe_dsa": deepseek_v32.build,
    "gpt_oss": gpt_oss.build,
    "kimi_k2": deepseek_v3.build,
    "kimi_k25": deepseek_v3.build,
    "minimax_m2": minimax_m2.build,
    "mixtral": mixtral.build,
    "olmoe": olmoe.build,
    "qwen2_moe": qwen2_moe.build,
    "qwen3_5_moe": qwen3_5_moe.build,
    "qwen3_5_moe_text": qwen3_5_moe.build,
    "qwen3_moe": qwen3_moe.build,
    "qwen3_vl_moe": qwen3_moe.build,
    "qwen3_next": qwen3_next.build,
    "step3p5": step3p5.build,
}


def build_model(
    config: ModelConfig,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    parallel: ParallelContext = SOLO,
) -> CausalLM:
    """Compose the model, or a rank's part of it, on the meta device; `load_weights` puts it on `device`.

    `dtype` is that of weights and activations, by default the config's. Raises ModelConfigError for a
    `model_type` without a builder, ConfigError for a model that can not be divided over so many ranks.
    """
    check_divisible(config, parallel)
    builder = MODEL_BUILDERS.get(config.model_type)
    if builder is None:
        known = ", ".join(sorted(MODEL_BUILDERS))
        raise ModelConfigError(f"model_type {config.model_type!r} is not supported; known: {known}")
    model = builder(config, dtype=dtype or config.torch_dtype, device=torch.device(device), parallel=parallel)
    return model.eval()
