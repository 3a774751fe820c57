"""How the metadata of a GGUF architecture says what config.json says, and what several architectures share.

Keys are llama.cpp's, below the architecture's name. What a family's code decides and its config.json states,
but GGUF leaves to llama.cpp's code, is among the constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from moebius.checkpoint.gguf.names import GgufRule

if TYPE_CHECKING:
    # Few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

Config = dict[str, Any]


def _nothing(keys: MetadataKeys, config: Config) -> Config:
    return {}


def _plain_yarn(keys: MetadataKeys) -> Config:
    return {}


@dataclass(frozen=True)
class GgufFamily:
    """How files of one architecture are read; `moebius.models.families` have them."""

    # general.architecture of the files. Of several families of one architecture that whose `gating` the file
    # names is read, without any the first by name.
    architecture: str
    keys: Mapping[str, str]  # Key below the architecture's name -> key of config.json, besides `COMMON_KEYS`.
    # expert_gating_func of the family: 1 softmax, 2 sigmoid, 3 softmax over the chosen; 0: it has no experts.
    gating: int
    constants: Config = field(default_factory=dict)  # What the family's code decides.
    # What follows from several keys, or from which tensors there are; given the config so far.
    derive: Callable[[MetadataKeys, Config], Config] = _nothing
    # Numbers of YaRN that the family has besides the common ones.
    yarn: Callable[[MetadataKeys], Config] = _plain_yarn
    # Keys, of `COMMON_KEYS` too, whose values differ from layer to layer: `derive` reads them.
    by_layer: tuple[str, ...] = ()
    # Names of tensors that differ from `names.COMMON_RULES`, tried before those.
    rules: tuple[GgufRule, ...] = ()


COMMON_KEYS: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_used_count": "num_experts_per_tok",
    "rope.freq_base": "rope_theta",
}
# Sizes that follow from others or from tensors, and hints for other engines.
HARMLESS_KEYS = (
    "attention.value_length",
    "expert_count",
    "rope.scaling.finetuned",
    "vocab_size",
)
SPARSE_KEYS = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
# Experts are as wide as `intermediate_size` says.
ALL_SPARSE_KEYS = {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"}
DEEPSEEK_KEYS = {
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
MLA_KEYS = DEEPSEEK_KEYS | {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
}

INDEXED_KEYS = MLA_KEYS | {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}


def rotated(keys: MetadataKeys, config: Config) -> Config:
    """Returns the part of a head that is rotated; without a key all of it."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"partial_rotary_factor": keys.integer("rope.dimension_count", head) / head}


def always_normed(keys: MetadataKeys, config: Config) -> Config:
    """Returns `rotated`, of families whose weights of chosen experts always sum to one."""
    if not keys.get("expert_weights_norm"):
        raise keys.error("expert_weights_norm", False, "true")
    return rotated(keys, config)


def grouped(keys: MetadataKeys) -> Config:
    """DeepSeek's groups of experts; a file without them has one."""
    return {
        "n_group": keys.integer("expert_group_count", 0) or 1,
        "topk_group": keys.integer("expert_group_used_count", 0) or 1,
        "norm_topk_prob": bool(keys.get("expert_weights_norm")),
    }


def sliding_layers(keys: MetadataKeys, config: Config, *, last_is_full: bool) -> list[bool]:
    """Returns whether each layer has the window: as listed; else all but every fourth, or what the file has
    for four.

    `last_is_full`: which one of each group sees the whole context, its last or its first layer. Raises
    CheckpointError for a list of fewer layers.
    """
    count, name = config["num_hidden_layers"], "attention.sliding_window_pattern"
    keys.skip(name)
    listed = keys.model.value(name)
    if not config.get("sliding_window"):
        return [False] * count
    if not isinstance(listed, list):
        every = 4 if listed is None else keys.integer(name)
        return [(layer + last_is_full) % every != 0 for layer in range(count)]
    if len(listed) < count:
        raise keys.error(name, listed, f"one for each of {count} layers")
    return [bool(slides) for slides in listed[:count]]


