"""Mistral Small 4 (119B-A6B): latent attention whose queries grow with their position, softmax router.

Sources: transformers 5.23 (Mistral4Config, Mistral3Config). Published inside of a `mistral3` model, with a
vision tower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moebius.checkpoint.gguf.family import MLA_KEYS, GgufFamily, deepseek_yarn, latent
from moebius.models.common import after_dense
from moebius.models.config import ModelConfig
from moebius.models.family import Family, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.layers.router import RouterConfig
from moebius.models.mla import read_mla_common, read_moe
from moebius.models.names import ROTARY, TensorNames, drop, rename
from moebius.models.rope import QueryGrowth
from moebius.models.vision import PIXTRAL_TOKENS, read_pixtral_vision

if TYPE_CHECKING:
    # Few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

# Rotation where a checkpoint has none, but for its keys of growth.
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_GROWTH = 0.1
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


def _rope(hf: HfKeys) -> tuple[HfKeys, QueryGrowth]:
    """The keys without those that are this family's own, and the growth of queries."""
    name = "rope_parameters" if hf.has("rope_parameters") else "rope_scaling"
    rope = hf.section(name)
    if rope is None:
        return hf.with_values(rope_parameters=_YARN), (
            _GROWTH,
            float(_YARN["original_max_position_embeddings"]),
        )
    rope_dim = hf.integer("qk_rope_head_dim", minimum=2)
    whole = hf.integer("qk_nope_head_dim") + rope_dim
    for keys in (rope, hf):
        factor = keys.number("partial_rotary_factor", default=rope_dim / whole)
        if factor != rope_dim / whole:
            raise keys.error("partial_rotary_factor", factor, f"{rope_dim / whole}")
    growth = (0.0, 1.0)
    if rope.value("llama_4_scaling_beta"):
        length = rope.number("original_max_position_embeddings")
        growth = rope.number("llama_4_scaling_beta"), length
    own = ("llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor")
    values = {key: value for key, value in hf.value(name).items() if key not in own}
    return hf.with_values(rope_parameters=values, partial_rotary_factor=None), growth


def _read_router(hf: HfKeys) -> RouterConfig:
    return RouterConfig(
        num_experts=hf.integer("n_routed_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="softmax",
        num_groups=hf.integer("n_group", default=1),
        top_groups=hf.integer("topk_group", default=1),
        post="renormalize" if hf.boolean("norm_topk_prob", default=True) else "none",
        renormalize_epsilon=1e-20,
        scale=hf.number("routed_scaling_factor", default=1.0),
    )


def read_mistral4(hf: HfKeys) -> ModelConfig:
    """Every layer is MoE unless `first_k_dense_replace` says otherwise."""
    keys, growth = _rope(hf)
    hf.refuse("sliding_window")
    common, attention = read_mla_common(keys, growth)
    moe = read_moe(hf, common, _read_router(hf))
    return common.model(attention, common.ffns(moe, after_dense(hf, common.num_layers, 0)))


def read_mistral3(hf: HfKeys) -> ModelConfig:
    """Returns the text model of a Mistral 3 or 4 with images; those without experts are refused."""
    hf.skip(*_VISION)
    if not hf.has("n_routed_experts"):
        raise hf.error("text_config", "...", "a model with experts (mistral4)")
    return read_mistral4(hf)


def _gguf_config(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Converters do not always write how queries grow; then they do as in the published model."""
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    rope = scaling | {"rope_theta": config["rope_theta"]}
    growth, length = keys.get("attention.temperature_scale"), keys.get("attention.temperature_length")
    original = scaling.get("original_max_position_embeddings")
    if length not in (None, 0, original):
        raise keys.error(
            "attention.temperature_length", length, f"rope.scaling's original length, {original}"
        )
    if original is not None:
        rope["llama_4_scaling_beta"] = _GROWTH if growth is None else growth
    elif growth:
        raise keys.error("attention.temperature_scale", growth, "0 without rope.scaling's original length")
    return latent(keys, config) | {"rope_parameters": rope}


_TOWER = (
    "vision_tower.**",
    "multi_modal_projector.**",
    "model.vision_tower.**",
    "model.multi_modal_projector.**",
)
FAMILIES = (
    Family(
        "mistral4",
        read_mistral4,
        TensorNames((ROTARY,), ("fused", "per_expert")),
        gguf=(GgufFamily("mistral4", MLA_KEYS, 1, derive=_gguf_config, yarn=deepseek_yarn),),
    ),
    Family(
        "mistral3",
        read_mistral3,
        TensorNames(
            (
                ROTARY,
                *(drop(name) for name in _TOWER),
                rename("language_model.model.**", "model.**"),
                rename("language_model.lm_head.**", "lm_head.**"),
                rename("model.language_model.**", "model.**"),
            ),
            ("fused", "per_expert"),
        ),
        VisionFamily(
            read_pixtral_vision,
            tuple(rename(name, name.removeprefix("model.")) for name in _TOWER),
            tower="Pixtral",
            processor="pixtral",
            tokens=PIXTRAL_TOKENS,
        ),
    ),
)
