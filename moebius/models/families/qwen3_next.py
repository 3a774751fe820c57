"""Qwen3-Next and Qwen3-Coder-Next: linear attention with one input projection for all, gated attention."""

from __future__ import annotations

from moebius.checkpoint.gguf.family import GgufFamily
from moebius.checkpoint.gguf.names import CENTERED_NORM_RULES, gguf_layer, gguf_linear
from moebius.models.common import read_common, read_mtp_layers, read_softmax_router, read_sparse_layers
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.linear import (
    LINEAR_KEYS,
    MTP_KEYS,
    PARTIAL_FACTOR,
    gguf_linear_attention,
    read_gated_moe,
    read_linear_attention,
)
from moebius.models.names import MTP, ROTARY, SHARED, TensorNames
from moebius.models.rope import read_rope


def read_qwen3_next(hf: HfKeys) -> ModelConfig:
    """Qwen3-Next and Qwen3-Coder-Next."""
    common = read_common(hf)
    router = read_softmax_router(hf, renormalizes=True)
    layers = read_sparse_layers(hf, common["num_layers"])
    return ModelConfig(
        **common,
        model_type="qwen3_next",
        rope=read_rope(hf, common["head_dim"], default_partial_factor=PARTIAL_FACTOR),
        moe=read_gated_moe(hf, router, layers),
        qk_norm=True,
        output_gate=True,
        output_bias=common["attention_bias"],
        one_plus_weight_norms=True,
        linear=read_linear_attention(hf, common["num_layers"], interleaved=True),
        num_mtp_layers=read_mtp_layers(hf, *MTP_KEYS),
    )


_RULES = (
    *CENTERED_NORM_RULES,
    gguf_layer("attn_qkv.weight", "linear_attn.in_proj_qkvz.weight", "mixed_part"),
    gguf_layer("attn_gate.weight", "linear_attn.in_proj_qkvz.weight", "gate_part"),
    # Early files have both in one, as published.
    *gguf_linear("ssm_in", "linear_attn.in_proj_qkvz"),
    *gguf_linear("ssm_ba", "linear_attn.in_proj_ba"),
    gguf_layer("ssm_a", "linear_attn.A_log", "decay"),
    gguf_layer("ssm_dt.bias", "linear_attn.dt_bias"),
    gguf_layer("ssm_conv1d.weight", "linear_attn.conv1d.weight", "taps"),
    *gguf_linear("ssm_out", "linear_attn.out_proj"),
)


FAMILIES = (
    Family(
        "qwen3_next",
        read_qwen3_next,
        # In GGUF files multi-token prediction follows as one more layer.
        TensorNames((ROTARY, MTP, SHARED), mtp_layers=True),
        gguf=(
            GgufFamily(
                "qwen3next", LINEAR_KEYS, 1, {"norm_topk_prob": True}, gguf_linear_attention, rules=_RULES
            ),
        ),
    ),
)
