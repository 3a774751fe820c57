"""How each family's config.json is read. Adding a family is adding a reader to `READERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import structlog

from gpu_service.hf_config.dsa import read_deepseek_v32, read_glm_moe_dsa
from gpu_service.hf_config.gpt_oss import read_gpt_oss
from gpu_service.hf_config.gqa import (
    read_dots1,
    read_ernie4_5_moe,
    read_glm4_moe,
    read_minimax_m2,
    read_mixtral,
    read_olmoe,
    read_qwen2_moe,
    read_qwen3_moe,
)
from gpu_service.hf_config.keys import HfKeys
from gpu_service.hf_config.linear import read_qwen3_5_moe, read_qwen3_next
from gpu_service.hf_config.mla import read_deepseek_v2, read_deepseek_v3, read_glm4_moe_lite
from gpu_service.hf_config.multimodal import read_glm4v_moe, read_kimi_k25, read_qwen3_vl_moe
from gpu_service.hf_config.step3p5 import read_step3p5
from gpu_service.hf_config.vision import read_vision
from gpu_service.loader.tied_head import has_own_head
from gpu_service.model_config import (
    TORCH_DTYPES,
    DTypeName,
    ModelConfig,
    ModelConfigError,
    ModelOverrides,
    RouterConfig,
)
from moebius.checkpoint.gguf.files import companion_directory
from moebius.checkpoint.moe_config import COMPUTED_IN

log = structlog.get_logger(__name__)


READERS: Mapping[str, Callable[[HfKeys], ModelConfig]] = {
    "deepseek_v2": read_deepseek_v2,
    "deepseek_v3": read_deepseek_v3,
    "deepseek_v32": read_deepseek_v32,
    "dots1": read_dots1,
    "ernie4_5_moe": read_ernie4_5_moe,
    "glm4_moe": read_glm4_moe,
    "glm4_moe_lite": read_glm4_moe_lite,
    "glm4v_moe": read_glm4v_moe,
    "glm_moe_dsa": read_glm_moe_dsa,
    "kimi_k2": read_deepseek_v3,
    "kimi_k25": read_kimi_k25,
    "gpt_oss": read_gpt_oss,
    "minimax_m2": read_minimax_m2,
    "mixtral": read_mixtral,
    "olmoe": read_olmoe,
    "qwen2_moe": read_qwen2_moe,
    "qwen3_5_moe": read_qwen3_5_moe,
    "qwen3_5_moe_text": read_qwen3_5_moe,
    "qwen3_moe": read_qwen3_moe,
    "qwen3_next": read_qwen3_next,
    "qwen3_vl_moe": read_qwen3_vl_moe,
    "step3p5": read_step3p5,
}


def _check_router(hf: HfKeys, router: RouterConfig) -> None:
    experts, groups = router.num_experts, router.num_groups
    if experts % groups:
        raise hf.error("n_group", groups, f"a divisor of the number of experts ({experts})")
    if router.top_groups > groups:
        raise hf.error("topk_group", router.top_groups, f"at most n_group ({groups})")
    if router.top_groups < groups and experts // groups < 2:
        raise hf.error("n_group", groups, f"groups of at least 2 of the {experts} experts")
    reachable = experts // groups * router.top_groups
    if not 1 <= router.top_k <= reachable:
        raise hf.error("top_k (num_experts_per_tok)", router.top_k, f"1 to {reachable}")


def _apply_overrides(hf: HfKeys, config: ModelConfig, overrides: ModelOverrides) -> ModelConfig:
    if overrides.top_k is not None:
        router = replace(config.moe.router, top_k=overrides.top_k)
        config = replace(config, moe=replace(config.moe, router=router))
    if overrides.max_model_len is not None:
        if overrides.max_model_len > config.max_model_len:
            raise hf.error("max_model_len", overrides.max_model_len, f"at most {config.max_model_len}")
        config = replace(config, max_model_len=overrides.max_model_len)
    stored: str = config.dtype
    dtype = COMPUTED_IN.get(stored, stored) if overrides.dtype == "auto" else overrides.dtype
    if dtype not in TORCH_DTYPES:
        raise hf.error("dtype", dtype, ", ".join(sorted(TORCH_DTYPES)))
    return replace(config, dtype=cast(DTypeName, dtype))


def _with_own_head(directory: Path, config: ModelConfig) -> ModelConfig:
    """Untied where another head is stored than the embedding, as transformers has it."""
    if not config.tie_word_embeddings:
        return config
    shape = (config.vocab_size, config.hidden_size)
    if not has_own_head(directory, config.model_type, config.num_layers, shape, config.torch_dtype):
        return config
    log.warning("tie_word_embeddings is true, but a head of other values is stored: it is used")
    return replace(config, tie_word_embeddings=False)


def read_model_config(directory: Path, overrides: ModelOverrides) -> ModelConfig:
    """See `ModelConfig.from_dir`."""
    hf = HfKeys.from_checkpoint(directory)
    model_type = hf.string("model_type")
    reader = READERS.get(model_type)
    if reader is None:
        raise hf.error("model_type", model_type, ", ".join(sorted(READERS)))
    config = _apply_overrides(hf, reader(hf), overrides)
    config = replace(config, vision=read_vision(hf, model_type, wanted=not overrides.language_model_only))
    _check_router(hf, config.moe.router)
    config = _with_own_head(directory, config)
    generation = companion_directory(directory) / "generation_config.json"
    if generation.exists():
        extra = HfKeys.from_file(generation).integers("eos_token_id")
        ids = dict.fromkeys((*config.eos_token_ids, *extra))
        config = replace(config, eos_token_ids=tuple(ids))
    if hf.unread:
        log.warning("config.json has keys that are not used", keys=list(hf.unread), model_type=model_type)
    return replace(config, unread_keys=hf.unread)


__all__ = ["READERS", "ModelConfigError", "read_model_config"]
