"""What random models of GLM's families have in common: MLPs with a router by sigmoids, and small tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from lab.random_model.declared import layer_sizes
from lab.random_model.shapes import GlmShape
from lab.random_model.tensors import (
    ModelDraw,
    TensorGroup,
    TensorSpec,
    added_std,
    draw_dense,
    expert_groups,
    expert_matrices,
    mlp_matrices,
    one,
    router,
)
from lab.random_model.values import Array, bfloat16_bits, generator

# Of random numbers: MLP matrices, vectors and tables.
_MLP, VECTORS = 4, 5


def glm_mlp(draw: ModelDraw, shape: GlmShape, layer: int, stem: str) -> Iterator[TensorGroup]:
    """Yields a dense layer's, or a router with its experts and the one of all tokens."""
    sizes = layer_sizes(shape, layer)
    if layer < shape.dense_layers:
        yield from _mlp(draw, shape, layer, stem, "mlp.")
        return
    yield from _mlp(draw, shape, layer, f"{stem}shared_experts.", "mlp.shared_experts.")
    yield one(f"{stem}gate.weight", sizes["mlp.gate.weight"], partial(router, draw, layer))
    bias = "gate.e_score_correction_bias"
    yield float32(f"{stem}{bias}", sizes[f"mlp.{bias}"], zeros)
    for expert in range(shape.num_experts):
        matrices = (
            replace(matrix, std=matrix.std / shape.routed_scaling) if matrix.name == "down_proj" else matrix
            for matrix in expert_matrices(shape, layer, expert)
        )
        yield from expert_groups(draw, f"{stem}experts.{expert}.", matrices)


def _mlp(draw: ModelDraw, shape: GlmShape, layer: int, stem: str, declared: str) -> Iterator[TensorGroup]:
    """Yields a dense layer's, or that of all tokens; `declared`: what their canonical names begin with."""
    names = "gate_proj", "up_proj", "down_proj"
    sizes = {name: layer_sizes(shape, layer)[f"{declared}{name}.weight"] for name in names}
    # As routed experts, of which the mean of several is taken.
    for matrix in mlp_matrices(sizes, added_std(shape) / 0.6, (_MLP, layer)):
        size = (matrix.rows, matrix.cols)
        yield one(f"{stem}{matrix.name}.weight", size, partial(draw_dense, draw, matrix))


def bfloat16(name: str, size: tuple[int, ...], values: Callable[[tuple[int, ...]], Array]) -> TensorGroup:
    """Returns a tensor of its own, of the float32 values of that size."""
    return TensorGroup((TensorSpec(name, "BF16", size),), lambda: [bfloat16_bits(values(size))])


def float32(name: str, size: tuple[int, ...], values: Callable[[tuple[int, ...]], Array]) -> TensorGroup:
    """Returns the same as it is."""
    return TensorGroup((TensorSpec(name, "F32", size),), lambda: [values(size)])


def zeros(size: tuple[int, ...]) -> Array:
    """Returns float32."""
    return np.zeros(size, np.float32)


def normal(draw: ModelDraw, key: tuple[int, ...], std: float, size: tuple[int, ...]) -> Array:
    """Returns float32 of that deviation, from the stream of random numbers of that key."""
    values = generator(draw.seed, *key).standard_normal(size, np.float32)
    values *= np.float32(std)
    return values
