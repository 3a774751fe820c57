"""Mixtral: no biases, no dense layers, weights of the chosen experts sum to one."""

from __future__ import annotations

from moebius.checkpoint.gguf.family import ALL_SPARSE_KEYS, GgufFamily, rotated
from moebius.checkpoint.gguf.names import PAIRED_RULES
from moebius.models.common import read_common, read_one_window, refuse_bias
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.router import RouterConfig
from moebius.models.names import MINIMAX_GATE, ROTARY, TensorNames
from moebius.models.rope import read_rope


def read_mixtral(hf: HfKeys) -> ModelConfig:
    """Reads Mixtral: every layer is MoE, and `intermediate_size` is an expert's."""
    common = read_common(hf)
    refuse_bias(hf, common)
    hf.skip("router_jitter_noise")  # of training
    router = RouterConfig(
        num_experts=hf.integer("num_local_experts", "num_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="softmax",
        post="renormalize",
    )
    attention = common.gqa(read_rope(hf, common.head_dim, default_theta=1e6), sight=read_one_window(hf))
    return common.model(attention, common.moe(router, common.intermediate_size))


FAMILIES = (
    Family(
        "mixtral",
        read_mixtral,
        TensorNames((ROTARY, MINIMAX_GATE), ("per_expert_w123",)),
        gguf=(
            GgufFamily(
                "llama",
                ALL_SPARSE_KEYS,
                1,
                derive=rotated,
                rules=PAIRED_RULES,
            ),
        ),
    ),
)
