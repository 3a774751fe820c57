"""Jamba (AI21): Mamba, or attention without positions in every eighth layer; experts in every second one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import Config, GgufFamily
from moebius.checkpoint.gguf.names import gguf_layer, gguf_linear
from moebius.models.common import Common, read_common, read_softmax_router
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.recurrent import SelectiveScan
from moebius.models.names import TensorNames, rename

if TYPE_CHECKING:
    # Few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

# Of other programs' kernels, and of how many logits they compute.
_HARMLESS = ("num_logits_to_keep", "use_associative_scan", "use_mamba_kernels", "use_mambapy")


def _every(hf: HfKeys, what: str, num_layers: int, period: int, offset: int) -> frozenset[int]:
    """Raises ModelConfigError where there is no such layer, or no other one."""
    period = hf.integer(f"{what}_layer_period", default=period)
    offset = hf.integer(f"{what}_layer_offset", default=offset, minimum=0)
    found = frozenset(layer for layer in range(num_layers) if layer % period == offset)
    if not found:
        raise hf.error(f"{what}_layer_offset", offset, f"less than {min(period, num_layers)}")
    return found


def _read_mamba(hf: HfKeys, common: Common) -> SelectiveScan:
    if not hf.boolean("mamba_conv_bias", default=True):
        raise hf.error("mamba_conv_bias", False, "true")
    if hf.boolean("mamba_proj_bias", default=False):
        raise hf.error("mamba_proj_bias", True, "false")
    hidden_size = common.hidden_size
    channels = hf.integer("mamba_expand", default=2) * hidden_size
    automatic = hf.value("mamba_dt_rank") in (None, "auto")
    return SelectiveScan(
        num_key_heads=channels,
        num_value_heads=channels,
        key_head_dim=hf.integer("mamba_d_state", default=16),
        value_head_dim=1,
        conv_width=hf.integer("mamba_d_conv", default=4, minimum=2),
        eps=common.eps,
        step_rank=math.ceil(hidden_size / 16) if automatic else hf.integer("mamba_dt_rank"),
    )


def read_jamba(hf: HfKeys) -> ModelConfig:
    """Dense layers and experts are of one width."""
    hf.skip(*_HARMLESS)
    hf.refuse("sliding_window")
    common: Common = read_common(hf)
    num_layers, router = common.num_layers, read_softmax_router(hf)
    if router.num_experts < 2:
        raise hf.error("num_experts", router.num_experts, "2 or more")
    attends = _every(hf, "attn", num_layers, 8, 4)
    attention, mamba = common.gqa(None), _read_mamba(hf, common)
    moe = common.moe(router, common.intermediate_size)
    return common.model(
        [attention if layer in attends else mamba for layer in range(num_layers)],
        common.ffns(moe, _every(hf, "expert", num_layers, 2, 1)),
    )


_GGUF_KEYS = {
    "expert_count": "num_experts",
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_dt_rank",
}


def _gguf(keys: MetadataKeys, config: Config) -> Config:
    """Which layers attend and which have experts, their tensors say."""
    inner = keys.integer("ssm.inner_size")
    found: Config = {"mamba_expand": inner // config["hidden_size"]}
    for what, tensor in (("attn", "attn_q.weight"), ("expert", "ffn_gate_inp.weight")):
        layers = keys.layers_with(tensor)
        if not layers:
            raise keys.error("block_count", config["num_hidden_layers"], f"a layer with {tensor}")
        period = layers[1] - layers[0] if len(layers) > 1 else config["num_hidden_layers"]
        found |= {f"{what}_layer_period": period, f"{what}_layer_offset": layers[0]}
    return found


_LAYER = "model.layers.*."
FAMILIES = (
    Family(
        "jamba",
        read_jamba,
        TensorNames(
            (
                rename("model.final_layernorm.**", "model.norm.**"),
                rename(_LAYER + "pre_ff_layernorm.**", _LAYER + "post_attention_layernorm.**"),
                rename(_LAYER + "feed_forward.router.**", _LAYER + "mlp.gate.**"),
                rename(_LAYER + "feed_forward.**", _LAYER + "mlp.**"),
            ),
            ("per_expert_feed_forward",),
        ),
        gguf=(
            GgufFamily(
                "jamba",
                _GGUF_KEYS,
                1,
                derive=_gguf,
                rules=(
                    *gguf_linear("ssm_in", "mamba.in_proj"),
                    gguf_layer("ssm_conv1d.weight", "mamba.conv1d.weight", "channel_taps"),
                    gguf_layer("ssm_conv1d.bias", "mamba.conv1d.bias"),
                    *gguf_linear("ssm_x", "mamba.x_proj"),
                    gguf_layer("ssm_dt.weight", "mamba.dt_proj.weight"),
                    gguf_layer("ssm_dt.bias", "mamba.dt_proj.bias"),
                    *gguf_linear("ssm_dt_norm", "mamba.dt_layernorm"),
                    *gguf_linear("ssm_b_norm", "mamba.b_layernorm"),
                    *gguf_linear("ssm_c_norm", "mamba.c_layernorm"),
                    gguf_layer("ssm_a", "mamba.A_log", "decay"),
                    gguf_layer("ssm_d", "mamba.D"),
                    *gguf_linear("ssm_out", "mamba.out_proj"),
                ),
            ),
        ),
    ),
)
