"""All tensors of a random model, and how each is drawn so that activations stay sane.

With unit-variance inputs (RMSNorm gives them) a matrix of deviation 1 / sqrt(in) gives unit variance back.
What is added to the residual stream is scaled down by sqrt(2 * layers), as GPT-2 initialises it
(Radford et al. 2019, section 2.3), so the stream's energy about doubles over all layers.
Logits have deviation LOGIT_STD: sampling from them is neither flat nor always the same token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from moebius.app.random_model.draws import Array, bfloat16_bits, bfloat16_normal, generator
from moebius.app.random_model.formats import ExpertFormat
from moebius.app.random_model.router import SCORE_STD, layer_biases
from moebius.app.random_model.shapes import RandomShape
from moebius.app.random_model.writer import TensorGroup, TensorSpec

LOGIT_STD = 4.0
# Element 0 of the residual stream, over sqrt(hidden): 1/36 of the energy, many deviations of the others.
CONSTANT = 1 / 6


@dataclass(frozen=True)
class ModelDraw:
    """What is drawn; filled by `write_random_model`."""

    shape: RandomShape
    experts: ExpertFormat
    # Zipf exponent of the routers; 0: even.
    skew: float
    seed: int

    @property
    def constant(self) -> float:
        """Element 0 of every embedding."""
        return CONSTANT * math.sqrt(self.shape.hidden_size)

    def normed_constant(self, layer: int) -> float:
        """The same behind a layer's RMSNorm: all layers together add about an embedding's energy."""
        return self.constant / math.sqrt(1.0 + CONSTANT**2 + layer / self.shape.num_layers)


def shards(draw: ModelDraw) -> list[list[TensorGroup]]:
    """One shard per layer, and one for embedding, final norm and head."""
    return [list(_layer(draw, layer)) for layer in range(draw.shape.num_layers)] + [list(_outside(draw))]


def _outside(draw: ModelDraw) -> Iterator[TensorGroup]:
    shape = draw.shape
    size = (shape.vocab_size, shape.hidden_size)
    yield _one("model.embed_tokens.weight", size, partial(_embedding, draw, size))
    yield _ones("model.norm.weight", shape.hidden_size)
    head = partial(_dense, draw, (0, 1), size, LOGIT_STD / math.sqrt(shape.hidden_size), False)
    yield _one("lm_head.weight", size, head)


def _embedding(draw: ModelDraw, size: tuple[int, int]) -> list[Array]:
    values = bfloat16_normal(generator(draw.seed, 0, 0), size, 1.0)
    values[:, 0] = bfloat16_bits(np.array([draw.constant], np.float32))[0]
    return [values]


def _layer(draw: ModelDraw, layer: int) -> Iterator[TensorGroup]:
    shape, stem = draw.shape, f"model.layers.{layer}."
    hidden, query = shape.hidden_size, shape.num_heads * shape.head_dim
    key = shape.num_kv_heads * shape.head_dim
    added = 1 / math.sqrt(2 * shape.num_layers)
    for norm, size in (
        ("input_layernorm", hidden),
        ("post_attention_layernorm", hidden),
        ("self_attn.q_norm", shape.head_dim),
        ("self_attn.k_norm", shape.head_dim),
    ):
        yield _ones(f"{stem}{norm}.weight", size)
    products = (("q", query, hidden), ("k", key, hidden), ("v", key, hidden), ("o", hidden, query))
    for number, (name, rows, cols) in enumerate(products):
        std = (added if name == "o" else 1.0) / math.sqrt(cols)
        filler = partial(_dense, draw, (1, layer, number), (rows, cols), std, name == "o")
        yield _one(f"{stem}self_attn.{name}_proj.weight", (rows, cols), filler)
    gate = (shape.num_experts, hidden)
    yield _one(f"{stem}mlp.gate.weight", gate, partial(_gate, draw, layer))
    for expert in range(shape.num_experts):
        yield from _expert(draw, layer, expert, added)


def _expert(draw: ModelDraw, layer: int, expert: int, added: float) -> Iterator[TensorGroup]:
    hidden, inner = draw.shape.hidden_size, draw.shape.moe_intermediate_size
    # silu(gate) * up of unit variances has a root mean square of 0.6; top_k results are averaged.
    down = added * math.sqrt(draw.shape.top_k) / 0.6
    matrices = (
        ("gate_proj", inner, hidden, 1.0),
        ("up_proj", inner, hidden, 1.0),
        ("down_proj", hidden, inner, down),
    )
    for number, (name, rows, cols, gain) in enumerate(matrices):
        stem = f"model.layers.{layer}.mlp.experts.{expert}.{name}."
        parts = draw.experts.parts(rows, cols)
        specs = tuple(TensorSpec(stem + suffix, dtype, size) for suffix, dtype, size in parts)
        key, std, zero = (2, layer, expert, number), gain / math.sqrt(cols), name == "down_proj"
        yield TensorGroup(specs, partial(_matrix, draw, key, rows, cols, std, zero))


def _matrix(
    draw: ModelDraw, key: tuple[int, ...], rows: int, cols: int, std: float, zero_row: bool
) -> list[Array]:
    return draw.experts.draw(generator(draw.seed, *key), rows, cols, std, zero_row)


def _gate(draw: ModelDraw, layer: int) -> list[Array]:
    shape = draw.shape
    rows = generator(draw.seed, 3, layer).standard_normal((shape.num_experts, shape.hidden_size), np.float32)
    rows *= SCORE_STD / math.sqrt(shape.hidden_size)
    biases = layer_biases(shape.num_experts, shape.top_k, draw.skew, layer, draw.seed)
    rows[:, 0] = biases / draw.normed_constant(layer)
    return [bfloat16_bits(rows)]


def _dense(
    draw: ModelDraw, key: tuple[int, ...], size: tuple[int, int], std: float, zero_row: bool
) -> list[Array]:
    values = bfloat16_normal(generator(draw.seed, *key), size, std)
    if zero_row:
        values[0] = 0
    return [values]


def _one(name: str, size: tuple[int, ...], filler: partial[list[Array]]) -> TensorGroup:
    return TensorGroup((TensorSpec(name, "BF16", size),), filler)


def _ones(name: str, size: int) -> TensorGroup:
    return _one(name, (size,), partial(_ones_values, size))


def _ones_values(size: int) -> list[Array]:
    return [bfloat16_bits(np.ones(size, np.float32))]
