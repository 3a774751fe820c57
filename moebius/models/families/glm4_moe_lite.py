"""GLM-4.7-Flash: DeepSeek-V3's router and attention; layers may be listed by kind."""

from __future__ import annotations

from moebius.models.common import read_mtp_layers
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.mla import listed_or_after_dense, read_mla_common, read_moe, read_v3_router
from moebius.models.names import ROTARY, TensorNames


def read_glm4_moe_lite(hf: HfKeys) -> ModelConfig:
    """MoE layers may be listed by kind."""
    common = read_mla_common(hf)
    return ModelConfig(
        **common,
        model_type="glm4_moe_lite",
        moe=read_moe(hf, read_v3_router(hf), listed_or_after_dense(hf, common["num_layers"])),
        num_mtp_layers=read_mtp_layers(hf),
    )


FAMILIES = (Family("glm4_moe_lite", read_glm4_moe_lite, TensorNames((ROTARY,), mtp_layers=True)),)
