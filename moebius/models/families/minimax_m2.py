"""MiniMax-M2: queries and keys normed over all heads together, half of each head rotated."""

from __future__ import annotations

from moebius.checkpoint.gguf.family import ALL_SPARSE_KEYS, GgufFamily, rotated
from moebius.models.common import read_common, read_mtp_layers, refuse_bias
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import FullWidthQkNorm
from moebius.models.layers.router import RouterConfig
from moebius.models.names import MINIMAX_GATE, ROTARY, TensorNames, rename
from moebius.models.rope import read_rope

_BIAS = rename(
    "model.layers.*.block_sparse_moe.e_score_correction_bias",
    "model.layers.*.mlp.gate.e_score_correction_bias",
)


def read_minimax_m2(hf: HfKeys) -> ModelConfig:
    """Reads MiniMax-M2 and M2.1: every layer is MoE, and `intermediate_size` is an expert's."""
    common = read_common(hf)
    refuse_bias(hf, common)
    hf.refuse("sliding_window")
    hf.refuse("shared_intermediate_size", 0)
    hf.refuse("scoring_func", "sigmoid")
    hf.refuse("qk_norm_type", "per_layer")
    for name in ("use_qk_norm", "use_routing_bias"):
        if not hf.boolean(name, default=True):
            raise hf.error(name, False, "true")
    for kind in hf.integers("attn_type_list"):
        if kind != 1:
            raise hf.error("attn_type_list", kind, "1 (attention to the whole context)")
    # Of training, of MTP layers, and of parts that these models do not have.
    hf.skip("router_jitter_noise", "use_mtp", "mtp_transformer_layers", "mlp_intermediate_size")
    hf.skip("shared_moe_mode")
    router = RouterConfig(
        num_experts=hf.integer("num_local_experts", "num_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="sigmoid",
        correction_bias=True,
        post="renormalize",
        # As its checkpoints store the gate's weights.
        float32_gate=True,
    )
    head_dim = common.head_dim
    rotated = hf.integer("rotary_dim", default=head_dim) / head_dim
    attention = common.gqa(
        read_rope(hf, head_dim, default_theta=5e6, default_partial_factor=rotated),
        qk_norm=FullWidthQkNorm(common.eps),
    )
    return common.model(
        attention,
        common.moe(router, common.intermediate_size),
        num_mtp_layers=read_mtp_layers(hf, "num_mtp_modules"),
    )


FAMILIES = (
    Family(
        "minimax_m2",
        read_minimax_m2,
        TensorNames((ROTARY, MINIMAX_GATE, _BIAS), ("per_expert_w123",), mtp_layers=True),
        gguf=(GgufFamily("minimax-m2", ALL_SPARSE_KEYS, 2, derive=rotated),),
    ),
)
