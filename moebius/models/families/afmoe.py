"""AFMoE (Arcee Trinity): windows with rotation, whole contexts without, gated attention, four norms a layer.

Sources: the published config.json and, for the function that its keys ask for, transformers 5.23
(AfmoeConfig).
"""

from __future__ import annotations

from moebius.checkpoint.gguf.family import SPARSE_KEYS, GgufFamily, always_normed
from moebius.checkpoint.gguf.names import gguf_linear
from moebius.models.common import every_nth_full, read_common, read_windows, refuse_bias, sliding_rotated
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import Gate, QkNorm
from moebius.models.layers.residual import Sequential
from moebius.models.layers.router import RouterConfig
from moebius.models.names import ROTARY, TensorNames, rename
from moebius.models.rope import read_rope

_LAYER = "model.layers.*."


def _read_router(hf: HfKeys) -> RouterConfig:
    """Reads the router: sigmoid scores with a bias; more than one group is refused."""
    for name in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        hf.refuse(name, 1)
    hf.refuse("score_func", "sigmoid")
    if not hf.boolean("route_norm", default=True):
        raise hf.error("route_norm", False, "true")
    return RouterConfig(
        num_experts=hf.integer("num_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="sigmoid",
        correction_bias=True,
        post="renormalize",
        renormalize_epsilon=1e-20,
        scale=hf.number("route_scale", default=1.0),
    )


def read_afmoe(hf: HfKeys) -> ModelConfig:
    """Layers that see the whole context are not rotated; muP multiplies embeddings by sqrt(size)."""
    hf.skip("load_balance_coeff", "use_grouped_mm")
    common = read_common(hf)
    refuse_bias(hf, common)
    num_layers = common.num_layers
    period = hf.integer("global_attn_every_n_layers", default=4)
    kinds = list(hf.strings("layer_types")) or every_nth_full(num_layers, period)
    windows = read_windows(hf.with_values(layer_types=kinds), num_layers)
    rope = read_rope(hf, common.head_dim)
    size = hf.integer("moe_intermediate_size")
    shared = hf.integer("num_shared_experts", default=2, minimum=0) * size
    layers = frozenset(range(hf.integer("num_dense_layers", default=1, minimum=0), num_layers))
    scale = common.hidden_size**0.5 if hf.boolean("mup_enabled", default=False) else 1.0
    attention = common.gqa(rope, qk_norm=QkNorm(common.norm), gate=Gate("element"))
    return common.model(
        sliding_rotated(attention, windows, kinds),
        common.ffns(common.moe(_read_router(hf), size, shared), layers),
        residuals=Sequential(normed_output="both"),
        embedding_scale=scale,
    )


FAMILIES = (
    Family(
        "afmoe",
        read_afmoe,
        TensorNames(
            (
                ROTARY,
                rename(_LAYER + "self_attn.gate_proj.**", _LAYER + "self_attn.g_proj.**"),
                rename(_LAYER + "post_attention_layernorm.**", _LAYER + "post_self_attn_layernorm.**"),
                rename(_LAYER + "pre_mlp_layernorm.**", _LAYER + "post_attention_layernorm.**"),
                rename(_LAYER + "mlp.router.gate.**", _LAYER + "mlp.gate.**"),
                rename(_LAYER + "mlp.expert_bias", _LAYER + "mlp.gate.e_score_correction_bias"),
            )
        ),
        gguf=(
            GgufFamily(
                "afmoe",
                SPARSE_KEYS
                | {
                    "expert_shared_count": "num_shared_experts",
                    "expert_weights_scale": "route_scale",
                    "leading_dense_block_count": "num_dense_layers",
                },
                2,
                # llama.cpp multiplies embeddings and sees the whole context in every fourth layer, always.
                {"mup_enabled": True, "global_attn_every_n_layers": 4},
                always_normed,
                rules=(
                    *gguf_linear("attn_gate", "self_attn.gate_proj"),
                    *gguf_linear("ffn_norm", "pre_mlp_layernorm"),
                    *gguf_linear("post_ffw_norm", "post_mlp_layernorm"),
                ),
            ),
        ),
    ),
)
