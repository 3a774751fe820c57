"""gpt-oss: attention sinks, every other layer with a sliding window, biases on all projections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import ALL_SPARSE_KEYS, Config, GgufFamily, rotated
from moebius.models.common import read_common, read_windows, sliding
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.ffn import Experts
from moebius.models.layers.router import RouterConfig
from moebius.models.names import ROTARY, TensorNames, rename
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

_ROUTER = rename("model.layers.*.mlp.router.**", "model.layers.*.mlp.gate.**")


def read_gpt_oss(hf: HfKeys) -> ModelConfig:
    """Every layer is MoE, its experts as wide as `intermediate_size` says; the router has a bias."""
    common = read_common(hf)
    hf.skip("initial_context_length")  # the scaling's own keys have the length before it
    bias = hf.boolean("attention_bias", default=True)
    router = RouterConfig(
        num_experts=hf.integer("num_local_experts", "num_experts"),
        top_k=hf.integer("num_experts_per_tok", "experts_per_token"),
        score="none",
        post="softmax",
        gate_bias=True,
    )
    experts = Experts(
        common.intermediate_size,
        "gpt_oss",
        hf.number("swiglu_alpha", default=1.702),
        hf.number("swiglu_limit", default=7.0),
        has_bias=True,
    )
    attention = common.gqa(
        read_rope(hf, common.head_dim, default_theta=150000.0), bias=bias, output_bias=bias, has_sinks=True
    )
    return common.model(sliding(attention, read_windows(hf, common.num_layers)), common.moe(router, experts))


def _gpt_oss_yarn(keys: MetadataKeys) -> Config:
    # The published model has fractional bounds between its kinds of frequencies.
    return {"truncate": False}


FAMILIES = (
    Family(
        "gpt_oss",
        read_gpt_oss,
        TensorNames((ROTARY, _ROUTER), ("fused_interleaved",)),
        gguf=(GgufFamily("gpt-oss", ALL_SPARSE_KEYS, 3, derive=rotated, yarn=_gpt_oss_yarn),),
        overflows_float16=True,
    ),
)
