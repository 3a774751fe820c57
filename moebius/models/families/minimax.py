"""MiniMax-Text-01 and MiniMax-M1 (456B-A46B): lightning attention in most layers, Mixtral's experts, and a
residual stream of what was normed.

Sources: MiniMax-01 (arXiv:2501.08313), configuration class and model of transformers 5.23, and MiniMax-M1's
published config.json, whose `model_type` and keys are others. Transformers' model rotates whole heads; the
published one rotates `rotary_dim` elements of each, which is read here (docs/checkpoints.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moebius.models.common import FULL, Common, read_common, read_one_window, refuse_bias
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.recurrent import Lightning
from moebius.models.layers.residual import NormedStream
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.router import RouterConfig
from moebius.models.names import MINIMAX_GATE, ROTARY, TensorNames, drop
from moebius.models.rope import read_rope

_LINEAR = "linear_attention"
# Of kernels' pieces, and of experts that all tokens have, which are refused.
_HARMLESS = ("block_size", "router_jitter_noise", "shared_moe_mode")


# By transformers' names, those of the published configuration. They count where a file has both: transformers
# writes its own defaults next to what it does not know.
_PUBLISHED = {
    "full_attn": "layernorm_full_attention",
    "linear_attn": "layernorm_linear_attention",
    "mlp": "layernorm_mlp",
}


def _linear_layers(hf: HfKeys, num_layers: int) -> frozenset[int]:
    """Returns layers by names or by the published numbers; without a list every second layer.

    Raises ModelConfigError unless there are layers of both kinds.
    """
    numbers = hf.integers("attn_type_list")
    if numbers:
        hf.skip("layer_types")
        if len(numbers) != num_layers or set(numbers) != {0, 1}:
            allowed = f"{num_layers} of 0 (linear attention) and 1 (full attention), both of them"
            raise hf.error("attn_type_list", list(numbers), allowed)
        return frozenset(layer for layer, number in enumerate(numbers) if number == 0)
    default = tuple(_LINEAR if layer % 2 else FULL for layer in range(num_layers))
    kinds = hf.strings("layer_types") or default
    if len(kinds) != num_layers or set(kinds) != {FULL, _LINEAR}:
        raise hf.error("layer_types", list(kinds), f"{num_layers} of {FULL!r} and {_LINEAR!r}, both of them")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)


def _residuals(hf: HfKeys) -> dict[bool, NormedStream]:
    """The residual stream of layers by whether their attention is linear."""
    if not hf.boolean("postnorm", default=True):
        raise hf.error("postnorm", False, "true")

    def weights(half: str) -> tuple[float, float]:
        alpha, beta = (
            hf.number(f"{_PUBLISHED[half]}_{name}", f"{half}_{name}_factor", default=1)
            for name in ("alpha", "beta")
        )
        return alpha, beta

    full, linear, mlp = (weights(half) for half in _PUBLISHED)
    return {False: NormedStream(full, mlp), True: NormedStream(linear, mlp)}


def _rope(hf: HfKeys, head_dim: int) -> tuple[RopeConfig, tuple[str, ...]]:
    """Returns whole heads, or `rotary_dim` elements of each; and a remark where another factor is not read.

    Published files have no `partial_rotary_factor`, and transformers' model does not look at it unless
    frequencies are scaled; then it can not be run. Raises ModelConfigError for that.
    """
    section = hf.section("rope_parameters") or hf.section("rope_scaling")
    factor = hf.number("partial_rotary_factor", default=1.0)
    kind = "default"
    if section is not None:
        factor = section.number("partial_rotary_factor", default=factor)
        kind = section.string("rope_type", "type", default=kind)
    rotated = hf.integer("rotary_dim", default=head_dim)
    if factor != 1.0 and kind != "default" and not hf.has("rotary_dim"):
        raise hf.error("partial_rotary_factor", factor, f"1, where rotation is scaled ({kind})")
    values: dict[str, Any] = {"partial_rotary_factor": None}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(own := hf.value(name), dict):
            values[name] = own | {"partial_rotary_factor": None}
    rope = read_rope(
        hf.with_values(**values), head_dim, default_theta=1e6, default_partial_factor=rotated / head_dim
    )
    if int(factor * head_dim) in (head_dim, rotated):
        return rope, ()
    remark = (
        f"partial_rotary_factor = {factor} is not used: {rotated} of a head's {head_dim} elements rotate, as "
        "in transformers; published files have rotary_dim where fewer do"
    )
    return rope, (remark,)


def read_minimax(hf: HfKeys) -> ModelConfig:
    """Every layer is MoE, and `intermediate_size` is an expert's."""
    hf.skip(*_HARMLESS)
    hf.refuse("shared_intermediate_size", 0, [0])
    common: Common = read_common(hf)
    refuse_bias(hf, common)
    num_layers, heads, head_dim = common.num_layers, common.num_heads, common.head_dim
    linear = _linear_layers(hf, num_layers)
    router = RouterConfig(
        num_experts=hf.integer("num_local_experts", "num_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="softmax",
        post="renormalize",
    )
    rope, remarks = _rope(hf, head_dim)
    attention, streams = common.gqa(rope, sight=read_one_window(hf)), _residuals(hf)
    lightning = Lightning(
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=head_dim,
        value_head_dim=head_dim,
        conv_width=1,
        eps=common.eps,
        layer=0,
        num_layers=num_layers,
    )
    layers = range(num_layers)
    return common.model(
        [replace(lightning, layer=layer) if layer in linear else attention for layer in layers],
        common.moe(router, common.intermediate_size),
        residuals=[streams[layer in linear] for layer in layers],
        remarks=remarks,
    )


# What transformers computes of `slope_rate` and saves all the same.
_COMPUTED = tuple(
    drop(f"model.layers.*.self_attn.{name}") for name in ("query_decay", "key_decay", "diagonal_decay")
)
_NAMES = TensorNames((ROTARY, MINIMAX_GATE, *_COMPUTED), ("per_expert_w123",))
FAMILIES = tuple(
    Family(model_type, read_minimax, _NAMES) for model_type in ("minimax", "minimax_text_01", "minimax_m1")
)
