"""DeepSeek-V3, R1 and V3.1, and Kimi-K2: latent attention, sigmoid router with correction bias."""

from __future__ import annotations

from moebius.checkpoint.gguf.family import MLA_KEYS, GgufFamily, deepseek_yarn, latent
from moebius.models.common import read_mtp_layers
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.mla import after_dense, read_mla_common, read_moe, read_v3_router
from moebius.models.names import ROTARY, TensorNames


def read_deepseek_v3(hf: HfKeys) -> ModelConfig:
    """DeepSeek-V3, R1 and V3.1, and Kimi-K2."""
    common = read_mla_common(hf)
    return ModelConfig(
        **common,
        model_type=hf.string("model_type"),
        moe=read_moe(hf, read_v3_router(hf), after_dense(hf, common["num_layers"])),
        num_mtp_layers=read_mtp_layers(hf),
    )


FAMILIES = (
    Family(
        "deepseek_v3",
        read_deepseek_v3,
        TensorNames((ROTARY,), mtp_layers=True),
        # Kimi-K2 and GLM-4.7-Flash too.
        gguf=(GgufFamily("deepseek2", MLA_KEYS, 2, derive=latent, yarn=deepseek_yarn),),
    ),
    Family("kimi_k2", read_deepseek_v3, TensorNames((ROTARY,), mtp_layers=True)),
)
