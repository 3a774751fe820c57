"""The same random models as one GGUF file, which llama.cpp reads too.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, counts, metadata as
typed key-value pairs, one entry per tensor (axes innermost first, offset into the data), then the data. The
blocks (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h):

    Q8_0  32 weights: float16 d, int8 q[32];                      value d * q
    Q4_0  32 weights: float16 d, 16 bytes of codes;               value d * (q - 8)
    Q4_K  256 weights: float16 d and dmin, 12 bytes with a scale s and a min m of 6 bits for each 32 weights,
          128 bytes of codes;                                     value d * s * q - dmin * m
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.random_model.declared import layer_sizes
from lab.random_model.shapes import RandomShape
from lab.random_model.tensors import (
    NUM_SPECIAL,
    MatrixDraw,
    ModelDraw,
    PlacedArrays,
    attention_matrices,
    embedding,
    expert_matrices,
    head,
    router,
)
from lab.random_model.values import INT4_STD, Array, generator, int4_words
from moebius.errors import UserError

_MAGIC, _VERSION, _ALIGNMENT = b"GGUF", 3, 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_SCALARS = {_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}
# Kinds of tokens, as tokenizer.ggml.token_type numbers them.
_NORMAL, _CONTROL = 1, 3
# A single draw of more rows than this would hold gigabytes as float32.
_ROWS_AT_ONCE = 8192
# Q4_K's scales are numbers of 6 bits around this one.
_MIDDLE_SCALE = 32


@dataclass(frozen=True)
class BlockFormat:
    """One of ggml's types; the tables below have those that are written here."""

    number: int
    weights: int
    nbytes: int
    # general.file_type of files of mostly this type.
    file_type: int = 0


F32 = BlockFormat(0, 1, 4)
Q8_0 = BlockFormat(8, 32, 34)
_Q4_0 = BlockFormat(2, 32, 18, file_type=2)
_Q4_K = BlockFormat(12, 256, 144, file_type=14)


@dataclass(frozen=True)
class GgufFormat:
    """How attention and experts are stored; embedding and head are Q8_0, vectors and routers float32."""

    blocks: BlockFormat
    # (rng, rows, cols, deviation, how many of the first rows are zero) to uint8 `[rows, bytes]`.
    draw: Callable[[np.random.Generator, int, int, float, int], NDArray[np.uint8]]


def _codes(rng: np.random.Generator, rows: int, cols: int) -> NDArray[np.uint8]:
    """Two a byte, `[rows, cols / 2]`."""
    return int4_words(rng, rows, cols).view(np.uint8)


def _q4_0(rng: np.random.Generator, rows: int, cols: int, std: float, zero_rows: int) -> NDArray[np.uint8]:
    count = rows * cols // _Q4_0.weights
    blocks = np.empty((count, _Q4_0.nbytes), np.uint8)
    blocks[:, :2] = _halves(std / INT4_STD * rng.uniform(0.75, 1.25, count))
    blocks[:, 2:] = _codes(rng, rows, cols).reshape(count, -1)
    rows_of_blocks = blocks.reshape(rows, -1)
    rows_of_blocks[:zero_rows] = 0
    return rows_of_blocks


def _q4_k(rng: np.random.Generator, rows: int, cols: int, std: float, zero_rows: int) -> NDArray[np.uint8]:
    """Mins are 8 times the scales, so that codes lie around zero as those of Q4_0 do."""
    count = rows * cols // _Q4_K.weights
    blocks = np.empty((count, _Q4_K.nbytes), np.uint8)
    factor = np.full(count, std / INT4_STD / _MIDDLE_SCALE)
    blocks[:, :2], blocks[:, 2:4] = _halves(factor), _halves(8 * factor)
    scales = rng.integers(_MIDDLE_SCALE - 8, _MIDDLE_SCALE + 9, (count, 8), np.uint8)
    low, high = scales[:, :4], scales[:, 4:]
    # The first four in six bits, the others' upper two bits above them and their lower four at the end.
    blocks[:, 4:8] = blocks[:, 8:12] = low | (high >> 4) << 6
    blocks[:, 12:16] = (high & 15) | (high & 15) << 4
    blocks[:, 16:] = _codes(rng, rows, cols).reshape(count, -1)
    rows_of_blocks = blocks.reshape(rows, -1)
    rows_of_blocks[:zero_rows] = 0
    return rows_of_blocks


