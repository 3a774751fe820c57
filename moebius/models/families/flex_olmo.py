"""FlexOlmo (AI2): OLMo 2's layers, which norm what they add and not what they read, with a softmax router.

Sources: configuration class and model of transformers 5.23.
"""

from __future__ import annotations

from moebius.models.common import read_common, read_softmax_router
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import FullWidthQkNorm
from moebius.models.layers.residual import Sequential
from moebius.models.names import ROTARY, TensorNames, rename
from moebius.models.rope import read_rope


def read_flex_olmo(hf: HfKeys) -> ModelConfig:
    """Every layer is MoE, `intermediate_size` is an expert's, queries and keys are normed over all heads."""
    common = read_common(hf)
    hf.refuse("clip_qkv")
    hf.refuse("sliding_window")
    attention = common.gqa(
        read_rope(hf, common.head_dim, default_theta=500000.0),
        qk_norm=FullWidthQkNorm(common.eps),
        output_bias=common.attention_bias,
    )
    moe = common.moe(read_softmax_router(hf), common.intermediate_size)
    return common.model(attention, moe, residuals=Sequential(normed_input=False, normed_output="both"))


_LAYER = "model.layers.*."
FAMILIES = (
    Family(
        "flex_olmo",
        read_flex_olmo,
        TensorNames(
            (
                ROTARY,
                rename(_LAYER + "post_attention_layernorm.**", _LAYER + "post_self_attn_layernorm.**"),
                rename(_LAYER + "post_feedforward_layernorm.**", _LAYER + "post_mlp_layernorm.**"),
            )
        ),
    ),
)
