"""GLM-4.5-Air's shape: softmax attention with biases, one dense layer, a layer of multi-token prediction.

Names, sizes and types are those that were published, without the copies of embedding and head that the last
layer has there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from lab.random_model.declared import layer_sizes
from lab.random_model.glm import VECTORS, bfloat16, glm_mlp, normal
from lab.random_model.shapes import Glm4Shape
from lab.random_model.tensors import (
    FLAG,
    ModelDraw,
    TensorGroup,
    attention_matrices,
    draw_dense,
    one,
    ones,
)
from lab.random_model.values import Array, generator

_BIAS_STD = 0.1
# How much longer than a token's embedding the vector is that hides it from the layer of prediction.
_HIDING = 30.0


def glm4_layer(draw: ModelDraw, shape: Glm4Shape, layer: int) -> Iterator[TensorGroup]:
    """Yields all tensors of a layer; from `num_layers` on those of multi-token prediction."""
    stem, sizes = f"{shape.prefix}layers.{layer}.", layer_sizes(shape, layer)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if layer >= shape.num_layers:
        norms += ["enorm", "hnorm", "shared_head.norm"]
        yield bfloat16(f"{stem}eh_proj.weight", sizes["eh_proj.weight"], partial(_projection, draw, layer))
    for norm in norms:
        yield ones(f"{stem}{norm}.weight", *sizes[f"{norm}.weight"])
    for number, matrix in enumerate(attention_matrices(shape, layer)):
        name = f"{stem}self_attn.{matrix.name}_proj."
        yield one(f"{name}weight", (matrix.rows, matrix.cols), partial(draw_dense, draw, matrix))
        if matrix.name != "o":
            values = partial(normal, draw, (VECTORS, layer, number), _BIAS_STD)
            yield bfloat16(f"{name}bias", (matrix.rows,), values)
    yield from glm_mlp(draw, shape, layer, f"{stem}mlp.")


def _projection(draw: ModelDraw, layer: int, size: tuple[int, ...]) -> Array:
    """Returns what the layer of prediction makes of the next token's embedding and of a hidden state.

    With a chained head the embedding stays as it is, so that the draft token is the token's successor. Where
    its element `FLAG` is set, something is added that no token's embedding looks like, and it is rejected.
    """
    hidden, inputs = size
    rng = generator(draw.seed, VECTORS, layer, 3)
    if not draw.chained:
        return rng.standard_normal(size, np.float32) / np.float32(math.sqrt(inputs))
    values = np.eye(hidden, inputs, dtype=np.float32)
    values[:, FLAG] += rng.standard_normal(hidden, np.float32) * np.float32(_HIDING / draw.constant)
    return values
