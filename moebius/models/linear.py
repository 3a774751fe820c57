"""What families most of whose layers are linear attention have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import SPARSE_KEYS, Config, rotated
from moebius.checkpoint.gguf.linear_heads import linear_heads
from moebius.models.common import FULL
from moebius.models.config import LinearAttentionConfig, MoeConfig, RouterConfig
from moebius.models.keys import HfKeys

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

LINEAR = "linear_attention"
# Of the published models: a quarter of a head is rotated.
PARTIAL_FACTOR = 0.25
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
LINEAR_KEYS = SPARSE_KEYS | {
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}


def read_linear_attention(hf: HfKeys, num_layers: int, *, interleaved: bool) -> LinearAttentionConfig:
    """Sizes, and `layer_types`; without such a list, every `full_attention_interval`-th layer attends.

    Raises ModelConfigError for a list of another length, an unknown type, value heads that key heads do not
    divide, or a model without layers of either kind.
    """
    interval = hf.integer("full_attention_interval", default=4)
    default = tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers))
    kinds = hf.strings("layer_types") or default
    if len(kinds) != num_layers:
        raise hf.error("layer_types", list(kinds), f"one type for each of the {num_layers} layers")
    if unknown := [kind for kind in kinds if kind not in (FULL, LINEAR)]:
        raise hf.error("layer_types", unknown[0], f"{FULL}, {LINEAR}")
    if set(kinds) != {FULL, LINEAR}:
        raise hf.error("layer_types", list(kinds), "layers of both types")
    key_heads = hf.integer("linear_num_key_heads", default=16)
    value_heads = hf.integer("linear_num_value_heads", default=32)
    if value_heads % key_heads:
        raise hf.error("linear_num_value_heads", value_heads, f"a multiple of {key_heads} (key heads)")
    return LinearAttentionConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=hf.integer("linear_key_head_dim", default=128),
        value_head_dim=hf.integer("linear_value_head_dim", default=128),
        conv_width=hf.integer("linear_conv_kernel_dim", default=4, minimum=2),
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR),
        interleaved=interleaved,
    )


def read_gated_moe(hf: HfKeys, router: RouterConfig, layers: frozenset[int]) -> MoeConfig:
    """Shared experts are weighed by a gate of their own."""
    shared = hf.integer("shared_expert_intermediate_size")
    return MoeConfig(router, hf.integer("moe_intermediate_size"), shared, layers, shared_gate=True)


def gguf_linear_attention(keys: MetadataKeys, config: Config) -> Config:
    """Layers without softmax attention have a decay."""
    heads = linear_heads(keys.model)
    keys.skip("full_attention_interval", "ssm.inner_size")
    own = keys.layers_with("ssm_a")
    kinds = [
        "linear_attention" if layer in own else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    return rotated(keys, config) | {"layer_types": kinds, "linear_value_head_dim": heads.value_dim}