def _halves(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Returns the bytes of float16, `[count, 2]`."""
    return values.astype(np.float16).view(np.uint8).reshape(-1, 2)


def quantise_q8_0(bits: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Maps bfloat16 bits `[rows, cols]` to blocks, uint8 `[rows, bytes]`."""
    rows = bits.shape[0]
    stored = np.empty((rows, bits.shape[1] // Q8_0.weights * Q8_0.nbytes), np.uint8)
    for begin in range(0, rows, _ROWS_AT_ONCE):
        part = _floats(bits[begin : begin + _ROWS_AT_ONCE]).reshape(-1, Q8_0.weights)
        factor = np.abs(part).max(axis=1, keepdims=True) / 127
        codes = np.rint(part / np.where(factor > 0, factor, 1)).astype(np.int8)
        blocks = np.concatenate((_halves(factor[:, 0].astype(np.float64)), codes.view(np.uint8)), axis=1)
        stored[begin : begin + _ROWS_AT_ONCE] = blocks.reshape(-1, stored.shape[1])
    return stored


def _floats(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


GGUF_FORMATS = {"q4_0": GgufFormat(_Q4_0, _q4_0), "q4_k": GgufFormat(_Q4_K, _q4_k)}


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the file, drawn in pieces that lie one after the other."""

    name: str
    # Outermost axis first.
    shape: tuple[int, ...]
    blocks: BlockFormat
    pieces: tuple[Callable[[], Array], ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) // self.blocks.weights * self.blocks.nbytes


def _tensors(draw: ModelDraw, chosen: GgufFormat) -> Iterator[_Tensor]:
    shape = draw.shape
    size = (shape.vocab_size, shape.hidden_size)
    yield _Tensor("token_embd.weight", size, Q8_0, (lambda: quantise_q8_0(embedding(draw)[0]),))
    for layer in range(shape.num_layers):
        yield from _layer(draw, chosen, layer)
    yield _ones("output_norm.weight", shape.hidden_size)
    yield _Tensor("output.weight", size, Q8_0, (lambda: quantise_q8_0(head(draw)[0]),))


def _layer(draw: ModelDraw, chosen: GgufFormat, layer: int) -> Iterator[_Tensor]:
    shape, stem = draw.shape, f"blk.{layer}."

    def matrix(one: MatrixDraw) -> Callable[[], Array]:
        rng = partial(generator, draw.seed, *one.key)
        return lambda: chosen.draw(rng(), one.rows, one.cols, one.std, draw.zero_rows(one))

    yield _ones(f"{stem}attn_norm.weight", shape.hidden_size)
    for one in attention_matrices(shape, layer):
        name = "attn_output" if one.name == "o" else f"attn_{one.name}"
        yield _Tensor(f"{stem}{name}.weight", (one.rows, one.cols), chosen.blocks, (matrix(one),))
    yield _ones(f"{stem}attn_q_norm.weight", shape.head_dim)
    yield _ones(f"{stem}attn_k_norm.weight", shape.head_dim)
    yield _ones(f"{stem}ffn_norm.weight", shape.hidden_size)
    gate = layer_sizes(shape, layer)["mlp.gate.weight"]
    yield _Tensor(f"{stem}ffn_gate_inp.weight", gate, F32, (lambda: _floats(router(draw, layer)[0]),))
    experts = [expert_matrices(shape, layer, expert) for expert in range(shape.num_experts)]
    for group in zip(*experts, strict=True):
        name = f"{stem}ffn_{group[0].name.removesuffix('_proj')}_exps.weight"
        size = (len(group), group[0].rows, group[0].cols)
        yield _Tensor(name, size, chosen.blocks, tuple(matrix(one) for one in group))


def _ones(name: str, size: int) -> _Tensor:
    return _Tensor(name, (size,), F32, (lambda: np.ones(size, np.float32),))


def lay_out_gguf(
    path: Path, draw: ModelDraw, name: str, tokens: Sequence[str], chat_template: str
) -> list[PlacedArrays]:
    """Writes the header, makes the file as long as it will be, and says what goes where.

    `name` is a key of `GGUF_FORMATS`; `tokens` are those of the vocabulary, special ones first. Raises
    UserError for a shape that the format has no blocks for.
    """
    tensors = gguf_tensors(draw, name)
    metadata = _metadata(draw.shape, GGUF_FORMATS[name].blocks.file_type, tokens, chat_template)
    parts = [_MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    parts += [_text(key) + struct.pack("<I", kind) + value for key, kind, value in metadata]
    end = 0
    offsets = []
    for tensor in tensors:
        offsets.append(end)
        axes = tuple(reversed(tensor.shape))
        parts.append(_text(tensor.name) + struct.pack(f"<I{len(axes)}Q", len(axes), *axes))
        parts.append(struct.pack("<IQ", tensor.blocks.number, end))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    header = b"".join(parts)
    header += bytes(-len(header) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + end)
    pieces = (_place(path, tensor, len(header) + at) for tensor, at in zip(tensors, offsets, strict=True))
    return list(itertools.chain.from_iterable(pieces))


def gguf_tensors(draw: ModelDraw, name: str) -> list[_Tensor]:
    """Returns all tensors in a format of `GGUF_FORMATS`.

    Raises UserError naming rows that no blocks divide.
    """
    chosen = GGUF_FORMATS[name]
    tensors = list(_tensors(draw, chosen))
    for tensor in tensors:
        if tensor.shape[-1] % tensor.blocks.weights:
            raise UserError(
                f"--format {name}: {tensor.name} has rows of {tensor.shape[-1]}; allowed: shapes whose rows "
                f"are multiples of {tensor.blocks.weights}"
            )
    return tensors


def _place(path: Path, tensor: _Tensor, offset: int) -> Iterator[PlacedArrays]:
    nbytes = tensor.nbytes // len(tensor.pieces)
    for number, piece in enumerate(tensor.pieces):
        yield PlacedArrays(path, ((tensor.name, offset + number * nbytes, nbytes),), _alone(piece))


def _alone(piece: Callable[[], Array]) -> Callable[[], Sequence[Array]]:
    return lambda: [piece()]


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _array(kind: int, values: Sequence[Any]) -> bytes:
    if kind == _STRING:
        return struct.pack("<IQ", kind, len(values)) + b"".join(map(_text, values))
    return struct.pack(f"<IQ{len(values)}{_SCALARS[kind][1]}", kind, len(values), *values)


def _metadata(
    shape: RandomShape, file_type: int, tokens: Sequence[str], chat_template: str
) -> list[tuple[str, int, bytes]]:
    numbers: dict[str, int | float | bool] = {
        "general.quantization_version": 2,
        "general.file_type": file_type,
        "qwen3moe.block_count": shape.num_layers,
        "qwen3moe.context_length": shape.max_position_embeddings,
        "qwen3moe.embedding_length": shape.hidden_size,
        "qwen3moe.feed_forward_length": 4 * shape.moe_intermediate_size,
        "qwen3moe.expert_feed_forward_length": shape.moe_intermediate_size,
        "qwen3moe.attention.head_count": shape.num_heads,
        "qwen3moe.attention.head_count_kv": shape.num_kv_heads,
        "qwen3moe.attention.key_length": shape.head_dim,
        "qwen3moe.attention.value_length": shape.head_dim,
        "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3moe.rope.freq_base": 1000000.0,
        "qwen3moe.expert_count": shape.num_experts,
        "qwen3moe.expert_used_count": shape.top_k,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    texts = {
        "general.architecture": "qwen3moe",
        "general.name": f"{shape.name} random",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.chat_template": chat_template,
    }
    kinds = [_CONTROL] * NUM_SPECIAL + [_NORMAL] * (len(tokens) - NUM_SPECIAL)
    arrays = {
        "tokenizer.ggml.tokens": _array(_STRING, tokens),
        "tokenizer.ggml.token_type": _array(_INT32, kinds),
        "tokenizer.ggml.merges": _array(_STRING, _merges(tokens)),
    }
    return [
        *((key, _STRING, _text(text)) for key, text in texts.items()),
        *(_number(key, value) for key, value in numbers.items()),
        *((key, _ARRAY, value) for key, value in arrays.items()),
    ]


def _number(key: str, value: float) -> tuple[str, int, bytes]:
    kind = _BOOL if isinstance(value, bool) else _UINT32 if isinstance(value, int) else _FLOAT32
    return key, kind, struct.pack(_SCALARS[kind], value)


def _merges(tokens: Sequence[str]) -> list[str]:
    """Returns as many merges as a published vocabulary has, so that the file takes as long to read.

    They join made-up words to longer ones. No text is cut otherwise by them: none gives the shortest words.
    """
    known = set(tokens)
    return [f"{token[:-1]} {token[-1]}" for token in tokens if token[:-1] in known and token[-1] in known]
