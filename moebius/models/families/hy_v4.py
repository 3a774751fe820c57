"""Hy4 (780B-A49B): latent attention to tokens that an indexer chooses, with sinks and gates of elements;
independent hyper-connections; routed experts that clamp.

Sources: transformers 5.23 (HYV4Config); public descriptions of the published keys and tensors.

Two layouts of rotated parts are about. The published weights pair neighbours, as vLLM, SGLang and llama.cpp
have them; transformers 5.23 pairs an element with the one half a head away, and of those weights computes
another function (a public measurement: perplexity 151 instead of 6.4). So the published keys, of which
transformers knows nothing, stand for the one, and a configuration without them for the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import INDEXED_KEYS, Config, GgufFamily, deepseek_yarn, indexed
from moebius.checkpoint.gguf.names import HYPER_RULES, INDEXER_RULES, gguf_linear
from moebius.models.common import INDEXED, listed_or_after_dense, read_mtp_layers
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.latent import TokenIndexer
from moebius.models.layers.residual import HyperConnections
from moebius.models.mla import read_mla_common, read_moe, read_v3_router, sparse
from moebius.models.names import ROTARY, TensorNames, drop, rename

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

_FULL, _SHARED = "full", "shared"
_SPARSE = (*INDEXED, "sparse_attention")
# Of the published configuration only: what is so in every model here.
_ALWAYS = ("enable_ihc", "gated_mla", "learnable_sink")
# Of training; precisions of sums, which are float32 here; what another library has besides.
_HARMLESS = (
    "enable_lm_head_fp32",
    "enable_attention_fp32_softmax",
    "enable_moe_fp32_combine",
    "index_share_for_mtp_iteration",
    "learnable_sink_init",
    "sliding_window",
)


def _pairs_neighbours(hf: HfKeys) -> bool:
    """Returns `rope_interleave` where there is one; else whether the configuration is as published."""
    for name in _ALWAYS:
        if not hf.boolean(name, default=True):
            raise hf.error(name, False, "true")
    hf.refuse("gating_type", "elementwise")
    published = any(hf.has(name) for name in _ALWAYS)
    return hf.boolean("rope_interleave", default=published)


def _full_layers(hf: HfKeys, num_layers: int) -> frozenset[int]:
    """Returns the layers that choose: as listed, or the first and from the second on every fourth."""
    hf.refuse("layer_types", *([kind] * num_layers for kind in _SPARSE))
    default = tuple(_FULL if layer == 0 or layer % 4 == 1 else _SHARED for layer in range(num_layers))
    kinds = hf.strings("indexer_types") or default
    if len(kinds) != num_layers or not set(kinds) <= {_FULL, _SHARED} or kinds[0] != _FULL:
        raise hf.error("indexer_types", list(kinds), f"{num_layers} of 'full' and 'shared', the first full")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == _FULL)


def _limit(hf: HfKeys) -> float | None:
    """Returns where routed experts clamp; None: they do not."""
    value = hf.value("swiglu_limit")
    value = 10.0 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise hf.error("swiglu_limit", value, "a number")
    return float(value) if value > 0 else None


def read_hy_v4(hf: HfKeys) -> ModelConfig:
    """The first layer is dense unless `mlp_layer_types` says otherwise."""
    hf.skip(*_HARMLESS)
    hf.refuse("mlp_bias")
    interleaved = _pairs_neighbours(hf)
    common, mla = read_mla_common(hf.with_values(rope_interleave=interleaved))
    num_layers = common.num_layers
    if mla.q_lora_rank is None:
        raise hf.error("q_lora_rank", None, "an integer >= 1: the indexer reads the queries' latent")
    head_dim = hf.integer("index_head_dim", default=128)
    if head_dim < mla.qk_rope_head_dim:
        raise hf.error("index_head_dim", head_dim, f"at least qk_rope_head_dim ({mla.qk_rope_head_dim})")
    indexer = TokenIndexer(
        num_heads=hf.integer("index_n_heads", default=16),
        head_dim=head_dim,
        top_k=hf.integer("index_topk", default=2048),
        interleaved=interleaved,
        rotates_last=True,
        key_eps=common.eps,
    )
    layers = listed_or_after_dense(hf, num_layers, 1)
    moe, limit = read_moe(hf, common, read_v3_router(hf), default_shared=1), _limit(hf)
    if limit is not None:
        moe = replace(moe, experts=replace(moe.experts, activation="clamped_silu", limit=limit))
    full = _full_layers(hf, num_layers)
    streams = HyperConnections(
        num_streams=hf.integer("hc_mult", default=4, minimum=2),
        iterations=0,
        eps=hf.number("hc_eps", default=1e-6),
        weighs_last=True,
        magnitude=hf.number("hc_magnitude", default=2.0),
    )
    attention = replace(mla, gate="element", has_sinks=True)
    return common.model(
        sparse(attention, indexer, [layer in full for layer in range(num_layers)]),
        common.ffns(moe, layers),
        residuals=streams,
        num_mtp_layers=read_mtp_layers(hf),
    )


_LAYER = "model.layers.*."
# Published names, then those of transformers' modules, or what it saves them as.
_GATES = tuple(
    rename(f"{_LAYER}self_attn.{name}.**", f"{_LAYER}self_attn.g_proj.**")
    for name in ("linear_gate", "gate_proj")
)
_PARTS = ("fn", "base", "scale")
_HYPER = tuple(
    rename(f"{_LAYER}{stored}.hc_{part}", f"{_LAYER}{half}_hc.{part}")
    for name, half in (("hc_attn_layer", "attn"), ("hc_mlp_layer", "ffn"))
    for stored in (f"{name}.hc_pre", f"hc_pre.{name}")
    for part in _PARTS
)
_HEAD = tuple(
    rename(f"model.{stored}.hc_head_{part}", f"model.hc_head.hc_{part}")
    for stored in ("hc_head", "hc_pre.hc_head")
    for part in _PARTS
)
# So transformers 5.23 saves the gates of MLPs, too.
_SAVED = tuple(
    rename(f"{_LAYER}{mlp}.linear_gate.**", f"{_LAYER}{mlp}.gate_proj.**")
    for mlp in ("mlp", "mlp.shared_experts")
)

_GGUF_KEYS = INDEXED_KEYS | {
    "hyper_connection.count": "hc_mult",
    "hyper_connection.epsilon": "hc_eps",
    "hyper_connection.magnitude": "hc_magnitude",
}


def _gguf_config(keys: MetadataKeys, config: Config) -> Config:
    """Without a limit experts do not clamp; without an indexer the model is another."""
    if not config.get("index_topk"):
        raise keys.error("attention.indexer.top_k", None, "an integer >= 1")
    return indexed(keys, config) | {"swiglu_limit": keys.get("swiglu_clamp_exp") or 0.0}


_GGUF_RULES = (*INDEXER_RULES, *HYPER_RULES, *gguf_linear("attn_gate", "self_attn.g_proj"))

FAMILIES = (
    Family(
        "hy_v4",
        read_hy_v4,
        TensorNames(
            (
                ROTARY,
                drop("model.mtp_layers.**"),
                *_GATES,
                *_HYPER,
                *_HEAD,
                *_SAVED,
                rename(f"{_LAYER}self_attn.learnable_sink_param", f"{_LAYER}self_attn.sinks"),
                # Of checkpoints as they are trained, whose experts are apart.
                rename(f"{_LAYER}mlp.router.gate.**", f"{_LAYER}mlp.gate.**"),
                rename(f"{_LAYER}mlp.expert_bias", f"{_LAYER}mlp.gate.e_score_correction_bias"),
            ),
            ("fused", "per_expert"),
            mtp_layers=True,
        ),
        gguf=(
            GgufFamily(
                "hy_v4",
                _GGUF_KEYS,
                2,
                {"rope_interleave": True},
                _gguf_config,
                deepseek_yarn,
                rules=_GGUF_RULES,
            ),
        ),
    ),
)
