"""Dense families, which are served only as small models that draft tokens (`small_model.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from moebius.checkpoint.gguf.family import ROPE_FACTORS_RULE, Config, GgufFamily, llama3_scaling, rotated
from moebius.checkpoint.gguf.names import PAIRED_RULES
from moebius.models.common import Common, read_common, read_one_window
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import QkNorm
from moebius.models.names import ROTARY, TensorNames
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys


def read_llama(hf: HfKeys) -> ModelConfig:
    """Reads Llama 2 to 3.3, and what is published as one."""
    hf.skip("pretraining_tp")
    hf.refuse("mlp_bias")
    return _read(hf, lambda common: {"output_bias": common.attention_bias})


def read_mistral(hf: HfKeys) -> ModelConfig:
    """Reads Mistral: a Llama whose layers may have a window."""
    return _read(hf, lambda common: {"sight": read_one_window(hf), "output_bias": common.attention_bias})


def read_qwen2(hf: HfKeys) -> ModelConfig:
    """Reads Qwen2 and Qwen2.5: queries, keys and values have biases."""
    _refuse_windows(hf)
    return _read(hf, lambda common: {"bias": True})


def read_qwen3(hf: HfKeys) -> ModelConfig:
    """Reads Qwen3: norms of each query and key head."""
    _refuse_windows(hf)
    return _read(hf, lambda common: {"qk_norm": QkNorm(common.norm), "output_bias": common.attention_bias})


def _refuse_windows(hf: HfKeys) -> None:
    hf.refuse("use_sliding_window")
    hf.skip("sliding_window", "layer_types")


def _read(hf: HfKeys, changes: Callable[[Common], dict[str, Any]]) -> ModelConfig:
    """Returns layers that are all alike; `changes`: fields of `GQA`."""
    common = read_common(hf)
    return common.model(common.gqa(read_rope(hf, common.head_dim), **changes(common)), common.dense())


def _gguf_llama(keys: MetadataKeys, config: Config) -> Config:
    """Returns the rotation; that of Llama 3.1 and later is scaled, and the files have the divisors."""
    own = rotated(keys, config)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    size, theta = keys.integer("rope.dimension_count", head), config.get("rope_theta", 10000.0)
    scaling = llama3_scaling(keys, size, theta, low=1.0, high=4.0, original=8192)
    return own if scaling is None else own | {"rope_scaling": scaling}


def _gguf_qwen2(keys: MetadataKeys, config: Config) -> Config:
    # The family always has biases; the general key would be one on the output projection.
    return rotated(keys, config) | {"attention_bias": False}


_NAMES = TensorNames((ROTARY,))
DENSE_FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            read_llama,
            _NAMES,
            # Mistral's files, too.
            gguf=(GgufFamily("llama", {}, 0, derive=_gguf_llama, rules=(*PAIRED_RULES, ROPE_FACTORS_RULE)),),
        ),
        Family("mistral", read_mistral, _NAMES),
        Family("qwen2", read_qwen2, _NAMES, gguf=(GgufFamily("qwen2", {}, 0, derive=_gguf_qwen2),)),
        Family("qwen3", read_qwen3, _NAMES, gguf=(GgufFamily("qwen3", {}, 0, derive=rotated),)),
    )
}
