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
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.random_model.declared import expert_sizes, layer_sizes
from lab.random_model.replay import FIRST_CODE, FREE_STD, Replay
from lab.random_model.shapes import RandomShape
from lab.random_model.topics import (
    FIRST_ELEMENT,
    NO_TOPICS,
    NUM_ELEMENTS,
    Topics,
    fitted_share,
    router_columns,
    trajectory,
)
from lab.random_model.values import (
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
    draw: Callable[[], Sequence[Array]]  # Arrays in the order of `tensors`.


@dataclass(frozen=True)
class PlacedArrays:
    """Arrays that are drawn together, and where in which file they lie; one thread's piece of work."""

    path: Path
    # Of each array: its tensor's name, first byte in the file, bytes.
    places: tuple[tuple[str, int, int], ...]
    draw: Callable[[], Sequence[Array]]


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
        placed: list[PlacedArrays] = []
        for name, groups in zip(names, shards, strict=True):
            specs = [spec for group in groups for spec in group.tensors]
            weight_map |= dict.fromkeys((spec.name for spec in specs), name)
            total += sum(spec.nbytes for spec in specs)
            placed += _lay_out(directory / name, groups)
        write_arrays(placed, threads, on_bytes)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{directory}: cannot write {total / 2**30:.1f} GiB: {error.strerror}") from None
    return total


def _lay_out(path: Path, groups: Sequence[TensorGroup]) -> Iterator[PlacedArrays]:
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
        places = []
        for spec in group.tensors:
            places.append((spec.name, position, spec.nbytes))
            position += spec.nbytes
        yield PlacedArrays(path, tuple(places), group.draw)


def write_arrays(placed: Sequence[PlacedArrays], threads: int, on_bytes: Callable[[int], None]) -> None:
    """Draws and writes into files that are there; `on_bytes` gets counts, from this thread.

    The first error ends everything that has not begun.
    """
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(_write, entry) for entry in placed]
        try:
            for future in concurrent.futures.as_completed(futures):
                on_bytes(future.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _write(entry: PlacedArrays) -> int:
    arrays = entry.draw()
    file = os.open(entry.path, os.O_WRONLY)
    try:
        for (name, offset, nbytes), array in zip(entry.places, arrays, strict=True):
            if array.nbytes != nbytes:
                raise ValueError(f"{name}: {array.nbytes} bytes were drawn, {nbytes} are declared")
            data = np.ascontiguousarray(array).data.cast("B")
            begin = 0
            while begin < len(data):
                begin += os.pwrite(file, data[begin : begin + _PIECE], offset + begin)
    finally:
        os.close(file)
    return sum(nbytes for _, _, nbytes in entry.places)


LOGIT_STD = 4.0
# Tokens 0 to 2: padding, start and end. Single bytes follow, then words.
NUM_SPECIAL = 3
FIRST_WORD = NUM_SPECIAL + 256
# Element 0 of the residual stream, over sqrt(hidden): 1/36 of the energy, many deviations of the others.
CONSTANT = 1 / 6
# Element of an embedding that says whether draft tokens of MTP layers are rejected after that token; in
# a replay, that the token is one of text, after which the trace begins.
FLAG = 1
# Of random numbers: attention matrices, which tokens are flagged, what a replay leaves free.
ATTENTION, _FLAGS, _FREE_ELEMENTS = 1, 6, 10


@dataclass(frozen=True)
class ModelDraw:
    """What is drawn; filled by `write_random_model`."""

    shape: RandomShape
    experts: ExpertFormat
    # Zipf exponent of the routers; 0: even.
    skew: float
    seed: int
    # Whether the head answers each token with `successor` of it.
    chained: bool = False
    # Acceptance rate, in percent, of draft tokens that MTP layers propose for a chained head.
    mtp_acceptance: int = 100
    topics: Topics = NO_TOPICS
    # None: routers choose at random, as `skew` and `topics` say.
    replay: Replay | None = None

    def zero_rows(self, matrix: MatrixDraw) -> int:
        """Rows of a matrix that write to elements of the residual stream which no layer may change."""
        if not matrix.zero_row:
            return 0
        if self.replay is not None:
            # What an attention writes is read by the router of its own layer.
            layer = matrix.key[1]
            return self.replay.begin(layer - 1 if matrix.key[0] == ATTENTION else layer)
        return FIRST_ELEMENT + NUM_ELEMENTS if self.topics.is_on else 1

    @property
    def topic(self) -> float:
        """Deviation of a topic's elements in embedding rows: together they have the constant's energy."""
        return self.constant / math.sqrt(NUM_ELEMENTS)

    @property
    def constant(self) -> float:
        """The value of element 0 of every embedding row: a direction that all tokens share."""
        return CONSTANT * math.sqrt(self.shape.hidden_size)

    def normed_constant(self, layer: int) -> float:
        """Returns the constant after a layer's RMSNorm: all layers together add about an
        embedding's energy.
        """
        return self.constant / self.norm(layer)

    def normed_topic(self, layer: int) -> float:
        """Returns the size of a topic's elements after a layer's RMSNorm."""
        return self.topic / self.norm(layer)

    def norm(self, layer: int) -> float:
        """Root mean square of the stream that a layer's RMSNorm divides by."""
        energy = CONSTANT**2 * (2 if self.topics.is_on else 1)
        if self.replay is not None:
            energy += (FREE_STD**2 - 1) * (1 - self.replay.end / self.shape.hidden_size)
        return math.sqrt(1.0 + energy + layer / self.shape.num_layers)


def outside_layers(draw: ModelDraw) -> Iterator[TensorGroup]:
    """Returns embedding, final norm and head."""
    shape = draw.shape
    size = (shape.vocab_size, shape.hidden_size)
    yield one(f"{shape.prefix}embed_tokens.weight", size, partial(embedding, draw))
    yield ones(f"{shape.prefix}norm.weight", shape.hidden_size)
    yield one("lm_head.weight", size, partial(head, draw))


def embedding(draw: ModelDraw) -> list[Array]:
    """Returns bfloat16 bits `[vocab, hidden]`."""
    return [_embedding_rows(draw, 1.0)]


def _embedding_rows(draw: ModelDraw, std: float) -> NDArray[np.uint16]:
    shape = draw.shape
    values = bfloat16_normal(generator(draw.seed, 0, 0), (shape.vocab_size, shape.hidden_size), std)
    constant = bfloat16_bits(np.array([draw.constant * std], np.float32))[0]
    values[:, 0] = constant
    if shape.num_mtp_layers and draw.chained:
        order = generator(draw.seed, _FLAGS).permutation(shape.vocab_size)
        flagged = order >= draw.mtp_acceptance / 100 * shape.vocab_size
        values[:, FLAG] = np.where(flagged, constant, np.uint16(0))
    if draw.topics.is_on:
        found = trajectory(shape.vocab_size, draw.topics, draw.seed)[chain_places(shape.vocab_size)]
        values[:, FIRST_ELEMENT : FIRST_ELEMENT + NUM_ELEMENTS] = bfloat16_bits(found * (draw.topic * std))
    if draw.replay is not None:
        values[:, FLAG] = np.where(np.arange(shape.vocab_size) < FIRST_WORD, constant, np.uint16(0))
        free = (shape.vocab_size, shape.hidden_size - draw.replay.end)
        rng = generator(draw.seed, _FREE_ELEMENTS)
        values[:, draw.replay.end :] = bfloat16_normal(rng, free, FREE_STD * std)
        codes = bfloat16_bits(draw.replay.elements() * np.float32(std))
        values[:, FIRST_CODE : FIRST_CODE + codes.shape[1]] = codes[replayed_rows(shape, draw.replay)]
    return values


def replayed_rows(shape: RandomShape, replay: Replay) -> NDArray[np.int64]:
    """Returns int64 `[vocab_size]`: the trace's row that each token stands for; words in the order of the
    chain.
    """
    places = chain_places(shape.vocab_size)
    return np.where(places < FIRST_WORD, places, places - FIRST_WORD) % replay.num_rows


def successor(tokens: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """Returns the token that a chained head prefers after each.

    Words follow words, bytes follow bytes, and all of them before one comes again; special tokens neither
    follow nor are followed.
    """
    following = tokens.copy()
    for begin, end in ((NUM_SPECIAL, FIRST_WORD), (FIRST_WORD, vocab_size)):
        count = end - begin
        step = next((step for step in range(count // 3 * 2, count) if math.gcd(step, count) == 1), 1)
        inside = (tokens >= begin) & (tokens < end)
        following[inside] = begin + (tokens[inside] - begin + step) % count
    return following


@functools.cache  # embedding and head ask for it both
def chain_places(vocab_size: int) -> NDArray[np.int64]:
    """Returns int64 `[vocab_size]`: the place of each token in the chain of `successor`; bytes come before
    words.
    """
    following = successor(np.arange(vocab_size), vocab_size)
    places = np.arange(vocab_size)
    for begin, end in ((NUM_SPECIAL, FIRST_WORD), (FIRST_WORD, vocab_size)):
        token = begin
        for place in range(begin, end):
            places[token] = place
            token = following[token]
    return places


def head(draw: ModelDraw) -> list[Array]:
    """Returns bfloat16 bits `[vocab, hidden]`.

    A chained head's row of a token is the embedding of the token before it, which is half of the stream's
    energy: that token wins by many deviations, whatever other systems round differently.
    """
    shape = draw.shape
    std = LOGIT_STD / math.sqrt(shape.hidden_size)
    if not draw.chained:
        return [bfloat16_normal(generator(draw.seed, 0, 1), (shape.vocab_size, shape.hidden_size), std)]
    rows = np.empty((shape.vocab_size, shape.hidden_size), np.uint16)
    rows[successor(np.arange(shape.vocab_size), shape.vocab_size)] = _embedding_rows(draw, std)
    rows[:NUM_SPECIAL] = 0
    if draw.replay is not None:
        # After a text the trace begins, with the first word, whichever words stand for the same row.
        rows[NUM_SPECIAL:FIRST_WORD] = 0
        rows[FIRST_WORD, FLAG] = bfloat16_bits(np.array([3 * LOGIT_STD / CONSTANT], np.float32))[0]
    return [rows]


@dataclass(frozen=True)
class MatrixDraw:
    """How one matrix of a layer is drawn; filled by `attention_matrices` and `expert_matrices`."""

    # "q", "k", "v", "o", "gate_proj", "up_proj" or "down_proj".
    name: str
    rows: int
    cols: int
    std: float
    # What is added to the residual stream leaves element 0 alone.
    zero_row: bool
    # Its stream of random numbers is `generator(seed, *key)`.
    key: tuple[int, ...]


def attention_matrices(shape: RandomShape, layer: int) -> list[MatrixDraw]:
    """Returns the projections of a layer's attention."""
    found = []
    for number, name in enumerate("qkvo"):
        rows, cols = layer_sizes(shape, layer)[f"self_attn.{name}_proj.weight"]
        std = (added_std(shape) if name == "o" else 1.0) / math.sqrt(cols)
        found.append(MatrixDraw(name, rows, cols, std, name == "o", (ATTENTION, layer, number)))
    return found


def expert_matrices(shape: RandomShape, layer: int, expert: int) -> list[MatrixDraw]:
    """Returns gate, up and down of one expert."""
    # silu(gate) * up of unit variances has a root mean square of 0.6; top_k results are averaged.
    down = added_std(shape) * math.sqrt(shape.top_k) / 0.6
    return mlp_matrices(expert_sizes(shape), down, (2, layer, expert))


def mlp_matrices(sizes: Mapping[str, tuple[int, ...]], down: float, key: tuple[int, ...]) -> list[MatrixDraw]:
    """Returns gate, up and down; `down`: the deviation of what the last one gives for intermediates of 1."""
    found = []
    for number, (name, gain) in enumerate((("gate_proj", 1.0), ("up_proj", 1.0), ("down_proj", down))):
        rows, cols = sizes[name]
        std = gain / math.sqrt(cols)
        found.append(MatrixDraw(name, rows, cols, std, name == "down_proj", (*key, number)))
    return found


def added_std(shape: RandomShape) -> float:
    """Deviation of what each half of a layer adds to the residual stream."""
    return 1 / math.sqrt(2 * shape.num_layers)


def qwen3_layer(draw: ModelDraw, layer: int) -> Iterator[TensorGroup]:
    """Yields all tensors of a layer of the family qwen3_moe."""
    shape, stem = draw.shape, f"model.layers.{layer}."
    sizes = layer_sizes(shape, layer)
    norms = "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"
    for norm in norms:
        yield ones(f"{stem}{norm}.weight", *sizes[f"{norm}.weight"])
    for matrix in attention_matrices(shape, layer):
        name = f"{stem}self_attn.{matrix.name}_proj.weight"
        yield one(name, (matrix.rows, matrix.cols), partial(draw_dense, draw, matrix))
    yield one(f"{stem}mlp.gate.weight", sizes["mlp.gate.weight"], partial(router, draw, layer))
    for expert in range(shape.num_experts):
        matrices = expert_matrices(shape, layer, expert)
        yield from expert_groups(draw, f"{stem}mlp.experts.{expert}.", matrices)


def expert_groups(draw: ModelDraw, stem: str, matrices: Iterable[MatrixDraw]) -> Iterator[TensorGroup]:
    """Yields the tensors of one expert, in the format of all."""
    for matrix in matrices:
        parts = draw.experts.parts(matrix.rows, matrix.cols)
        specs = tuple(
            TensorSpec(f"{stem}{matrix.name}.{suffix}", dtype, size) for suffix, dtype, size in parts
        )
        yield TensorGroup(specs, partial(_expert_matrix, draw, matrix))


def _expert_matrix(draw: ModelDraw, matrix: MatrixDraw) -> list[Array]:
    rng = generator(draw.seed, *matrix.key)
    return draw.experts.draw(rng, matrix.rows, matrix.cols, matrix.std, draw.zero_rows(matrix))


def router(draw: ModelDraw, layer: int) -> list[Array]:
    """Returns bfloat16 bits `[num_experts, hidden]` of a layer's router."""
    shape = draw.shape
    rows = generator(draw.seed, 3, layer).standard_normal((shape.num_experts, shape.hidden_size), np.float32)
    if draw.replay is not None:
        begin = draw.replay.begin(layer)
        rows[:] = 0
        scale = np.float32(SCORE_STD * draw.norm(layer))
        rows[:, begin : begin + draw.replay.code_elements] = draw.replay.routers[layer] * scale
        return [bfloat16_bits(rows)]
    share = fitted_share(draw.topics, shape.num_experts, shape.top_k, draw.skew)
    rows *= SCORE_STD * math.sqrt((1.0 - share) / shape.hidden_size)
    if draw.topics.is_on:
        columns = router_columns(shape.num_experts, layer, draw.seed)
        columns *= SCORE_STD * math.sqrt(share) / draw.normed_topic(layer)
        rows[:, FIRST_ELEMENT : FIRST_ELEMENT + NUM_ELEMENTS] = columns
    biases = layer_biases(shape.num_experts, shape.top_k, draw.skew, layer, draw.seed)
    rows[:, 0] = biases / draw.normed_constant(layer)
    return [bfloat16_bits(rows)]


def draw_dense(draw: ModelDraw, matrix: MatrixDraw) -> list[Array]:
    """Returns bfloat16 bits `[rows, cols]`."""
    values = bfloat16_normal(generator(draw.seed, *matrix.key), (matrix.rows, matrix.cols), matrix.std)
    values[: draw.zero_rows(matrix)] = 0
    return [values]


def one(name: str, size: tuple[int, ...], filler: Callable[[], list[Array]]) -> TensorGroup:
    """Returns a bfloat16 tensor by itself."""
    return TensorGroup((TensorSpec(name, "BF16", size),), filler)


def ones(name: str, size: int) -> TensorGroup:
    """Returns a bfloat16 vector of ones, as norms begin."""
    return one(name, (size,), partial(_ones_values, size))


def _ones_values(size: int) -> list[Array]:
    return [bfloat16_bits(np.ones(size, np.float32))]
