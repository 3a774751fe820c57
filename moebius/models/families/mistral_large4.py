"""Mistral Large 4 (1T-A52B): latent attention to tokens that an indexer chooses, queries that grow by
learned numbers, learned rotary frequencies, layers without rotation, latents that layers share.

Sources: configuration class and checkpoint conversion of transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moebius.models.common import INDEXED, listed_or_after_dense, read_mtp_layers
from moebius.models.config import ModelConfig
from moebius.models.family import Family, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.layers.latent import TokenIndexer
from moebius.models.layers.router import RouterConfig
from moebius.models.mla import read_mla_common, read_moe, sparse
from moebius.models.names import ROTARY, TensorNames, drop, rename
from moebius.models.vision import PIXTRAL_TOKENS, read_pixtral_vision

_FULL, _SHARED = "full", "shared"
# Rotation where a checkpoint has none.
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
# Of the tower, of what joins it to the text, and of its tokens.
_VISION = (
    "image_token_id",
    "image_token_index",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "vision_config",
    "vision_feature_layer",
)


def _kinds(hf: HfKeys, num_layers: int) -> tuple[str, ...]:
    """Returns which layers choose, in the order in which the keys outrank one another."""
    name = "indexer_types"
    kinds = hf.strings(name)
    every, offset = hf.value("index_topk_freq"), hf.value("index_skip_topk_offset")
    pattern = hf.value("index_topk_pattern")
    if not kinds and pattern is not None:
        name = "index_topk_pattern"
        kinds = tuple({"F": _FULL, "S": _SHARED}.get(letter, letter) for letter in pattern)
    elif not kinds:
        name, every, offset = "index_topk_freq", max(every or 1, 1), 2 if offset is None else offset
        layers = range(num_layers)
        kinds = tuple(_SHARED if max(layer - offset + 1, 0) % every else _FULL for layer in layers)
    if len(kinds) != num_layers or not set(kinds) <= {_FULL, _SHARED} or kinds[0] != _FULL:
        raise hf.error(name, list(kinds), f"{num_layers} of 'full' (F) and 'shared' (S), the first one full")
    return kinds


def _rotating(hf: HfKeys, num_layers: int) -> tuple[bool, ...]:
    """`no_rope_layers` has 1 where a layer rotates; by default every fourth does not."""
    period = hf.integer("no_rope_layer_interval", default=4)
    listed = hf.integers("no_rope_layers") or tuple(int((i + 1) % period != 0) for i in range(num_layers))
    if len(listed) < num_layers or not set(listed) <= {0, 1}:
        raise hf.error("no_rope_layers", list(listed), f"0 or 1 for each of {num_layers} layers")
    return tuple(one == 1 for one in listed[:num_layers])


def _sources(hf: HfKeys, rotating: tuple[bool, ...]) -> tuple[int, ...]:
    """Returns whose latents each layer attends to; empty: its own everywhere.

    The reference keeps the latest shared latents of each kind of layer: what names others is refused.
    """
    name, num_layers = "kv_source_layers", len(rotating)
    sources = hf.integers(name)
    if not sources or sources == tuple(range(num_layers)):
        return ()
    if len(sources) != num_layers:
        raise hf.error(name, list(sources), f"a layer for each of {num_layers}")
    latest: dict[bool, int] = {}
    for layer, source in enumerate(sources):
        if source == layer:
            if layer in sources[layer + 1 :]:
                latest[rotating[layer]] = layer
        elif latest.get(rotating[layer]) != source:
            raise hf.error(
                name, list(sources), "itself, or the latest earlier layer that shares and rotates as it does"
            )
    return sources


def _read_router(hf: HfKeys) -> RouterConfig:
    return RouterConfig(
        num_experts=hf.integer("n_routed_experts", "num_local_experts", "num_experts"),
        top_k=hf.integer("num_experts_per_tok", default=4),
        score="softmax",
        num_groups=hf.integer("n_group", default=1),
        top_groups=hf.integer("topk_group", default=1),
        post="renormalize",
        renormalize_epsilon=1e-20,
        scale=hf.number("routed_scaling_factor", default=1.0),
        float32_gate=True,
    )


def read_mistral_large4(hf: HfKeys) -> ModelConfig:
    """The first layer is dense unless the checkpoint says otherwise."""
    hf.skip(*_VISION, "index_share_for_mtp_iteration")
    hf.refuse("q_lora_rank")
    hf.refuse("mlp_bias")
    cap = hf.number("final_logit_softcapping", default=30.0)
    rope = hf.value("rope_parameters") or hf.value("rope_scaling") or _YARN
    common, mla = read_mla_common(hf.with_values(rope_parameters=rope, final_logit_softcapping=None))
    num_layers = common.num_layers
    assert mla.rope is not None, "read above"
    learned = replace(mla.rope, learned=True)
    hf.refuse("layer_types", *([kind] * num_layers for kind in INDEXED))
    rotating, kinds = _rotating(hf, num_layers), _kinds(hf, num_layers)
    head_dim = hf.integer("index_head_dim", default=128)
    if head_dim < mla.qk_rope_head_dim:
        raise hf.error("index_head_dim", head_dim, f"at least qk_rope_head_dim ({mla.qk_rope_head_dim})")
    indexer = TokenIndexer(
        num_heads=hf.integer("index_n_heads", default=32),
        head_dim=head_dim,
        top_k=hf.integer("index_topk", default=2048),
        interleaved=True,
        reads_hidden=True,
    )
    attention = replace(mla, rope=learned, latent_eps=common.eps, learned_query_growth=True)
    own = range(num_layers)
    sources = _sources(hf, rotating) or tuple(own)
    mixers = [
        replace(
            layer,
            rope=layer.rope if rotates else None,
            all_from_latent=not rotates,
            latents_back=index - source,
            shares_latents=index in sources[index + 1 :],
        )
        for layer, rotates, index, source in zip(
            sparse(attention, indexer, [kind == _FULL for kind in kinds]), rotating, own, sources, strict=True
        )
    ]
    moe = read_moe(hf, common, _read_router(hf), default_shared=1)
    return common.model(
        mixers,
        common.ffns(moe, listed_or_after_dense(hf, num_layers, 1)),
        final_logit_softcap=cap,
        num_mtp_layers=read_mtp_layers(hf),
    )


# Modules of a layer, as published and as here.
_MODULES = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wo": "self_attn.o_proj",
    "attention.indexer": "self_attn.indexer",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "gate": "mlp.gate",
    "experts": "mlp.experts",
    "shared_experts.w1": "mlp.shared_experts.gate_proj",
    "shared_experts.w2": "mlp.shared_experts.down_proj",
    "shared_experts.w3": "mlp.shared_experts.up_proj",
}
_GROWTH = tuple(
    rename(f"layers.*.attention.{owner}ssmax_scaling.{stored}", f"model.layers.*.self_attn.{owner}{here}")
    for owner in ("", "indexer.")
    for stored, here in (("s", "softmax_scaling.scale"), ("b", "softmax_scaling.bias"))
)
_TOP = {
    "tok_embeddings.**": "model.embed_tokens.**",
    "norm.**": "model.norm.**",
    "output.**": "lm_head.**",
    "lerope.alpha": "model.rotary_emb.alpha",
    "model.language_model.**": "model.**",
}
# Of the tower, as published and as transformers writes it; and of drafts.
_LEFT_OUT = (
    "vision_encoder.**",
    "pre_mm_projector_norm.**",
    "patch_merger.**",
    "vision_language_adapter.**",
    "model.vision_tower.**",
    "model.multi_modal_projector.**",
    "mtp_dspark.**",
)
_STORED, _TOWER = "vision_encoder.transformer.layers.*.", "vision_tower.transformer.layers.*."
# The tower divides its queries and keys for itself: see `gpu_service/models/vision/pixtral.py`.
_IMAGES = {
    _STORED + "attention.wq.**": _TOWER + "attention.wq.**",
    _STORED + "attention.wk.**": _TOWER + "attention.wk.**",
    _STORED + "attention.wv.**": _TOWER + "attention.v_proj.**",
    _STORED + "attention.wo.**": _TOWER + "attention.o_proj.**",
    _STORED + "feed_forward.w1.**": _TOWER + "feed_forward.gate_proj.**",
    _STORED + "feed_forward.w2.**": _TOWER + "feed_forward.down_proj.**",
    _STORED + "feed_forward.w3.**": _TOWER + "feed_forward.up_proj.**",
    "vision_encoder.**": "vision_tower.**",
    "pre_mm_projector_norm.**": "multi_modal_projector.norm.**",
    "patch_merger.**": "multi_modal_projector.patch_merger.**",
    "vision_language_adapter.w_in.**": "multi_modal_projector.linear_1.**",
    "vision_language_adapter.w_out.**": "multi_modal_projector.linear_2.**",
    "model.vision_tower.**": "vision_tower.**",
    "model.multi_modal_projector.**": "multi_modal_projector.**",
}

FAMILIES = (
    Family(
        "mistral_large4",
        read_mistral_large4,
        TensorNames(
            (
                ROTARY,
                *(drop(name) for name in _LEFT_OUT),
                *_GROWTH,
                *(rename(f"layers.*.{old}.**", f"model.layers.*.{new}.**") for old, new in _MODULES.items()),
                *(rename(stored, canonical) for stored, canonical in _TOP.items()),
            ),
            layouts=("per_expert_in_layer", "fused", "per_expert"),
        ),
        VisionFamily(
            read_pixtral_vision,
            tuple(rename(stored, canonical) for stored, canonical in _IMAGES.items()),
            tower="Pixtral",
            processor="pixtral",
            tokens=PIXTRAL_TOKENS,
        ),
    ),
)
