"""What several families' config.json say about routers and about which layers have one, in the same keys."""

from __future__ import annotations

from gpu_service.hf_config.keys import HfKeys
from gpu_service.model_config import RouterConfig


def read_softmax_router(hf: HfKeys, *, renormalizes: bool = False) -> RouterConfig:
    """Qwen's and OLMoE's: softmax over all experts.

    `renormalizes`: what a missing `norm_topk_prob` means in the family.
    """
    return RouterConfig(
        num_experts=hf.integer("num_experts", "num_local_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="softmax",
        post="renormalize" if hf.boolean("norm_topk_prob", default=renormalizes) else "none",
    )


def read_biased_router(hf: HfKeys, *, renormalizes: bool = True) -> RouterConfig:
    """DeepSeek-V3's: sigmoid scores, chosen with a correction bias, groups by the sum of their best two.

    `renormalizes`: what a missing `norm_topk_prob` means in the family.
    """
    hf.skip("moe_router_dtype")  # always float32 here
    return RouterConfig(
        num_experts=hf.integer("n_routed_experts", "num_local_experts", "num_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="sigmoid",
        correction_bias=True,
        num_groups=hf.integer("n_group", default=1),
        top_groups=hf.integer("topk_group", default=1),
        group_score="top2_sum",
        post="renormalize" if hf.boolean("norm_topk_prob", default=renormalizes) else "none",
        renormalize_epsilon=1e-20,
        scale=hf.number("routed_scaling_factor", default=1.0),
        float32_gate=True,
    )


def read_sparse_layers(hf: HfKeys, num_layers: int) -> frozenset[int]:
    """Qwen's MoE layers: every `decoder_sparse_step`-th, but those of `mlp_only_layers`."""
    dense = set(hf.integers("mlp_only_layers"))
    step = hf.integer("decoder_sparse_step", default=1)
    return frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)


def refuse_used_window(hf: HfKeys) -> None:
    """Raises when Qwen's sliding window is switched on; its size means nothing while it is not."""
    if hf.boolean("use_sliding_window", default=False):
        raise hf.error("use_sliding_window", True, "false")
    hf.skip("sliding_window")
