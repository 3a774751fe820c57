"""Flint (RecursiveSI): Qwen3-MoE with sinks, windows with rotation, whole contexts without, a sigmoid
router, and shared experts that are added as they are.

Sources: configuration class, model and checkpoint conversion of transformers 5.23.
"""

from __future__ import annotations

from moebius.models.common import (
    FULL,
    SLIDING,
    read_common,
    read_sparse_layers,
    read_windows,
    sliding_rotated,
)
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import QkNorm
from moebius.models.layers.router import RouterConfig
from moebius.models.names import ROTARY, SHARED, TensorNames, rename
from moebius.models.rope import read_rope


def _layer_types(hf: HfKeys, num_layers: int) -> list[str]:
    """Returns the list; without one the first two layers, every fourth and the last see the whole context."""
    sees_all = (layer < 2 or layer % 4 == 1 or layer == num_layers - 1 for layer in range(num_layers))
    return list(hf.strings("layer_types")) or [FULL if whole else SLIDING for whole in sees_all]


def read_flint(hf: HfKeys) -> ModelConfig:
    """Layers that see the whole context are not rotated; the first two are dense unless a list says more."""
    common = read_common(hf)
    num_layers = common.num_layers
    kinds = _layer_types(hf, num_layers)
    window = hf.integer("sliding_window", default=513)
    windows = read_windows(hf.with_values(layer_types=kinds, sliding_window=window), num_layers)
    rope = read_rope(hf, common.head_dim)
    dense = list(hf.integers("mlp_only_layers")) if hf.has("mlp_only_layers") else [0, 1]
    router = RouterConfig(
        num_experts=hf.integer("num_experts", "num_local_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="sigmoid",
        post="renormalize" if hf.boolean("norm_topk_prob", default=True) else "none",
        float32_gate=True,
    )
    shared = hf.integer("shared_expert_intermediate_size", default=1024)
    layers = read_sparse_layers(hf.with_values(mlp_only_layers=dense), num_layers)
    attention = common.gqa(
        rope, qk_norm=QkNorm(common.norm), output_bias=common.attention_bias, has_sinks=True
    )
    moe = common.moe(router, hf.integer("moe_intermediate_size"), shared)
    return common.model(sliding_rotated(attention, windows, kinds), common.ffns(moe, layers))


_SINKS = rename("model.layers.*.self_attn.softmax_offset", "model.layers.*.self_attn.sinks")
FAMILIES = (Family("flint", read_flint, TensorNames((ROTARY, SHARED, _SINKS))),)
