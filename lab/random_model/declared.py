"""The shapes of a random model's tensors: those that the layers of its family declare."""

from __future__ import annotations

from functools import lru_cache

from lab.random_model.shapes import RandomShape
from moebius.checkpoint.config_file import flat_config
from moebius.models.config import ModelConfig
from moebius.models.keys import HfKeys
from moebius.models.layers.ffn import Experts
from moebius.models.mtp import with_heads
from moebius.models.registry import family_of

Size = tuple[int, ...]


@lru_cache(maxsize=8)
def described(shape: RandomShape) -> ModelConfig:
    """Returns what the shape's config.json describes, layers of multi-token prediction included."""
    keys = HfKeys(shape.name, flat_config(shape.hf_config(None)))
    config = family_of(keys.string("model_type")).read(keys)
    return with_heads(config, shape.num_mtp_layers, shape.name) if shape.num_mtp_layers else config


@lru_cache(maxsize=1024)
def layer_sizes(shape: RandomShape, layer: int) -> dict[str, Size]:
    """Returns the shapes of a layer's tensors by canonical name, without routed experts'."""
    config = described(shape)
    return {weight.name: weight.shape for weight in config.layers[layer].weights(config.hidden_size)}


def expert_sizes(shape: RandomShape) -> dict[str, tuple[int, int]]:
    """Returns rows and columns of an expert's matrices, by the name of its projection."""
    config = described(shape)
    ffn = next(iter(config.routed.values()))
    experts: Experts = ffn.experts
    sizes = experts.matrices(ffn.expert_input_size(config.hidden_size))
    return {f"{name}_proj": size for name, size in sizes.items()}
