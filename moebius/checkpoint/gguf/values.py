"""Values of GGUF tensors in the shapes that canonical names have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moebius.checkpoint.gguf.block_parts import BlockPart, take_part
from moebius.checkpoint.gguf.blocks import BlockType
from moebius.checkpoint.index import NUMPY_DTYPES, TensorInfo
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.stored_values import as_float32
from moebius.checkpoint.weight_schemes import Role

Bytes = NDArray[np.uint8]
# Rows that are read between wanted ones rather than begin another read.
_GAP = 64


@dataclass(frozen=True, slots=True)
class Dequantised:
    """Float32 values of quantised blocks; whole blocks are decoded and the columns between them dropped."""

    type: BlockType
    stored: TensorInfo  # U8 [matrices, rows, bytes of a row].

    def read(self, reader: SliceReader, stack_index: int, rows: range, cols: range) -> NDArray[np.generic]:
        found, first = _read_blocks(reader, self.type, self.stored, stack_index, rows, cols)
        values = self.type.dequantise(np.ascontiguousarray(found))
        begin = cols.start - first * self.type.weights
        return values[:, begin : begin + len(cols)]


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """Another tensor's values times a number for each of its matrices, in float32."""

    source: TensorInfo
    factors: NDArray[np.float32]  # [matrices].

    def read(self, reader: SliceReader, stack_index: int, rows: range, cols: range) -> NDArray[np.generic]:
        found = reader.read_slice(
            self.source,
            slice(rows.start, rows.stop, rows.step),
            slice(cols.start, cols.stop, cols.step),
            stack_index if len(self.source.shape) == 3 else None,
        )
        scaled: NDArray[np.float32] = as_float32(found, self.source.dtype) * self.factors[stack_index]
        return scaled


@dataclass(frozen=True, slots=True)
class PartOfBlocks:
    """Codes, scales or mins of quantised blocks, taken as `block_parts` says."""

    type: BlockType
    # U8 [matrices, rows, bytes of a row].
    stored: TensorInfo
    role: Role
    part: BlockPart

    def read(self, reader: SliceReader, stack_index: int, rows: range, cols: range) -> NDArray[np.generic]:
        """Columns are elements of the part."""
        step = self.part.step
        wanted = range(cols.start * step, cols.stop * step)
        found, first = _read_blocks(reader, self.type, self.stored, stack_index, rows, wanted)
        per_block = self.type.weights // step
        width = found.shape[1] // self.type.nbytes * per_block
        output = np.empty((len(rows), width), NUMPY_DTYPES[self.part.dtype])
        take_part(self.type.name, self.role, found, output)
        begin = cols.start - first * per_block
        return output[:, begin : begin + len(cols)]


@dataclass(frozen=True, slots=True, eq=False)
class RowFactors:
    """A number for each matrix, as one column that has it in every row."""

    factors: NDArray[np.float32]  # [matrices].

    def read(self, reader: SliceReader, stack_index: int, rows: range, cols: range) -> NDArray[np.generic]:
        return np.full((len(rows), len(cols)), self.factors[stack_index])


@dataclass(frozen=True, slots=True, eq=False)
class GatheredRows:
    """Rows of one or more tensors, counted through all of them, in another order.

    Rows are what the first axis counts; vectors have rows of one element. float32 unless all are of one type.
    """

    sources: tuple[TensorInfo, ...]
    order: NDArray[np.intp]  # [rows], for each row its place in the sources, one after the other.

    def read(self, reader: SliceReader, stack_index: int, rows: range, cols: range) -> NDArray[np.generic]:
        """Matrices of a stack have one row each, so that `stack_index` is a row."""
        wanted = self.order[stack_index + np.arange(rows.start, rows.stop, rows.step)]
        ends = np.cumsum([source.shape[0] for source in self.sources])
        ascending = np.argsort(wanted, kind="stable")
        places = wanted[ascending]
        owners = np.searchsorted(ends, places, side="right")
        cuts = np.flatnonzero((np.diff(places) > _GAP) | (np.diff(owners) > 0)) + 1
        output: NDArray[np.generic] | None = None
        for part in np.split(np.arange(len(places)), cuts):
            if not len(part):
                continue
            source = self.sources[owners[part[0]]]
            begin = int(places[part[0]]) - int(ends[owners[part[0]]]) + source.shape[0]
            offsets = places[part] - places[part[0]]
            span = range(begin, begin + int(offsets[-1]) + 1)
            block = _rows_of(reader, source, span, cols, self._as_stored)
            if output is None:
                output = np.empty((len(wanted), len(cols)), block.dtype)
            output[ascending[part]] = block[offsets]
        return np.empty((0, len(cols)), np.float32) if output is None else output

    @property
    def _as_stored(self) -> bool:
        return len({source.dtype for source in self.sources}) == 1


