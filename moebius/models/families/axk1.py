"""A.X K1 (SK Telecom, 519B-A33B): DeepSeek-V3 that norms what its experts add.

Sources: configuration class, model and checkpoint conversion of transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace

from moebius.models.common import listed_or_after_dense, read_biased_router, read_mtp_layers
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.residual import Sequential
from moebius.models.mla import read_mla_common, read_moe
from moebius.models.names import ROTARY, TensorNames, rename


def read_axk1(hf: HfKeys) -> ModelConfig:
    """The first layer is dense unless it is said otherwise; queries always have a latent."""
    hf.refuse("scoring_func", "sigmoid")
    # Whether there is a bias, the tensors say.
    hf.skip("topk_method")
    common, attention = read_mla_common(hf.with_values(model_type="axk1"))
    if attention.q_lora_rank is None:
        raise hf.error("q_lora_rank", None, "an integer >= 1")
    router = replace(read_biased_router(hf, groups=(8, 4), scale=2.5), correction_bias_may_be_missing=True)
    moe = read_moe(hf, common, router, default_shared=1)
    layers = listed_or_after_dense(hf, common.num_layers, 1)
    normed, plain = Sequential(normed_output="ffn"), Sequential()
    return common.model(
        attention,
        common.ffns(moe, layers),
        residuals=[normed if layer in layers else plain for layer in range(common.num_layers)],
        num_mtp_layers=read_mtp_layers(hf),
    )


_NAMES = TensorNames(
    (
        ROTARY,
        rename("model.layers.*.mlp.post_mlp_layernorm.**", "model.layers.*.post_mlp_layernorm.**"),
    ),
    mtp_layers=True,
)
FAMILIES = (
    Family("axk1", read_axk1, _NAMES),
    # As the first releases spell it.
    Family("AXK1", read_axk1, _NAMES),
)
