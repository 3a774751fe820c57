"""GLM-5.3-Flash: Kimi Delta Attention, latent attention to pools of tokens that an indexer chooses in a
quarter of the layers, hyper-connections, and clamped SwiGLU everywhere.

Source: the configuration class of transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from moebius.checkpoint.gguf.family import (
    INDEXED_KEYS,
    Config,
    GgufFamily,
    latent,
    linear_heads_of,
    linear_layers,
)
from moebius.checkpoint.gguf.names import (
    HYPER_RULES,
    INDEXER_RULES,
    KDA_BOTTLENECK_RULES,
    KDA_RULES,
    gguf_layer,
)
from moebius.models.common import FULL, INDEXED, Common, read_common, read_from_section, read_mtp_layers
from moebius.models.config import ModelConfig
from moebius.models.family import Family, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.layers.ffn import FeedForward
from moebius.models.layers.latent import MLA, TokenIndexer
from moebius.models.layers.recurrent import KDA
from moebius.models.layers.residual import HyperConnections
from moebius.models.mla import read_mla, read_moe, read_v3_router
from moebius.models.names import TEXT, VISION, VISUAL, TensorNames, rename
from moebius.models.vision import read_grid_vision

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

_LINEAR, _FULL, _SHARED = "linear_attention", "full", "shared"
_INDEXED = (*INDEXED, FULL)
_DENSE_LAYERS = 3
# Of rotary embedding, which no layer has; what follows from other keys; the router's type, which is float32
# here; and of training.
_HARMLESS = (
    "ep_size",
    "first_k_dense_replace",
    "head_dim",
    "index_share_for_mtp_iteration",
    "indexer_rope_interleave",
    "moe_router_dtype",
    "pretraining_tp",
    "qk_head_dim",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
# Of the published configuration only: what is so in every model here.
_ALWAYS = ("index_kpool_compress", "mhc", "mla_use_nope")


def _attending_layers(hf: HfKeys, num_layers: int) -> tuple[int, ...]:
    """Returns those of `layer_types`, by default every fourth. Raises ModelConfigError without both."""
    default = tuple(_INDEXED[0] if layer % 4 == 3 else _LINEAR for layer in range(num_layers))
    kinds = hf.strings("layer_types") or default
    attending = tuple(layer for layer, kind in enumerate(kinds) if kind in _INDEXED)
    of_both = 0 < len(attending) < num_layers
    if len(kinds) != num_layers or not set(kinds) <= {_LINEAR, *_INDEXED} or not of_both:
        allowed = f"{num_layers} of {_LINEAR} and {_INDEXED[0]}, some of both"
        raise hf.error("layer_types", list(kinds), allowed)
    return attending


def _read_linear(hf: HfKeys, eps: float) -> KDA:
    """In a section, or among the others with a prefix. A bound may be switched off by null."""
    section = hf.section("linear_attn_config")
    read = partial(read_from_section, hf, section)
    heads = read("num_heads", "linear_num_heads", 64)
    head_dim = read("head_dim", "linear_head_dim", 128)
    width = read("short_conv_kernel_size", "linear_conv_kernel_dim", 4, minimum=2)
    bound: Any = -5.0
    own, name = hf, "linear_lower_bound"
    if hf.has(name) or hf.is_null(name):
        bound = hf.value(name)
    if section is not None:
        if section.has("gate_lower_bound") or section.is_null("gate_lower_bound"):
            own, name = section, "gate_lower_bound"
            bound = section.value(name)
        # `safe_gate`, which has to be true, asks for some bound.
        bound = -5.0 if bound is None else bound
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float) or bound >= 0):
        raise own.error(name, bound, "a number below 0, or null")
    found = KDA(
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=head_dim,
        value_head_dim=head_dim,
        conv_width=width,
        eps=eps,
        decay_bound=None if bound is None else float(bound),
    )
    if section is not None:
        # Layers are named by `layer_types`.
        section.skip("full_attn_layers", "kda_layers")
        if not section.boolean("safe_gate", default=True):
            raise section.error("safe_gate", False, "true")
        if section.unread:
            raise section.error(section.unread[0], "...", "keys of GLM-5.3-Flash's linear attention")
    return found


def _read_indexer(hf: HfKeys, attending: tuple[int, ...], num_layers: int) -> TokenIndexer:
    """Raises ModelConfigError where a layer would share a choice: no layer before it has just made one."""
    kinds = hf.strings("indexer_types")
    pattern = hf.string("index_topk_pattern", default="")
    kinds = kinds or tuple({"F": _FULL, "S": _SHARED}.get(letter, letter) for letter in pattern)
    if kinds and (len(kinds) != num_layers or any(kinds[layer] != _FULL for layer in attending)):
        raise hf.error(
            "indexer_types", list(kinds), f"{num_layers}, and {_FULL!r} in each layer that attends"
        )
    hf.skip("index_skip_topk_offset")
    hf.refuse("index_topk_freq", 1)
    if not hf.boolean("index_kpool_always_select_tail", default=True):
        raise hf.error("index_kpool_always_select_tail", False, "true")
    pool, top_k = hf.integer("index_kpool", default=16), hf.integer("index_topk", default=2048)
    if top_k % pool:
        raise hf.error("index_topk", top_k, f"a multiple of index_kpool ({pool})")
    return TokenIndexer(
        num_heads=hf.integer("index_n_heads", default=32),
        head_dim=hf.integer("index_head_dim", default=128),
        top_k=top_k,
        interleaved=False,
        pool=pool,
    )


def _read_latent(hf: HfKeys, common: Common, attending: tuple[int, ...]) -> MLA:
    """All of a query and of a key is without position."""
    if hf.integer("qk_rope_head_dim", default=0, minimum=0):
        raise hf.error("qk_rope_head_dim", hf.integer("qk_rope_head_dim"), "0")
    hf.integer("q_lora_rank")  # The indexer reads that latent.
    indexer = _read_indexer(hf, attending, common.num_layers)
    attention = replace(read_mla(hf, common, rope=None), latent_eps=common.eps)
    return replace(attention, is_sparse=True, indexer=indexer)


def _read_ffns(hf: HfKeys, common: Common) -> tuple[FeedForward, ...]:
    """Dense layers first, or as `mlp_layer_types` says."""
    num_layers = common.num_layers
    dense = ("dense",) * min(_DENSE_LAYERS, num_layers)
    kinds = hf.strings("mlp_layer_types") or (*dense, *("sparse",) * (num_layers - len(dense)))
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise hf.error("mlp_layer_types", list(kinds), f"{num_layers} of 'dense' and 'sparse'")
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    moe = read_moe(hf, common, read_v3_router(hf))
    experts = replace(moe.experts, activation="clamped_silu", limit=common.limit)
    return common.ffns(replace(moe, experts=experts), layers)


def read_glm5_next(hf: HfKeys) -> ModelConfig:
    """Returns the language model of GLM-5.3-Flash."""
    hf.skip(*_HARMLESS)
    for name in _ALWAYS:
        if not hf.boolean(name, default=True):
            raise hf.error(name, False, "true")
    # A head's size is what is rotated of it here, nothing.
    common = read_common(hf.with_values(head_dim=None))
    limit = hf.number("swiglu_limit", default=10.0)
    common = replace(common, activation="clamped_silu", limit=limit)
    if common.num_kv_heads != common.num_heads:
        allowed = f"num_attention_heads ({common.num_heads})"
        raise hf.error("num_key_value_heads", common.num_kv_heads, allowed)
    attending = _attending_layers(hf, common.num_layers)
    attention, linear = _read_latent(hf, common, attending), _read_linear(hf, common.eps)
    streams = HyperConnections(
        num_streams=hf.integer("hc_mult", default=4, minimum=2),
        iterations=hf.integer("hc_sinkhorn_iters", default=20),
        eps=hf.number("hc_eps", default=1e-6),
    )
    return common.model(
        [attention if layer in attending else linear for layer in range(common.num_layers)],
        _read_ffns(hf, common),
        residuals=streams,
        num_mtp_layers=read_mtp_layers(hf),
    )


# Weights of hyper-connections are modules here, below either prefix of layers.
_HYPER = tuple(
    rename(f"{prefix}.layers.*.hc_{half}_{part}", f"model.layers.*.{half}_hc.{part}")
    for prefix in ("model.language_model", "model")
    for half in ("attn", "ffn")
    for part in ("fn", "base", "scale")
)

_GGUF_KEYS = INDEXED_KEYS | {
    "attention.indexer.kpool": "index_kpool",
    "attention.indexer.kpool_select_tail": "index_kpool_always_select_tail",
    "hyper_connection.count": "hc_mult",
    "hyper_connection.epsilon": "hc_eps",
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
    "swiglu_clamp_exp": "swiglu_limit",
}
_INDEXER_EPSILON = 1e-6


def _gguf_config(keys: MetadataKeys, config: Config) -> Config:
    """Layers with a decay have linear attention; all others choose for themselves."""
    epsilon = keys.get("attention.layer_norm_epsilon")
    if epsilon not in (None, _INDEXER_EPSILON):
        raise keys.error("attention.layer_norm_epsilon", epsilon, f"{_INDEXER_EPSILON}")
    limit, shared = config.get("swiglu_limit"), keys.get("swiglu_clamp_shexp")
    if limit is None or shared not in (None, limit):
        raise keys.error("swiglu_clamp_shexp", shared, f"what swiglu_clamp_exp is, {limit}")
    linear, count = linear_layers(keys), config["num_hidden_layers"]
    sizes = linear_heads_of(keys, linear)
    kinds = [_LINEAR if layer in linear else _INDEXED[0] for layer in range(count)]
    dense = config.get("first_k_dense_replace", 0)
    # Whether a layer of linear attention has an indexer means nothing; the other is of prediction.
    keys.skip("attention.indexer.types", "attention.indexer.index_share_mtp")
    return latent(keys, config) | {
        "layer_types": kinds,
        "linear_num_heads": sizes["num_heads"],
        "linear_head_dim": sizes["head_dim"],
        "linear_conv_kernel_dim": sizes["short_conv_kernel_size"],
        # Without a bound there is none.
        "linear_lower_bound": keys.get("kda.gate_lower_bound"),
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (count - dense),
    }


_GGUF_RULES = (
    *KDA_RULES,
    *KDA_BOTTLENECK_RULES,
    *INDEXER_RULES,
    *HYPER_RULES,
    gguf_layer("ssm_a", "self_attn.A_log", "flat_decay"),
    *(
        gguf_layer(f"indexer_compressor_{part}.weight", f"self_attn.indexer.index_kpool_compress_{part}")
        for part in ("ape", "gate")
    ),
)

FAMILIES = (
    Family(
        "glm5_next",
        read_glm5_next,
        TensorNames((VISION, *_HYPER, TEXT), mtp_layers=True),
        VisionFamily(read_grid_vision, (VISUAL,), tower="Glm5Next", processor="glm5"),
        # Without the vision tower, which is a file of another kind. The second name is that of files made
        # before llama.cpp had the architecture.
        tuple(
            GgufFamily(name, _GGUF_KEYS, 2, derive=_gguf_config, rules=_GGUF_RULES)
            for name in ("glm5-next", "glm5next")
        ),
    ),
)
