"""How config.json of gpt-oss is read."""

from __future__ import annotations

from gpu_service.hf_config.common import read_common
from gpu_service.hf_config.keys import HfKeys
from gpu_service.hf_config.rope import read_rope
from gpu_service.model_config import ModelConfig, MoeConfig, RouterConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(hf: HfKeys, num_layers: int) -> tuple[int | None, ...]:
    """`layer_types` and `sliding_window` as the window of each layer; without a list, even layers slide.

    Empty where no layer has a window. Raises ModelConfigError for a list of another length, an unknown
    type, or layers that slide without a window.
    """
    default = tuple(FULL if layer % 2 else SLIDING for layer in range(num_layers))
    kinds = hf.strings("layer_types") or default
    if len(kinds) != num_layers:
        raise hf.error("layer_types", list(kinds), f"one type for each of the {num_layers} layers")
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown:
        raise hf.error("layer_types", unknown[0], f"{FULL}, {SLIDING}")
    if SLIDING not in kinds:
        hf.skip("sliding_window")
        return ()
    window = hf.integer("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_gpt_oss(hf: HfKeys) -> ModelConfig:
    """Every layer is MoE, its experts as wide as `intermediate_size` says; the router is a biased product."""
    common = read_common(hf)
    # What experts compute is the expert servers' (moebius.checkpoint.moe_config); the length before scaling
    # is in the scaling's own keys.
    hf.skip("swiglu_limit", "swiglu_alpha", "initial_context_length")
    router = RouterConfig(
        num_experts=hf.integer("num_local_experts", "num_experts"),
        top_k=hf.integer("num_experts_per_tok", "experts_per_token"),
        score="none",
        post="softmax",
        gate_bias=True,
    )
    layers = frozenset(range(common["num_layers"]))
    return ModelConfig(
        **(common | {"attention_bias": hf.boolean("attention_bias", default=True)}),
        model_type="gpt_oss",
        rope=read_rope(hf, common["head_dim"], default_theta=150000.0),
        moe=MoeConfig(router, common["intermediate_size"], 0, layers),
        attention_windows=read_windows(hf, common["num_layers"]),
        attention_sinks=True,
    )
