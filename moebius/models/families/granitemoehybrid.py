"""Granite 4 (hybrid): Mamba-2, and attention without positions in a tenth of the layers; every layer is MoE.

Sums of the residual stream, embeddings, scores and logits have factors of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import Config, GgufFamily
from moebius.checkpoint.gguf.linear_heads import linear_heads
from moebius.checkpoint.gguf.names import gguf_mamba2
from moebius.models.common import FULL, Common, read_common, refuse_step_limits
from moebius.models.config import ModelConfig
from moebius.models.families.granitemoe import (
    GRANITE_GGUF_KEYS,
    GRANITE_HALVES,
    GRANITE_NAMES,
    GRANITE_PAIRS,
    read_attention,
    read_experts,
    scaled_model,
)
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import GQA
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.recurrent import Mamba2
from moebius.models.names import TensorNames
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    # Few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

# By the names of the publisher, and of transformers 5.
_STATE_SPACE, _ATTENDS = ("mamba", "linear_attention"), ("attention", FULL)
# Of initialisation and training, and how long the chunks are that other programs compute at once.
_HARMLESS = ("init_method", "mamba_chunk_size")


def _read_mixers(hf: HfKeys, common: Common, attention: GQA) -> list[Mixer]:
    """The mixer of each layer.

    Raises ModelConfigError for a list of another length, an unknown type, or sizes that do not fit.
    """
    num_layers = common.num_layers
    kinds = hf.strings("layer_types", "layers_block_type")
    if len(kinds) != num_layers:
        raise hf.error("layer_types", list(kinds), f"one type for each of the {num_layers} layers")
    if unknown := [kind for kind in kinds if kind not in (*_STATE_SPACE, *_ATTENDS)]:
        raise hf.error("layer_types", unknown[0], ", ".join((*_STATE_SPACE, *_ATTENDS)))
    own = frozenset(layer for layer, kind in enumerate(kinds) if kind in _STATE_SPACE)
    if len(own) in (0, num_layers):
        raise hf.error("layer_types", list(kinds), "layers of both types")
    heads, groups = hf.integer("mamba_n_heads", default=128), hf.integer("mamba_n_groups", default=1)
    if heads % groups:
        raise hf.error("mamba_n_heads", heads, f"a multiple of {groups} (mamba_n_groups)")
    inner = hf.integer("mamba_expand", default=2) * common.hidden_size
    automatic = hf.value("mamba_d_head") in (None, "auto")
    head_dim = inner // heads if automatic else hf.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise hf.error(
            "mamba_d_head", head_dim, f"what makes {inner} (mamba_expand * hidden_size) of {heads} heads"
        )
    if not hf.boolean("mamba_conv_bias", default=True):
        raise hf.error("mamba_conv_bias", False, "true")
    if hf.boolean("mamba_proj_bias", default=False):
        raise hf.error("mamba_proj_bias", True, "false")
    state_space = Mamba2(
        num_key_heads=groups,
        num_value_heads=heads,
        key_head_dim=hf.integer("mamba_d_state", default=256),
        value_head_dim=head_dim,
        conv_width=hf.integer("mamba_d_conv", default=4, minimum=2),
        eps=common.eps,
    )
    return [state_space if layer in own else attention for layer in range(num_layers)]


def read_granitemoehybrid(hf: HfKeys) -> ModelConfig:
    """`intermediate_size` is an expert's; without `position_embedding_type` nothing is rotated."""
    hf.skip(*_HARMLESS)
    hf.refuse("normalization_function", "rmsnorm")
    refuse_step_limits(hf)
    common: Common = read_common(hf)
    rotates = hf.value("position_embedding_type") == "rope"
    if not rotates:
        hf.refuse("position_embedding_type", "nope")
    rope = read_rope(hf, common.head_dim)
    mixers = _read_mixers(hf, common, read_attention(hf, common, rope if rotates else None))
    moe = read_experts(hf, common, hf.integer("shared_intermediate_size", default=1024))
    return scaled_model(hf, common, mixers, moe)


_GGUF_KEYS = GRANITE_GGUF_KEYS | {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.group_count": "mamba_n_groups",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
}


def _gguf(keys: MetadataKeys, config: Config) -> Config:
    """Layers without attention have a decay; heads are as wide as `hidden_size` makes them."""
    heads, own = linear_heads(keys.model), keys.layers_with("ssm_a")
    keys.skip("ssm.inner_size", "rope.dimension_count")
    kinds = ["mamba" if layer in own else "attention" for layer in range(config["num_hidden_layers"])]
    return {
        "layer_types": kinds,
        "mamba_d_head": heads.value_dim,
        "mamba_expand": heads.value_size // config["hidden_size"],
        # The key is llama.cpp's for a rotation that its code would else leave out.
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned") else "nope",
    }


_GGUF_RULES = (*gguf_mamba2("mamba"), *GRANITE_PAIRS, *GRANITE_HALVES)
FAMILIES = (
    Family(
        "granitemoehybrid",
        read_granitemoehybrid,
        TensorNames(GRANITE_NAMES, ("stacked_linears",)),
        gguf=(GgufFamily("granitehybrid", _GGUF_KEYS, 3, derive=_gguf, rules=_GGUF_RULES),),
    ),
)
