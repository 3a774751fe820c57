"""All tensors of a random model, how each is drawn so that activations stay sane, and the files.

With unit-variance inputs (RMSNorm gives them) a matrix of deviation 1 / sqrt(in) gives unit variance back.
What is added to the residual stream is scaled down by sqrt(2 * layers), as GPT-2 initialises it
(Radford et al. 2019, section 2.3), so the stream's energy about doubles over all layers.
Logits have deviation LOGIT_STD: sampling from them is neither flat nor always the same token.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header
with dtype, shape and byte range of every tensor, then the data.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moebius.app.random_model.shapes import RandomShape
from moebius.app.random_model.values import (
    SCORE_STD,
    Array,
    ExpertFormat,
    bfloat16_bits,
    bfloat16_normal,
    generator,
    layer_biases,
)
from moebius.errors import UserError

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "I64": 8}
_ALIGNMENT = 64
# One pwrite of more than this many bytes would hold its array for long.
_PIECE = 2**26


@dataclass(frozen=True)
class TensorSpec:
    """Name in the checkpoint, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return ITEM_BYTES[self.dtype] * int(np.prod(self.shape))


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are drawn together; one thread's piece of work."""

    tensors: tuple[TensorSpec, ...]
    # Arrays in the order of `tensors`.
    draw: Callable[[], Sequence[Array]]


@dataclass(frozen=True)
class _Placed:
    path: Path
    offsets: tuple[int, ...]
    group: TensorGroup


def write_shards(
    directory: Path,
    shards: Sequence[Sequence[TensorGroup]],
    threads: int,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> int:
    """Writes all shards and their index; returns the bytes of all tensors.

    `on_bytes` gets the bytes written, from this thread. Raises UserError when the file system refuses.
    """
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    weight_map: dict[str, str] = {}
    total = 0
    try:
        placed: list[_Placed] = []
        for name, groups in zip(names, shards, strict=True):
            specs = [spec for group in groups for spec in group.tensors]
            weight_map |= dict.fromkeys((spec.name for spec in specs), name)
            total += sum(spec.nbytes for spec in specs)
            placed += _lay_out(directory / name, groups)
        for count in _in_threads(placed, threads):
            on_bytes(count)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")
    except OSError as error:
        raise UserError(f"{directory}: can not write {total / 2**30:.1f} GiB: {error.strerror}") from None
    return total


def _lay_out(path: Path, groups: Sequence[TensorGroup]) -> Iterator[_Placed]:
    """Writes the header, makes the file as long as it will be, and says where each group goes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in itertools.chain.from_iterable(group.tensors for group in groups):
        begin, end = end, end + spec.nbytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(len(encoded) + 8) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        position = file.tell()
        file.truncate(position + end)
    for group in groups:
        offsets = [position]
        for spec in group.tensors:
            offsets.append(offsets[-1] + spec.nbytes)
        position = offsets.pop()
        yield _Placed(path, tuple(offsets), group)


def _in_threads(placed: Sequence[_Placed], threads: int) -> Iterator[int]:
    """Bytes of each group as it is done. The first error ends everything that has not begun."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(_write, entry) for entry in placed]
        try:
            for future in concurrent.futures.as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _write(entry: _Placed) -> int:
    arrays = entry.group.draw()
    file = os.open(entry.path, os.O_WRONLY)
    try:
        for spec, offset, array in zip(entry.group.tensors, entry.offsets, arrays, strict=True):
            if array.nbytes != spec.nbytes:
                raise ValueError(f"{spec.name}: {array.nbytes} bytes were drawn, {spec.nbytes} are declared")
            data = np.ascontiguousarray(array).data.cast("B")
            begin = 0
            while begin < len(data):
                begin += os.pwrite(file, data[begin : begin + _PIECE], offset + begin)
    finally:
        os.close(file)
    return sum(spec.nbytes for spec in entry.group.tensors)


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
        """The same after a layer's RMSNorm: all layers together add about an embedding's energy."""
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