@dataclass(frozen=True, slots=True, eq=False)
class GatheredColumns:
    """Columns of a matrix in another order; all of them are read, whichever are wanted."""

    source: TensorInfo
    order: NDArray[np.intp]  # [columns], for each column its place in the source.

    def read(self, reader: SliceReader, stack_index: int, rows: range, cols: range) -> NDArray[np.generic]:
        block = reader.read_slice(self.source, slice(rows.start, rows.stop, rows.step))
        picked: NDArray[np.generic] = block[:, self.order[cols.start : cols.stop : cols.step]]
        return picked


@dataclass(frozen=True, slots=True)
class Applied:
    """A function of every element of a vector, computed in float32."""

    source: TensorInfo
    function: Callable[[NDArray[np.float32]], NDArray[np.float32]]

    def read(self, reader: SliceReader, stack_index: int, rows: range, cols: range) -> NDArray[np.generic]:
        return self.function(_rows_of(reader, self.source, rows, cols, False).astype(np.float32, copy=False))


@dataclass(frozen=True, slots=True)
class MergedHeads:
    """kv_b_proj of latent attention from its two parts: per head, rows that make keys, then values."""

    keys: TensorInfo  # [heads, rank, nope].
    values: TensorInfo  # [heads, value, rank].

    def read(self, reader: SliceReader, stack_index: int, rows: range, cols: range) -> NDArray[np.generic]:
        """Returns the values in float32."""
        size = self.keys.shape[2] + self.values.shape[1]
        heads = range(rows.start // size, -(-rows.stop // size))
        parts: list[NDArray[np.float32]] = []
        for head in heads:
            keys = as_float32(reader.read_slice(self.keys, stack_index=head), self.keys.dtype)
            values = as_float32(reader.read_slice(self.values, stack_index=head), self.values.dtype)
            parts += [keys.T, values]
        merged = np.concatenate(parts)
        begin = heads.start * size
        return merged[rows.start - begin : rows.stop - begin : rows.step, cols.start : cols.stop]


def rows_of_pairs(rows: NDArray[np.intp], head_dim: int) -> NDArray[np.intp]:
    """Returns where llama.cpp stores these rows of a query or key projection whose pairs are two halves of a
    head.

    It has the two members of a pair side by side: stored row 2i + j of a head is row j * half + i.
    """
    half, position = head_dim // 2, rows % head_dim
    stored: NDArray[np.intp] = rows - position + position % half * 2 + position // half
    return stored


def _rows_of(
    reader: SliceReader, source: TensorInfo, rows: range, cols: range, as_stored: bool
) -> NDArray[np.generic]:
    """Returns `[rows, cols]` of a matrix, or of a vector as one column; float32 unless `as_stored`."""
    is_matrix = len(source.shape) == 2
    block = reader.read_slice(
        source,
        slice(rows.start, rows.stop, rows.step),
        slice(cols.start, cols.stop, cols.step) if is_matrix else None,
    )
    found = block if as_stored else as_float32(block, source.dtype)
    return found.reshape(len(rows), len(cols))


def _read_blocks(
    reader: SliceReader, kind: BlockType, stored: TensorInfo, stack_index: int, rows: range, cols: range
) -> tuple[Bytes, int]:
    """Returns uint8 `[rows, blocks * nbytes]` of the blocks that hold the columns, and the first block's
    position.

    Rows may lie apart; a row's bytes follow one another.
    """
    first, last = cols.start // kind.weights, -(-cols.stop // kind.weights)
    found = reader.read_slice(
        stored,
        slice(rows.start, rows.stop, rows.step),
        slice(first * kind.nbytes, last * kind.nbytes),
        stack_index,
    )
    return found.view(np.uint8), first
