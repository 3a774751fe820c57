"""GLM-5.3-Flash's shape: linear attention (KDA), latent attention with an indexer in every fourth layer, four
residual streams, three dense layers.

Names, sizes and types are those that were published, without vision tower and MTP layer. Decays begin as in
transformers 5.23's initialisation: A_log 0, time steps between 0.001 and 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from lab.random_model.glm import VECTORS, bfloat16, float32, glm_mlp, normal, zeros
from lab.random_model.shapes import Glm5Shape
from lab.random_model.tensors import (
    ATTENTION,
    MatrixDraw,
    ModelDraw,
    TensorGroup,
    added_std,
    draw_dense,
    one,
    ones,
)
from lab.random_model.values import Array, generator

_TIME_STEPS = (1e-3, 1e-1)


def glm5_layer(draw: ModelDraw, shape: Glm5Shape, layer: int) -> Iterator[TensorGroup]:
    """Yields all tensors of a layer."""
    stem = f"{shape.prefix}layers.{layer}."
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield ones(f"{stem}{norm}.weight", shape.hidden_size)
    yield from _hyper_connections(draw, shape, layer, stem)
    attention = _latent_attention if shape.attends(layer) else _linear_attention
    yield from attention(draw, shape, layer, f"{stem}self_attn.")
    yield from glm_mlp(draw, shape, layer, f"{stem}mlp.")


def _hyper_connections(draw: ModelDraw, shape: Glm5Shape, layer: int, stem: str) -> Iterator[TensorGroup]:
    """Weights between streams that depend on the token, around those of equal streams."""
    rows, cols = (2 + shape.streams) * shape.streams, shape.streams * shape.hidden_size
    for number, half in enumerate(("attn", "ffn")):
        values = partial(normal, draw, (VECTORS, layer, number), 0.5 / math.sqrt(cols))
        yield bfloat16(f"{stem}hc_{half}_fn", (rows, cols), values)
        yield float32(f"{stem}hc_{half}_base", (rows,), zeros)
        yield float32(f"{stem}hc_{half}_scale", (3,), _unit)


def _linear_attention(draw: ModelDraw, shape: Glm5Shape, layer: int, stem: str) -> Iterator[TensorGroup]:
    hidden, heads, narrow = shape.hidden_size, shape.linear_heads, shape.linear_dim
    inner = heads * narrow
    sizes = {
        "q_proj": (inner, hidden),
        "k_proj": (inner, hidden),
        "v_proj": (inner, hidden),
        "b_proj": (heads, hidden),
        "f_a_proj": (narrow, hidden),
        "f_b_proj": (inner, narrow),
        "g_a_proj": (narrow, hidden),
        "g_b_proj": (inner, narrow),
        "o_proj": (hidden, inner),
    }
    yield from _matrices(draw, shape, layer, stem, sizes)
    for number, name in enumerate("qkv"):
        # Four taps of half a deviation each keep it.
        values = partial(normal, draw, (VECTORS, layer, 2 + number), 0.5)
        yield bfloat16(f"{stem}{name}_conv1d.weight", (inner, 1, 4), values)
    yield float32(f"{stem}A_log", (heads,), zeros)
    yield float32(f"{stem}dt_bias", (inner,), partial(_time_steps, draw, (VECTORS, layer, 5)))
    yield ones(f"{stem}o_norm.weight", narrow)


def _latent_attention(draw: ModelDraw, shape: Glm5Shape, layer: int, stem: str) -> Iterator[TensorGroup]:
    hidden, heads = shape.hidden_size, shape.num_heads
    sizes = {
        "q_a_proj": (shape.query_rank, hidden),
        "q_b_proj": (heads * shape.head_dim, shape.query_rank),
        "kv_a_proj_with_mqa": (shape.key_value_rank, hidden),
        "kv_b_proj": (heads * (shape.head_dim + shape.value_dim), shape.key_value_rank),
        "o_proj": (hidden, heads * shape.value_dim),
        "indexer.wq_b": (shape.index_heads * shape.index_dim, shape.query_rank),
        "indexer.wk": (shape.index_dim, hidden),
        "indexer.weights_proj": (shape.index_heads, hidden),
    }
    yield from _matrices(draw, shape, layer, stem, sizes)
    yield ones(f"{stem}q_a_layernorm.weight", shape.query_rank)
    yield ones(f"{stem}kv_a_layernorm.weight", shape.key_value_rank)
    yield ones(f"{stem}indexer.k_norm.weight", shape.index_dim)
    yield bfloat16(f"{stem}indexer.k_norm.bias", (shape.index_dim,), zeros)
    tables = (("ape", shape.index_pool, shape.index_dim), ("gate", shape.index_dim, hidden))
    for number, (name, rows, cols) in enumerate(tables):
        key = (ATTENTION, layer, len(sizes) + number)
        table = MatrixDraw(name, rows, cols, 1 / math.sqrt(cols), False, key)
        yield one(
            f"{stem}indexer.index_kpool_compress_{name}", (rows, cols), partial(draw_dense, draw, table)
        )


def _matrices(
    draw: ModelDraw, shape: Glm5Shape, layer: int, stem: str, sizes: dict[str, tuple[int, int]]
) -> Iterator[TensorGroup]:
    """Yields the matrices of an attention; what ends in o_proj is added to the residual streams."""
    for number, (name, (rows, cols)) in enumerate(sizes.items()):
        is_added = name == "o_proj"
        std = (added_std(shape) if is_added else 1.0) / math.sqrt(cols)
        matrix = MatrixDraw(name, rows, cols, std, is_added, (ATTENTION, layer, number))
        yield one(f"{stem}{name}.weight", (rows, cols), partial(draw_dense, draw, matrix))


def _unit(size: tuple[int, ...]) -> Array:
    return np.ones(size, np.float32)


def _time_steps(draw: ModelDraw, key: tuple[int, ...], size: tuple[int, ...]) -> Array:
    """Returns what softplus turns into time steps, which are even on a logarithmic scale."""
    low, high = (math.log(step) for step in _TIME_STEPS)
    steps = np.exp(generator(draw.seed, *key).uniform(low, high, size))
    values: Array = (steps + np.log(-np.expm1(-steps))).astype(np.float32)
    return values
