"""FlexOlmo (AI2): OLMo 2's layers, which norm what they add and not what they read, with a softmax router.

Sources: configuration class and model of transformers 5.23.
"""

from __future__ import annotations

from moebius.models.common import read_common, read_softmax_router
from moebius.models.config import ModelConfig, MoeConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.names import ROTARY, TensorNames, rename
from moebius.models.rope import read_rope


def read_flex_olmo(hf: HfKeys) -> ModelConfig:
    """Every layer is MoE, `intermediate_size` is an expert's, queries and keys are normed over all heads."""
    common = read_common(hf)
    hf.refuse("clip_qkv")
    hf.refuse("sliding_window")
    every = frozenset(range(common["num_layers"]))
    return ModelConfig(
        **common,
        model_type="flex_olmo",
        rope=read_rope(hf, common["head_dim"], default_theta=500000.0),
        moe=MoeConfig(read_softmax_router(hf), common["intermediate_size"], 0, every),
        qk_norm=True,
        qk_norm_full_width=True,
        output_bias=common["attention_bias"],
        input_norms=False,
        output_norms=True,
    )


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
