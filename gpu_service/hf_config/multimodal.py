"""Readers of the text towers of multimodal families, whose config.json has their keys in `text_config`.

The keys arrive as if they stood in the top level (`moebius.checkpoint.text_config`).
"""

from __future__ import annotations

from dataclasses import replace

from gpu_service.hf_config.gqa import read_glm4_moe, read_qwen3_moe
from gpu_service.hf_config.keys import HfKeys
from gpu_service.hf_config.mla import read_deepseek_v3
from gpu_service.hf_config.rope import SectionDefaults
from gpu_service.model_config import ModelConfig

_QWEN_SECTIONS = SectionDefaults((24, 20, 20), interleaved=True)
_GLM_SECTIONS = SectionDefaults((8, 12, 12), interleaved=False)


def read_qwen3_vl_moe(hf: HfKeys) -> ModelConfig:
    """Qwen3-VL-MoE: Qwen3-MoE that renormalises whatever `norm_topk_prob` says, and alternating mRoPE."""
    config = read_qwen3_moe(hf, default_theta=500000.0, mrope=_QWEN_SECTIONS)
    router = replace(config.moe.router, post="renormalize")
    return replace(config, moe=replace(config.moe, router=router))


def read_glm4v_moe(hf: HfKeys) -> ModelConfig:
    """GLM-4.5V and 4.6V: GLM-4.5 without norms of queries and keys, and mRoPE in consecutive sections."""
    config = read_glm4_moe(hf, mrope=_GLM_SECTIONS)
    if config.qk_norm:
        raise hf.error("use_qk_norm", True, "false")
    return replace(config, attention_bias=hf.boolean("attention_bias", default=True))


def read_kimi_k25(hf: HfKeys) -> ModelConfig:
    """Kimi-K2.5: DeepSeek-V3, as Kimi-K2; images take one position each token as text does."""
    config = read_deepseek_v3(hf)
    # The family's class, unlike its checkpoints, takes the embedding for the head where nobody says so.
    return replace(config, tie_word_embeddings=hf.boolean("tie_word_embeddings", default=True))
