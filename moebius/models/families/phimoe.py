"""Phi-3.5-MoE (42B-A6.6B): Mixtral with LayerNorm, biases, LongRoPE, and a router that compares each expert
with those that are hardly worse.

Sources: configuration class, model and checkpoint conversion of transformers 5.23. Of LongRoPE's factors it
takes the short ones for all lengths; here, as in the published code, sequences beyond the original length
have the long ones (see `gpu_service.layers.decoder.RotaryEmbedding`).
"""

from __future__ import annotations

from moebius.models.common import read_common, read_one_window
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.norms import LayerNorm
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.router import RouterConfig
from moebius.models.names import MINIMAX_GATE, ROTARY, TensorNames, rename
from moebius.models.rope import read_rope

_ROPES = ("default", "longrope")


def _read_rope(hf: HfKeys, head_dim: int) -> RopeConfig:
    """Cosines and sines have a factor of the checkpoint's own, the same for short and long sequences."""
    rope = hf.value("rope_parameters") or hf.value("rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
    if kind not in _ROPES:
        raise hf.error("rope_type", kind, ", ".join(_ROPES))
    if not isinstance(rope, dict) or kind == "default":
        return read_rope(hf, head_dim, default_theta=1e6)
    factors = {rope.get(name) for name in ("short_mscale", "long_mscale")}
    if len(factors) > 1:
        raise hf.error("long_mscale", rope.get("long_mscale"), "what short_mscale is")
    known = {key: value for key, value in rope.items() if key not in ("short_mscale", "long_mscale")}
    changed = hf.with_values(rope_parameters=known | {"attention_factor": factors.pop()}, rope_scaling=None)
    return read_rope(changed, head_dim, default_theta=1e6)


def read_phimoe(hf: HfKeys) -> ModelConfig:
    """Every layer is MoE, and `intermediate_size` is an expert's."""
    hf.skip("input_jitter_noise", "hidden_dropout")  # of training
    common = read_common(hf)
    has_head_bias = hf.boolean("lm_head_bias", default=False)
    if has_head_bias and common.tie_word_embeddings:
        raise hf.error("lm_head_bias", True, "false with tie_word_embeddings")
    top_k = hf.integer("num_experts_per_tok", default=2)
    if top_k != 2:
        raise hf.error("num_experts_per_tok", top_k, "2")
    router = RouterConfig(
        num_experts=hf.integer("num_local_experts", "num_experts", default=16, minimum=2),
        top_k=top_k,
        score="sparse_mixer",
        mixer_width=2 * hf.number("router_jitter_noise", default=0.01),
    )
    attention = common.gqa(
        _read_rope(hf, common.head_dim), sight=read_one_window(hf), output_bias=common.attention_bias
    )
    return common.model(
        attention,
        common.moe(router, common.intermediate_size),
        norm=LayerNorm(common.eps, bias=True),
        head_bias=has_head_bias,
    )


_ROUTER = rename("model.layers.*.mlp.router.weight", "model.layers.*.mlp.gate.weight")
FAMILIES = (
    Family("phimoe", read_phimoe, TensorNames((ROTARY, MINIMAX_GATE, _ROUTER), ("per_expert_w123",))),
)
