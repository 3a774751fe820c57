"""Qwen3-MoE and Qwen3-Coder, and the language model of Qwen3-VL-MoE: norms of each query and key head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import SPARSE_KEYS, Config, GgufFamily, rotated
from moebius.models.common import read_common, read_one_window, read_softmax_router, read_sparse_layers
from moebius.models.config import ModelConfig
from moebius.models.family import Family, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import QkNorm
from moebius.models.names import ROTARY, TEXT, VISION, VISUAL, TensorNames
from moebius.models.rope import SectionDefaults, read_rope
from moebius.models.vision import read_grid_vision

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

_SECTIONS = SectionDefaults((24, 20, 20), interleaved=True)


def read_qwen3_moe(
    hf: HfKeys, *, default_theta: float = 10000.0, mrope: SectionDefaults | None = None
) -> ModelConfig:
    """Reads Qwen3-MoE and Qwen3-Coder; the defaults are those of the text tower that uses this too."""
    common = read_common(hf)
    slides = hf.boolean("use_sliding_window", default=False)
    # Qwen3-Coder names what its relatives have and it has not.
    hf.refuse("qkv_bias")
    hf.refuse("shared_expert_intermediate_size", 0)
    if not hf.boolean("use_qk_norm", default=True):
        raise hf.error("use_qk_norm", False, "true")
    layers = read_sparse_layers(hf, common.num_layers)
    router = read_softmax_router(hf)
    attention = common.gqa(
        read_rope(hf, common.head_dim, default_theta=default_theta, mrope=mrope),
        qk_norm=QkNorm(common.norm),
        output_bias=common.attention_bias,
        sight=read_one_window(hf, used=slides),
    )
    moe = common.moe(router, hf.integer("moe_intermediate_size"))
    return common.model(attention, common.ffns(moe, layers))


def read_qwen3_vl_moe(hf: HfKeys) -> ModelConfig:
    """Reads Qwen3-VL-MoE: Qwen3-MoE that always renormalises, with alternating mRoPE."""
    if hf.boolean("use_sliding_window", default=False):
        raise hf.error("use_sliding_window", True, "false")
    hf.skip("norm_topk_prob")
    return read_qwen3_moe(hf.with_values(norm_topk_prob=True), default_theta=500000.0, mrope=_SECTIONS)


def _qwen3_vl(keys: MetadataKeys, config: Config) -> Config:
    # Of images alone: a token of text has the same position on all axes.
    keys.skip("rope.dimension_sections", "n_deepstack_layers")
    return rotated(keys, config)


FAMILIES = (
    Family(
        "qwen3_moe",
        read_qwen3_moe,
        TensorNames((ROTARY,)),
        gguf=(
            GgufFamily("qwen3moe", SPARSE_KEYS, 1, {"norm_topk_prob": True}, rotated),
            # Without the vision tower, which is a file of another kind.
            GgufFamily("qwen3vlmoe", SPARSE_KEYS, 1, {"norm_topk_prob": True}, _qwen3_vl),
        ),
    ),
    Family(
        "qwen3_vl_moe",
        read_qwen3_vl_moe,
        # As published, and as transformers 5 writes it: shapes tell.
        TensorNames((VISION, TEXT), ("fused_transposed", "fused", "per_expert")),
        VisionFamily(read_grid_vision, (VISUAL,), tower="Qwen3VLMoe", processor="qwen"),
    ),
)