def latent(keys: MetadataKeys, config: Config) -> Config:
    """Newer files give the sizes of a head before its latent form under names of their own."""
    rope = keys.integer("rope.dimension_count")
    query = keys.integer("attention.key_length_mla", keys.integer("attention.key_length"))
    value = keys.integer("attention.value_length_mla", keys.integer("attention.value_length"))
    return grouped(keys) | {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": query - rope,
        "v_head_dim": value,
    }


def indexed(keys: MetadataKeys, config: Config) -> Config:
    """Returns `latent`, where layers that choose tokens have an indexer; others take over an earlier one's
    choice.
    """
    count = config["num_hidden_layers"]
    own = keys.layers_with("indexer.attn_k.weight")
    full = keys.flags("attention.indexer.types", count) or [layer in own for layer in range(count)]
    return latent(keys, config) | {"indexer_types": ["full" if one else "shared" for one in full]}


def linear_layers(keys: MetadataKeys) -> list[int]:
    """Returns layers with a decay, which have linear attention.

    Raises CheckpointError where there are none.
    """
    own = keys.layers_with("ssm_a")
    if not own:
        raise keys.error("block_count", keys.integer("block_count"), "a layer with ssm_a")
    return own


def linear_heads_of(keys: MetadataKeys, linear: list[int]) -> Config:
    """Returns the sizes of Kimi Delta Attention, of as many heads as the queries of its layers say."""
    head_dim = keys.integer("kda.head_dim")
    rows = keys.model.tensors[f"blk.{linear[0]}.attn_q.weight"].shape[0]
    return {
        "head_dim": head_dim,
        "num_heads": rows // head_dim,
        "short_conv_kernel_size": keys.integer("ssm.conv_kernel"),
    }


def deepseek_yarn(keys: MetadataKeys) -> Config:
    """The files have a tenth of the temperature's exponent; both of its uses are the same in all models."""
    tenth = keys.get("rope.scaling.yarn_log_multiplier")
    if not tenth:
        return {}
    mscale = round(tenth * 10, 6)
    return {"mscale": mscale, "mscale_all_dim": mscale}


# The divisors of frequencies are read as configuration.
ROPE_FACTORS_RULE = GgufRule(r"rope_freqs\.weight", None, ("rope_freqs.weight", None))


def llama3_scaling(
    keys: MetadataKeys, size: int, theta: float, *, low: float, high: float, original: int
) -> Config | None:
    """Returns Llama 3's rotary scaling of `size` rotated elements; None where the file has none.

    Files hold what each frequency is divided by, and 1 for pairs that do not rotate: the factor is the
    largest, and the original context follows from a pair between `low` and `high` turns; it is `original`
    where no pair is between them. Raises CheckpointError for other divisors.
    """
    stored = keys.floats("rope_freqs.weight")
    if stored is None:
        return None
    frequencies = theta ** -(np.arange(0, size, 2) / size)
    factors, rest = stored[: len(frequencies)].astype(np.float64), stored[len(frequencies) :]
    factor = float(factors.max(initial=1.0))
    between = np.flatnonzero((factors > 1 + 1e-3) & (factors < factor - 1e-3))
    if len(between):
        middle = between[len(between) // 2]
        kept = (1 / factors[middle] - 1 / factor) / (1 - 1 / factor)
        original = round((low + kept * (high - low)) * 2 * np.pi / frequencies[middle])
    kept = ((original * frequencies / (2 * np.pi) - low) / (high - low)).clip(0, 1)
    expected = 1 / (kept + (1 - kept) / factor)
    if len(factors) != len(expected) or not np.allclose(factors, expected, rtol=1e-4) or (rest != 1).any():
        allowed = f"factors of Llama 3's scaling with {low:g} and {high:g} turns"
        raise keys.error("rope_freqs.weight", stored.tolist(), allowed)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
