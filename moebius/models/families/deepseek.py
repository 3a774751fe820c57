"""DeepSeek-V2, V3, R1 and V3.1, Kimi-K2, and GLM-4.7-Flash: latent attention, shared experts, dense first
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import MLA_KEYS, Config, GgufFamily, deepseek_yarn, latent
from moebius.models.common import after_dense, listed_or_after_dense, read_mtp_layers
from moebius.models.config import ModelConfig
from moebius.models.family import Family, MtpFamily
from moebius.models.keys import HfKeys
from moebius.models.layers.router import RouterConfig
from moebius.models.mla import read_mla_common, read_moe, read_v3_router
from moebius.models.names import ROTARY, TensorNames

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

_NAMES = TensorNames((ROTARY,), mtp_layers=True)

_METHODS = ("greedy", "group_limited_greedy")


def read_deepseek_v2(hf: HfKeys) -> ModelConfig:
    """Reads DeepSeek-V2 and V2-Lite: softmax scores, chosen among all or in the best experts' groups."""
    hf.refuse("scoring_func", "softmax")
    hf.refuse("mlp_bias")
    # Transformers and the published code disagree about what it would do; no checkpoint has it.
    hf.refuse("norm_topk_prob")
    method = hf.string("topk_method", default="greedy")
    if method not in _METHODS:
        raise hf.error("topk_method", method, ", ".join(_METHODS))
    hf.skip("n_group", "topk_group")  # mean nothing to the greedy method
    is_grouped = method == "group_limited_greedy"
    router = RouterConfig(
        num_experts=hf.integer("n_routed_experts", "num_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="softmax",
        num_groups=hf.integer("n_group") if is_grouped else 1,
        top_groups=hf.integer("topk_group") if is_grouped else 1,
        group_score="max",
        scale=hf.number("routed_scaling_factor", default=1.0),
        float32_gate=True,
    )
    common, attention = read_mla_common(hf)
    moe = read_moe(hf, common, router)
    return common.model(attention, common.ffns(moe, after_dense(hf, common.num_layers)))


def _latent_v2(keys: MetadataKeys, config: Config) -> Config:
    found = latent(keys, config)
    return found | {"topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


def read_deepseek_v3(hf: HfKeys) -> ModelConfig:
    """Reads DeepSeek-V3, R1 and V3.1, and Kimi-K2: sigmoid router with correction bias."""
    return _v3(hf, after_dense)


def read_glm4_moe_lite(hf: HfKeys) -> ModelConfig:
    """Reads GLM-4.7-Flash: DeepSeek-V3 whose MoE layers may be listed by kind."""
    return _v3(hf, listed_or_after_dense)


def _v3(hf: HfKeys, moe_layers: Callable[[HfKeys, int], frozenset[int]]) -> ModelConfig:
    common, attention = read_mla_common(hf)
    moe = read_moe(hf, common, read_v3_router(hf))
    return common.model(
        attention, common.ffns(moe, moe_layers(hf, common.num_layers)), num_mtp_layers=read_mtp_layers(hf)
    )


FAMILIES = (
    Family(
        "deepseek_v2",
        read_deepseek_v2,
        _NAMES,
        gguf=(GgufFamily("deepseek2", MLA_KEYS, 1, derive=_latent_v2, yarn=deepseek_yarn),),
    ),
    Family(
        "deepseek_v3",
        read_deepseek_v3,
        _NAMES,
        # Kimi-K2 and GLM-4.7-Flash too.
        gguf=(GgufFamily("deepseek2", MLA_KEYS, 2, derive=latent, yarn=deepseek_yarn),),
        mtp=MtpFamily(),
    ),
    Family("kimi_k2", read_deepseek_v3, _NAMES, mtp=MtpFamily()),
    Family("glm4_moe_lite", read_glm4_moe_lite, _NAMES, mtp=MtpFamily()),
)
