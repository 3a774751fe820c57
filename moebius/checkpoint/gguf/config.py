"""The configuration that a GGUF model's metadata stands for, in the keys of Hugging Face's config.json."""

from __future__ import annotations

import math
from typing import Any

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.family import COMMON_KEYS, HARMLESS_KEYS, GgufFamily
from moebius.checkpoint.gguf.metadata_keys import MetadataKeys
from moebius.checkpoint.gguf.model import GgufModel

# Kinds of rotary scaling that files may ask for.
_SCALINGS = ("none", "linear", "yarn")
# Projections that have a bias where a model's attention has any.
_BIASED = ("attn_q", "attn_kv_a_mqa")
# general.file_type of files whose every tensor is float32.
_ALL_FLOAT32 = 0


def gguf_config(model: GgufModel, model_type: str, family: GgufFamily) -> dict[str, Any]:
    """What config.json of a family would say. Raises CheckpointError naming file, key and what is allowed.

    Keys of the architecture that nothing here understands are kept under their own names, so that a
    reader of the result can report them.
    """
    keys = MetadataKeys(model)
    config: dict[str, Any] = {"model_type": model_type}
    for name, target in {**COMMON_KEYS, **family.keys}.items():
        value = None if name in family.by_layer else keys.get(name)
        if value is not None:
            config[target] = value
    config |= _shape(model, keys, config) | _token_ids(model)
    config |= _rope(model, keys, family)
    config |= family.constants
    config |= family.derive(keys, config)
    _check_gating(keys, model_type, family)
    if "intermediate_size" not in config:
        # Files without dense layers need not say how wide one would be.
        config["intermediate_size"] = config.get("moe_intermediate_size")
    keys.skip(*HARMLESS_KEYS)
    return config | {name: model.metadata[name] for name in keys.unread}


def _shape(model: GgufModel, keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the sizes that tensors tell, or that are spelt differently."""
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{model.file}: tensor 'token_embd.weight' is missing, or no matrix")
    predicting = keys.integer("nextn_predict_layers", 0)
    layers = keys.integer("block_count") - predicting
    if layers < 1:
        raise CheckpointError(f"{model.file}: {model.architecture}.block_count leaves {layers} layers")
    found = {
        "num_hidden_layers": layers,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": any(keys.layers_with(f"{name}.bias") for name in _BIASED),
        "dtype": "float32" if model.metadata.get("general.file_type") == _ALL_FLOAT32 else "bfloat16",
    }
    return found | ({"num_nextn_predict_layers": predicting} if predicting else {})


def _token_ids(model: GgufModel) -> dict[str, Any]:
    """Returns the ids of special tokens; generation ends at the end of text, of a turn, or of a message."""
    ids = {
        name: model.metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos", "eot", "eom", "padding")
    }
    ends = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))}
    if ids["bos"] is not None:
        found["bos_token_id"] = ids["bos"]
    if ids["padding"] is not None:
        found["pad_token_id"] = ids["padding"]
    return found


def _rope(model: GgufModel, keys: MetadataKeys, family: GgufFamily) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type") or "none"
    if kind not in _SCALINGS:
        raise keys.error("rope.scaling.type", kind, ", ".join(_SCALINGS))
    factor = keys.get("rope.scaling.factor")
    original = keys.get("rope.scaling.original_context_length")
    if keys.get("rope.scaling.attn_factor") not in (None, 1.0):
        raise keys.error("rope.scaling.attn_factor", keys.get("rope.scaling.attn_factor"), "1.0")
    numbers = {
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
    }
    if kind == "none" or factor is None:
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= {name: value for name, value in numbers.items() if value is not None}
        scaling |= family.yarn(keys)
        if original is not None:
            scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _check_gating(keys: MetadataKeys, model_type: str, family: GgufFamily) -> None:
    found = keys.get("expert_gating_func")
    if found not in (None, 0, family.gating):
        raise keys.error("expert_gating_func", found, f"{family.gating} with {model_type}")
    scale = keys.get("expert_weights_scale")
    if "expert_weights_scale" not in family.keys and scale not in (None, 0.0, 1.0):
        raise keys.error("expert_weights_scale", scale, f"1.0 with {model_type}")
    if scale is not None and not math.isfinite(scale):
        raise keys.error("expert_weights_scale", scale, "a number")
