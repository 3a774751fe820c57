"""Nemotron-H with experts (NVIDIA Nemotron 3 Nano, Super): a layer is Mamba-2, attention, MLP or MoE alone.

Attention knows no positions. MLPs and experts square a ReLU and have no gate; Super's routed experts work in
a latent space. Steps of the recurrence have no limits, as in the published code: `time_step_min` is of its
initialisation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import Config, GgufFamily, grouped
from moebius.checkpoint.gguf.linear_heads import linear_heads
from moebius.checkpoint.gguf.names import gguf_layer, gguf_linear, gguf_mamba2
from moebius.models.common import (
    FULL,
    Common,
    read_biased_router,
    read_common,
    read_mtp_layers,
    refuse_bias,
    refuse_step_limits,
)
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.ffn import Experts, FeedForward, LatentMoE, MoE
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.recurrent import Mamba2
from moebius.models.layers.residual import Single
from moebius.models.names import MTP, TensorNames, rename

if TYPE_CHECKING:
    # Few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

# By the letters of `hybrid_override_pattern`, the names of the publisher's lists, and transformers 5's.
_STATE_SPACE, _ATTENDS = ("M", "mamba", "linear_attention"), ("*", "attention", FULL)
_MLP, _MOE = ("-", "mlp"), ("E", "moe")
_KINDS = (*_STATE_SPACE, *_ATTENDS, *_MLP, *_MOE)
# Of initialisation and training, of other programs' kernels and numbers, of multi-token prediction, and of a
# rotation that no layer has.
_HARMLESS = (
    "chunk_size",
    "expand",
    "hidden_dropout",
    "keep_mtp_spec_in_bf16",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "num_logits_to_keep",
    "partial_rotary_factor",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "rope_theta",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "use_mamba_kernels",
)


def _read_kinds(hf: HfKeys) -> tuple[str, ...]:
    """Raises ModelConfigError for an unknown kind, or a number of layers that differs."""
    hf.skip("hybrid_override_pattern")
    kinds = hf.strings("layers_block_type", "layer_types")
    kinds = kinds or tuple(hf.string("hybrid_override_pattern"))
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise hf.error("layers_block_type", unknown[0], ", ".join(_KINDS))
    for needed in (_STATE_SPACE, _ATTENDS, _MOE):
        if not set(kinds) & set(needed):
            raise hf.error("layers_block_type", list(kinds), f"layers of the kind {needed[1]} as well")
    if hf.has("num_hidden_layers") and hf.integer("num_hidden_layers") != len(kinds):
        raise hf.error("num_hidden_layers", hf.value("num_hidden_layers"), f"{len(kinds)}, as layers listed")
    return kinds


def _read_state_space(hf: HfKeys, eps: float) -> Mamba2:
    heads, groups = hf.integer("mamba_num_heads", default=128), hf.integer("n_groups", default=8)
    if heads % groups:
        raise hf.error("mamba_num_heads", heads, f"a multiple of {groups} (n_groups)")
    return Mamba2(
        num_key_heads=groups,
        num_value_heads=heads,
        key_head_dim=hf.integer("ssm_state_size", default=128),
        value_head_dim=hf.integer("mamba_head_dim", default=64),
        conv_width=hf.integer("conv_kernel", default=4, minimum=2),
        eps=eps,
    )


def _read_moe(hf: HfKeys, common: Common) -> MoE:
    if hf.integer("n_shared_experts", default=1) != 1:
        raise hf.error("n_shared_experts", hf.value("n_shared_experts"), "1")
    experts = Experts(hf.integer("moe_intermediate_size"), "relu2")
    shared = hf.integer("moe_shared_expert_intermediate_size")
    latent_size = hf.integer("moe_latent_size", default=0, minimum=0)
    moe = common.moe(read_biased_router(hf), experts, shared)
    if not latent_size:
        return moe
    return LatentMoE(router=moe.router, experts=experts, shared=moe.shared, latent_size=latent_size)


def read_nemotron_h(hf: HfKeys) -> ModelConfig:
    """`layer_norm_epsilon` is that of every norm, the one inside of Mamba-2 included."""
    hf.skip(*_HARMLESS)
    for name, only in (("use_bias", False), ("mamba_proj_bias", False), ("mlp_bias", False)):
        if hf.boolean(name, default=only) is not only:
            raise hf.error(name, not only, "false")
    if not hf.boolean("use_conv_bias", default=True):
        raise hf.error("use_conv_bias", False, "true")
    hf.refuse("mamba_hidden_act", "silu")
    hf.refuse("mlp_hidden_act", "relu2")
    hf.refuse("sliding_window")
    refuse_step_limits(hf)
    kinds = _read_kinds(hf)
    hf.skip("norm_eps")
    epsilon = hf.number("layer_norm_epsilon", "norm_eps", default=1e-5)
    keys = hf.with_values(rms_norm_eps=epsilon, num_hidden_layers=len(kinds))
    common = replace(read_common(keys), activation="relu2")
    refuse_bias(hf, common)
    moe, state_space = _read_moe(hf, common), _read_state_space(hf, common.eps)
    mixers: dict[str, Mixer] = dict.fromkeys(_STATE_SPACE, state_space) | dict.fromkeys(
        _ATTENDS, common.gqa(None)
    )
    ffns: dict[str, FeedForward] = dict.fromkeys(_MLP, common.dense()) | dict.fromkeys(_MOE, moe)
    return common.model(
        [mixers.get(kind) for kind in kinds],
        [ffns.get(kind) for kind in kinds],
        residuals=Single(),
        num_mtp_layers=read_mtp_layers(hf),
    )


_GGUF_KEYS = {
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "moe_latent_size": "moe_latent_size",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.group_count": "n_groups",
    "ssm.state_size": "ssm_state_size",
    "ssm.time_step_rank": "mamba_num_heads",
}


def _gguf(keys: MetadataKeys, config: Config) -> Config:
    """What a layer is, its tensors say; the width of an MLP, too."""
    # Of a rotation that no layer has, whatever the file says of it.
    keys.skip("ssm.inner_size", "rope.dimension_count")
    kinds, count = ["mlp"] * config["num_hidden_layers"], config["num_hidden_layers"]
    for tensor, kind in (("ssm_a", "mamba"), ("attn_q.weight", "attention"), ("ffn_gate_inp.weight", "moe")):
        for layer in keys.layers_with(tensor):
            kinds[layer] = kind
    found = grouped(keys) | {
        "layers_block_type": kinds,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_head_dim": linear_heads(keys.model).value_dim,
    }
    widths = [keys.model.tensors.get(f"blk.{layer}.ffn_up.weight") for layer in range(count)]
    dense = [stored.shape[0] for stored in widths if stored is not None]
    return found | ({"intermediate_size": dense[0]} if dense else {})


_GGUF_RULES = (
    *gguf_linear("attn_norm", "norm"),
    *gguf_mamba2("mixer"),
    *gguf_linear("attn_q", "mixer.q_proj"),
    *gguf_linear("attn_k", "mixer.k_proj"),
    *gguf_linear("attn_v", "mixer.v_proj"),
    *gguf_linear("attn_output", "mixer.o_proj"),
    *gguf_linear("ffn_up", "mixer.up_proj"),
    *gguf_linear("ffn_down", "mixer.down_proj"),
    *gguf_linear("ffn_gate_inp", "mixer.gate"),
    gguf_layer("exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
    *gguf_linear("ffn_up_shexp", "mixer.shared_experts.up_proj"),
    *gguf_linear("ffn_down_shexp", "mixer.shared_experts.down_proj"),
    *gguf_linear("ffn_latent_down", "mixer.fc1_latent_proj"),
    *gguf_linear("ffn_latent_up", "mixer.fc2_latent_proj"),
)


FAMILIES = (
    Family(
        "nemotron_h",
        read_nemotron_h,
        TensorNames(
            (
                MTP,
                rename("backbone.embeddings.**", "model.embed_tokens.**"),
                rename("backbone.norm_f.**", "model.norm.**"),
                rename("backbone.layers.**", "model.layers.**"),
            ),
            ("per_expert_mixer",),
            # In GGUF files multi-token prediction follows as one more layer.
            mtp_layers=True,
        ),
        gguf=(GgufFamily("nemotron_h_moe", _GGUF_KEYS, 2, derive=_gguf, rules=_GGUF_RULES),),
    ),
)
