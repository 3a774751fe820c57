"""Cohere's mixtures of experts (North Mini Code, 30B-A3B): attention and experts side by side, windows with
rotation, whole contexts without.

Sources: configuration class and model of transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import Config, GgufFamily, sliding_layers
from moebius.models.common import FULL, SLIDING, Common, read_common, read_mtp_layers, read_windows, sliding
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.ffn import MoE
from moebius.models.layers.norms import LayerNorm
from moebius.models.layers.residual import Parallel
from moebius.models.layers.router import RouterConfig, RouterPost
from moebius.models.names import ROTARY, TensorNames
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    # Few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

# Of other programs: how weights lie and are shared, and what the model was made from.
_HARMLESS = ("cache_implementation", "layer_switch", "model_max_length", "order_of_interleaved_layers")


def _layer_types(hf: HfKeys, num_layers: int, num_dense: int) -> list[str]:
    """Returns `layer_types`; by default every n-th layer sees all; the first dense ones have their own n."""
    before = hf.integer("prefix_dense_sliding_window_pattern", default=1)
    after = hf.integer("sliding_window_pattern", "_sliding_window_pattern", default=4)
    places = [(layer, before) for layer in range(num_dense)]
    places += [(layer, after) for layer in range(num_layers - num_dense)]
    derived = [SLIDING if (place + 1) % every else FULL for place, every in places]
    return list(hf.strings("layer_types")) or derived


def _moe_layers(hf: HfKeys, num_layers: int, num_dense: int) -> frozenset[int]:
    """Returns the MoE layers as listed, or all but the first."""
    kinds = hf.strings("mlp_layer_types") or ("dense",) * num_dense + ("sparse",) * (num_layers - num_dense)
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise hf.error("mlp_layer_types", list(kinds), f"{num_layers} of 'dense' and 'sparse'")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def _read_router(hf: HfKeys) -> RouterConfig:
    """The best logits; what weighs them is a softmax over those, or the sigmoid of each."""
    function = hf.string("expert_selection_fn", default="softmax")
    norms = hf.boolean("norm_topk_prob", default=True)
    posts: dict[str, RouterPost] = {
        "softmax": "softmax",
        "sigmoid": "sigmoid_renormalize" if norms else "sigmoid",
    }
    if function not in posts:
        raise hf.error("expert_selection_fn", function, ", ".join(posts))
    return RouterConfig(
        num_experts=hf.integer("num_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="none",
        post=posts[function],
    )


def _read_moe(hf: HfKeys, common: Common, size: int) -> MoE:
    shared = hf.integer("num_shared_experts", default=0, minimum=0)
    combined = hf.string("shared_expert_combination_strategy", default="average")
    if combined not in ("average", "sum"):
        raise hf.error("shared_expert_combination_strategy", combined, "average, sum")
    scale = 0.5 if shared and combined == "average" else 1.0
    return common.moe(_read_router(hf), size, shared * size, output_scale=scale)


def read_cohere2_moe(hf: HfKeys) -> ModelConfig:
    """Experts are as wide as `intermediate_size` says; norms take off the mean without an `rms_norm_eps`."""
    hf.skip(*_HARMLESS)
    hf.skip("layer_norm_eps")  # of norms that take off the mean
    hf.refuse("use_qk_norm")
    hf.refuse("layer_norm_bias")
    for name in ("use_parallel_block", "use_gated_activation"):
        if not hf.boolean(name, default=True):
            raise hf.error(name, False, "true")
    hf.refuse("rotary_pct", 1, 1.0)
    hf.refuse("position_embedding_type", "rope_gptj")
    tied = hf.boolean("tie_word_embeddings", "use_embedding_sharing", default=True)
    removes_mean = not hf.has("rms_norm_eps")
    eps = hf.number("layer_norm_eps", default=1e-5) if removes_mean else hf.number("rms_norm_eps")
    size = hf.integer("intermediate_size")
    dense_size = hf.integer("prefix_dense_intermediate_size", default=size)
    changed = hf.with_values(logit_scale=None, tie_word_embeddings=tied, rms_norm_eps=eps)
    common = read_common(changed, dense_size=dense_size)
    num_layers = common.num_layers
    num_dense = min(hf.integer("first_k_dense_replace", default=0, minimum=0), num_layers)
    kinds, layers = _layer_types(hf, num_layers, num_dense), _moe_layers(hf, num_layers, num_dense)
    window = hf.integer("sliding_window", default=4096)
    rope = read_rope(hf, common.head_dim, interleaved=True)
    # Dense layers rotate, too, unless they slide in a pattern of their own.
    dense_rotates = hf.integer("prefix_dense_sliding_window_pattern", default=1) == 1
    windows = read_windows(hf.with_values(layer_types=kinds, sliding_window=window), num_layers)
    attention = common.gqa(rope, output_bias=common.attention_bias)
    mixers = [
        layer if kind == SLIDING or (dense_rotates and index not in layers) else replace(layer, rope=None)
        for index, (layer, kind) in enumerate(zip(sliding(attention, windows), kinds, strict=True))
    ]
    return common.model(
        mixers,
        common.ffns(_read_moe(hf, common, size), layers),
        norm=LayerNorm(common.eps) if removes_mean else common.norm,
        residuals=Parallel(),
        logit_scale=hf.number("logit_scale", default=0.0625),
        num_mtp_layers=read_mtp_layers(hf),
    )


def _gguf(keys: MetadataKeys, config: Config) -> Config:
    """Files name the epsilon of the kind of norm that the model has."""
    found: Config = {
        "layer_types": [SLIDING if one else FULL for one in sliding_layers(keys, config, last_is_full=False)],
        "norm_topk_prob": bool(keys.get("expert_weights_norm")),
        "shared_expert_combination_strategy": "average",
        "prefix_dense_intermediate_size": config["intermediate_size"],
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_shared_experts": keys.integer("expert_shared_count", 0),
    }
    keys.skip("expert_shared_feed_forward_length")
    if keys.integer("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise keys.error("rope.dimension_count", keys.get("rope.dimension_count"), str(config["head_dim"]))
    return found


FAMILIES = (
    Family(
        "cohere2_moe",
        read_cohere2_moe,
        TensorNames((ROTARY,), mtp_layers=True),
        gguf=(
            GgufFamily(
                "cohere2moe",
                {
                    "attention.layer_norm_epsilon": "layer_norm_eps",
                    "expert_count": "num_experts",
                    "leading_dense_block_count": "first_k_dense_replace",
                    "logit_scale": "logit_scale",
                },
                2,
                {"expert_selection_fn": "sigmoid"},
                _gguf,
            ),
        ),
    ),
)
