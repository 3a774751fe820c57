"""GLM-5.3-Flash's shape: linear attention (KDA), latent attention with an indexer in every fourth layer, four
residual streams, three dense layers.

Names, sizes and types are those that were published, without vision tower and MTP layer. Decays begin as in
transformers 5.23's initialisation: A_log 0, time steps between 0.001 and 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from lab.random_model.declared import Size, layer_sizes
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
    stem, sizes = f"{shape.prefix}layers.{layer}.", layer_sizes(shape, layer)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield ones(f"{stem}{norm}.weight", *sizes[f"{norm}.weight"])
    yield from _hyper_connections(draw, shape, layer, stem)
    attention = _latent_attention if shape.attends(layer) else _linear_attention
    yield from attention(draw, shape, layer, f"{stem}self_attn.")
    yield from glm_mlp(draw, shape, layer, f"{stem}mlp.")


def _hyper_connections(draw: ModelDraw, shape: Glm5Shape, layer: int, stem: str) -> Iterator[TensorGroup]:
    """Weights between streams that depend on the token, around those of equal streams."""
    sizes = layer_sizes(shape, layer)
    for number, half in enumerate(("attn", "ffn")):
        weights, base, scale = (sizes[f"{half}_hc.{name}"] for name in ("fn", "base", "scale"))
        values = partial(normal, draw, (VECTORS, layer, number), 0.5 / math.sqrt(weights[1]))
        yield bfloat16(f"{stem}hc_{half}_fn", weights, values)
        yield float32(f"{stem}hc_{half}_base", base, zeros)
        yield float32(f"{stem}hc_{half}_scale", scale, _unit)


def _linear_attention(draw: ModelDraw, shape: Glm5Shape, layer: int, stem: str) -> Iterator[TensorGroup]:
    sizes = _attention_sizes(shape, layer)
    names = "q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "o_proj"
    yield from _matrices(draw, shape, layer, stem, names)
    for number, letter in enumerate("qkv"):
        # Four taps of half a deviation each keep it.
        values, name = partial(normal, draw, (VECTORS, layer, 2 + number), 0.5), f"{letter}_conv1d.weight"
        yield bfloat16(f"{stem}{name}", sizes[name], values)
    yield float32(f"{stem}A_log", sizes["A_log"], zeros)
    steps = partial(_time_steps, draw, (VECTORS, layer, 5))
    yield float32(f"{stem}dt_bias", sizes["dt_bias"], steps)
    yield ones(f"{stem}o_norm.weight", *sizes["o_norm.weight"])


def _latent_attention(draw: ModelDraw, shape: Glm5Shape, layer: int, stem: str) -> Iterator[TensorGroup]:
    sizes = _attention_sizes(shape, layer)
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    names += ["indexer.wq_b", "indexer.wk", "indexer.weights_proj"]
    yield from _matrices(draw, shape, layer, stem, names)
    for norm in ("q_a_layernorm", "kv_a_layernorm", "indexer.k_norm"):
        yield ones(f"{stem}{norm}.weight", *sizes[f"{norm}.weight"])
    yield bfloat16(f"{stem}indexer.k_norm.bias", sizes["indexer.k_norm.bias"], zeros)
    for number, kind in enumerate(("ape", "gate"), len(names)):
        name = f"indexer.index_kpool_compress_{kind}"
        rows, cols = sizes[name]
        table = MatrixDraw(kind, rows, cols, 1 / math.sqrt(cols), False, (ATTENTION, layer, number))
        yield one(f"{stem}{name}", (rows, cols), partial(draw_dense, draw, table))


def _attention_sizes(shape: Glm5Shape, layer: int) -> dict[str, Size]:
    """Returns the shapes of an attention's tensors, by their names below it."""
    stem, sizes = "self_attn.", layer_sizes(shape, layer)
    return {name.removeprefix(stem): size for name, size in sizes.items() if name.startswith(stem)}


def _matrices(
    draw: ModelDraw, shape: Glm5Shape, layer: int, stem: str, names: Sequence[str]
) -> Iterator[TensorGroup]:
    """Yields the matrices of an attention; what ends in o_proj is added to the residual streams."""
    sizes = _attention_sizes(shape, layer)
    for number, name in enumerate(names):
        rows, cols = sizes[f"{name}.weight"]
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
