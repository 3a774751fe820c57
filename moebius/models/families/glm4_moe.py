"""GLM-4.5 to 4.7, and the language models of GLM-4.5V and 4.6V: partial rotary, sigmoid router."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import DEEPSEEK_KEYS, Config, GgufFamily, grouped, rotated
from moebius.models.common import read_biased_router, read_common, read_mtp_layers
from moebius.models.config import ModelConfig
from moebius.models.family import Family, MtpFamily, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import QkNorm
from moebius.models.names import ROTARY, TEXT, VISION, VISUAL, TensorNames
from moebius.models.rope import SectionDefaults, read_rope
from moebius.models.vision import read_grid_vision

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

_SECTIONS = SectionDefaults((8, 12, 12), interleaved=False)


def read_glm4_moe(hf: HfKeys, *, mrope: SectionDefaults | None = None) -> ModelConfig:
    """Reads GLM-4.5 to 4.7: sigmoid router with groups, dense first layers, half of a head rotated."""
    common = read_common(hf)
    hf.refuse("sliding_window")
    first_moe = hf.integer("first_k_dense_replace", default=1, minimum=0)
    router = read_biased_router(hf)
    moe_size = hf.integer("moe_intermediate_size")
    shared = hf.integer("n_shared_experts", default=1, minimum=0) * moe_size
    attention = common.gqa(
        read_rope(hf, common.head_dim, default_partial_factor=0.5, mrope=mrope),
        qk_norm=QkNorm(common.norm) if hf.boolean("use_qk_norm", default=False) else None,
    )
    return common.model(
        attention,
        common.ffns(common.moe(router, moe_size, shared), range(first_moe, common.num_layers)),
        num_mtp_layers=read_mtp_layers(hf),
    )


def read_glm4v_moe(hf: HfKeys) -> ModelConfig:
    """GLM-4.5V and 4.6V: GLM-4.5 without norms of queries and keys, and mRoPE in consecutive sections."""
    if hf.boolean("use_qk_norm", default=False):
        raise hf.error("use_qk_norm", True, "false")
    bias = hf.boolean("attention_bias", default=True)
    return read_glm4_moe(hf.with_values(attention_bias=bias), mrope=_SECTIONS)


def _glm(keys: MetadataKeys, config: Config) -> Config:
    has_norm = bool(keys.layers_with("attn_q_norm.weight"))
    return rotated(keys, config) | grouped(keys) | {"use_qk_norm": has_norm}


FAMILIES = (
    Family(
        "glm4_moe",
        read_glm4_moe,
        TensorNames((ROTARY,), mtp_layers=True),
        gguf=(GgufFamily("glm4moe", DEEPSEEK_KEYS, 2, derive=_glm),),
        mtp=MtpFamily(),
    ),
    Family(
        "glm4v_moe",
        read_glm4v_moe,
        TensorNames((VISION, TEXT), mtp_layers=True),
        VisionFamily(read_grid_vision, (VISUAL,), tower="Glm4vMoe", processor="glm"),
    ),
)
