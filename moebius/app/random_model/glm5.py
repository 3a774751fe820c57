"""GLM-5.3-Flash's shape: linear attention (KDA), latent attention with an indexer in every fourth layer, four
residual streams, three dense layers.

Names, sizes and types are those that were published, without vision tower and MTP layer. Decays begin as in
transformers 5.23's initialisation: A_log 0, time steps between 0.001 and 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from moebius.app.random_model.shapes import Glm5Shape
from moebius.app.random_model.tensors import (
    MatrixDraw,
    ModelDraw,
    TensorGroup,
    TensorSpec,
    added_std,
    draw_dense,
    expert_groups,
    expert_matrices,
    mlp_matrices,
    one,
    ones,
    router,
)
from moebius.app.random_model.values import Array, bfloat16_bits, generator

# Of random numbers: attention matrices, MLP matrices, vectors and tables.
_ATTENTION, _MLP, _VECTORS = 1, 4, 5
_TIME_STEPS = (1e-3, 1e-1)


def glm5_layer(draw: ModelDraw, shape: Glm5Shape, layer: int) -> Iterator[TensorGroup]:
    """All tensors of a layer."""
    stem = f"{shape.prefix}layers.{layer}."
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield ones(f"{stem}{norm}.weight", shape.hidden_size)
    yield from _hyper_connections(draw, shape, layer, stem)
    attention = _latent_attention if shape.attends(layer) else _linear_attention
    yield from attention(draw, shape, layer, f"{stem}self_attn.")
    if layer < shape.dense_layers:
        yield from _mlp(draw, shape, layer, f"{stem}mlp.", shape.dense_size)
        return
    yield from _mlp(draw, shape, layer, f"{stem}mlp.shared_experts.", shape.moe_intermediate_size)
    size = (shape.num_experts, shape.hidden_size)
    yield one(f"{stem}mlp.gate.weight", size, partial(router, draw, layer))
    yield _float32(f"{stem}mlp.gate.e_score_correction_bias", (shape.num_experts,), _zeros)
    for expert in range(shape.num_experts):
        matrices = (
            replace(matrix, std=matrix.std / shape.routed_scaling) if matrix.name == "down_proj" else matrix
            for matrix in expert_matrices(shape, layer, expert)
        )
        yield from expert_groups(draw, f"{stem}mlp.experts.{expert}.", matrices)


def _hyper_connections(draw: ModelDraw, shape: Glm5Shape, layer: int, stem: str) -> Iterator[TensorGroup]:
    """Weights between streams that depend on the token, around those of equal streams."""
    rows, cols = (2 + shape.streams) * shape.streams, shape.streams * shape.hidden_size
    for number, half in enumerate(("attn", "ffn")):
        values = partial(_normal, draw, (_VECTORS, layer, number), 0.5 / math.sqrt(cols))
        yield _bfloat16(f"{stem}hc_{half}_fn", (rows, cols), values)
        yield _float32(f"{stem}hc_{half}_base", (rows,), _zeros)
        yield _float32(f"{stem}hc_{half}_scale", (3,), _unit)


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
        values = partial(_normal, draw, (_VECTORS, layer, 2 + number), 0.5)
        yield _bfloat16(f"{stem}{name}_conv1d.weight", (inner, 1, 4), values)
    yield _float32(f"{stem}A_log", (heads,), _zeros)
    yield _float32(f"{stem}dt_bias", (inner,), partial(_time_steps, draw, (_VECTORS, layer, 5)))
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
    yield one(f"{stem}indexer.k_norm.bias", (shape.index_dim,), partial(_zero_bits, shape.index_dim))
    tables = (("ape", shape.index_pool, shape.index_dim), ("gate", shape.index_dim, hidden))
    for number, (name, rows, cols) in enumerate(tables):
        key = (_ATTENTION, layer, len(sizes) + number)
        table = MatrixDraw(name, rows, cols, 1 / math.sqrt(cols), False, key)
        yield one(
            f"{stem}indexer.index_kpool_compress_{name}", (rows, cols), partial(draw_dense, draw, table)
        )


def _matrices(
    draw: ModelDraw, shape: Glm5Shape, layer: int, stem: str, sizes: dict[str, tuple[int, int]]
) -> Iterator[TensorGroup]:
    """Of an attention; what ends in o_proj is added to the residual streams."""
    for number, (name, (rows, cols)) in enumerate(sizes.items()):
        is_added = name == "o_proj"
        std = (added_std(shape) if is_added else 1.0) / math.sqrt(cols)
        matrix = MatrixDraw(name, rows, cols, std, is_added, (_ATTENTION, layer, number))
        yield one(f"{stem}{name}.weight", (rows, cols), partial(draw_dense, draw, matrix))


def _mlp(draw: ModelDraw, shape: Glm5Shape, layer: int, stem: str, inner: int) -> Iterator[TensorGroup]:
    """A dense layer's, or that of all tokens."""
    # As routed experts, of which the mean of several is taken.
    for matrix in mlp_matrices(shape.hidden_size, inner, added_std(shape) / 0.6, (_MLP, layer)):
        size = (matrix.rows, matrix.cols)
        yield one(f"{stem}{matrix.name}.weight", size, partial(draw_dense, draw, matrix))


def _bfloat16(name: str, size: tuple[int, ...], values: Callable[[tuple[int, ...]], Array]) -> TensorGroup:
    return TensorGroup((TensorSpec(name, "BF16", size),), lambda: [bfloat16_bits(values(size))])


def _float32(name: str, size: tuple[int, ...], values: Callable[[tuple[int, ...]], Array]) -> TensorGroup:
    return TensorGroup((TensorSpec(name, "F32", size),), lambda: [values(size)])


def _zeros(size: tuple[int, ...]) -> Array:
    return np.zeros(size, np.float32)


def _unit(size: tuple[int, ...]) -> Array:
    return np.ones(size, np.float32)


def _zero_bits(size: int) -> list[Array]:
    return [bfloat16_bits(np.zeros(size, np.float32))]


def _normal(draw: ModelDraw, key: tuple[int, ...], std: float, size: tuple[int, ...]) -> Array:
    values = generator(draw.seed, *key).standard_normal(size, np.float32)
    values *= np.float32(std)
    return values


def _time_steps(draw: ModelDraw, key: tuple[int, ...], size: tuple[int, ...]) -> Array:
    """What softplus turns into time steps, which are even on a logarithmic scale."""
    low, high = (math.log(step) for step in _TIME_STEPS)
    steps = np.exp(generator(draw.seed, *key).uniform(low, high, size))
    values: Array = (steps + np.log(-np.expm1(-steps))).astype(np.float32)
    return values
