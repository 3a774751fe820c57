"""A matrix of any checkpoint, quantised or not, as a source for kernels to pack or dequantise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import TensorInfo
from moebius.checkpoint.reader import Array, SliceReader
from moebius.checkpoint.stored_arrays import StoredArray, as_slice, count_elements
from moebius.checkpoint.stored_values import (
    as_float32,
    check_finite,
    check_values,
    product_factors,
    unpack_bytes,
    unpack_nibbles,
)
from moebius.checkpoint.weight_schemes import E8M0, FLOAT_CODES, PLAIN, SCALE_TYPES, Role, WeightScheme
from moebius.kernels.source import ScaleType, SourceMatrix

# What a scale per whole row becomes: one that all groups of this size share.
ROW_GROUP = 128
# Types of group scales that packed int4 formats have, and how their names end.
_PACKED_SCALES = {"BF16": "", "F16": "_f16"}


def _shifted(wanted: range, first: int) -> range:
    return range(wanted.start + first, wanted.stop + first)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A logical `[out, in]` matrix: one expert's, or a dense one; filled by `MatrixFinder.find`."""

    scheme: WeightScheme
    shape: tuple[int, int]
    arrays: tuple[StoredArray, ...]
    bias: StoredArray | None
    # Where it is a part of the stored matrix: its first row and column in there, and that matrix' shape.
    first: tuple[int, int] = (0, 0)
    whole: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The tensor that holds the codes."""
        return self.arrays[0].tensor.name

    @property
    def tensor_names(self) -> Iterator[str]:
        """All tensors it is made of."""
        yield from (array.tensor.name for array in self.arrays)
        if self.bias is not None:
            yield self.bias.tensor.name

    @property
    def stored(self) -> Iterator[tuple[TensorInfo, int | None]]:
        """All tensors it is made of, and where they are stacks its place in each."""
        for array in self.arrays if self.bias is None else (*self.arrays, self.bias):
            yield array.tensor, array.expert_index

    def channels(self, wanted: range, are_columns: bool) -> StoredMatrix:
        """Returns some of an expert's channels: rows of gate and up, columns of down. Bounds as in `read`.

        Raises CheckpointError where they would divide what has one scale.
        """
        multiple = self.col_multiple if are_columns else self.row_multiple
        if wanted.start % multiple or wanted.stop % multiple:
            raise CheckpointError(
                f"{self.name!r} is used in parts of {len(wanted)} channels, but {self.scheme.name} allows "
                f"multiples of {multiple}"
            )
        if are_columns:
            # Parts are added: the bias is the first one's.
            bias = self.bias if wanted.start == 0 else None
            shape, first = (self.shape[0], len(wanted)), (0, wanted.start)
        else:
            shape, first, bias = (len(wanted), self.shape[1]), (wanted.start, 0), self.bias
        return replace(self, shape=shape, first=first, whole=self.shape, bias=bias)

    @property
    def nbytes(self) -> int:
        """Stored bytes of codes and scales of the whole matrix, or of the part that this is."""
        total = 0
        for array in self.arrays:
            # A channel has one element per row, a group index one per column.
            rows = 1 if array.role.role == "group_index" else len(array.out)
            width = 1 if array.role.role == "channel" else array.in_size
            total += rows * width * array.tensor.nbytes // math.prod(array.tensor.shape)
        return total if self.whole is None else total * math.prod(self.shape) // math.prod(self.whole)

    @property
    def packed_format(self) -> str:
        """The packed format that keeps it (see kernels/format/weight_format.h); "" if none can."""
        if self.scheme is PLAIN:
            tensor = self.arrays[0].tensor
            return tensor.packed_as or FLOAT_CODES[tensor.dtype]
        scales = self._array("scales")
        name = self.scheme.packed_format
        if self._has_powers and name == "fp8_g32":
            return "mxfp8"
        if scales is None or "{scale}" not in name:
            return name
        ending = _PACKED_SCALES.get(scales.tensor.dtype)
        return "" if ending is None else name.format(scale=ending)

    @property
    def is_rounded(self) -> bool:
        """Returns whether its packed format only comes near what is stored."""
        return self.scheme is PLAIN and bool(self.arrays[0].tensor.packed_as)

    @property
    def rounding(self) -> str:
        """Returns what its packed format changes, for people; empty where it holds what is stored."""
        if not self.is_rounded:
            return ""
        return f"quantised values to {self.packed_format} (weights by about 0.17 %)"

    @property
    def row_multiple(self) -> int:
        """Rows can be cut at multiples of this."""
        # Blocks of scales may be cut inside: kernels receive how far into a block the first row lies.
        words = (array.role for array in self.arrays if array.role.role != "scales")
        steps = [role.out_step for role in words if role.out_step]
        return math.lcm(*steps)

    @property
    def col_multiple(self) -> int:
        """Columns can be cut at multiples of this: scales are not divided, so groups are not either."""
        steps = (array.role.in_step or 1 for array in self.arrays)
        return math.lcm(*steps, self.scheme.groups_together * (self.scheme.group_size or 1))

    def read(self, reader: SliceReader, rows: slice | None = None, cols: slice | None = None) -> SourceMatrix:
        """Returns logical `[rows, cols]`; bounds must be multiples of `row_multiple` and `col_multiple`.

        Raises CheckpointError naming a tensor that cannot be read, or that holds NaN or infinity.
        """
        row_range = _shifted(range(self.shape[0])[rows or slice(None)], self.first[0])
        col_range = _shifted(range(self.shape[1])[cols or slice(None)], self.first[1])
        if self.scheme.reorders:
            return self._read_reordered(reader, row_range, col_range)
        scales = self._array("scales")
        return SourceMatrix(
            codes=self._codes(reader, row_range, col_range),
            layout=self.scheme.layout,
            code=self.scheme.code,
            rows=len(row_range),
            cols=len(col_range),
            scales=self._scales(reader, row_range, col_range),
            scale_type=self._scale_type(),
            group_size=(self.scheme.group_size or ROW_GROUP) if scales is not None else 0,
            scale_rows=scales.role.out_step if scales is not None else 1,
            scale_row_begin=self._row_begin(row_range),
            zeros=self._zeros(reader, row_range, col_range),
            zeros_offset=self.scheme.zeros_offset,
            mins=self._mins(reader, row_range, col_range),
            column_scale=self._column(reader, self._array("channel"), row_range),
            tensor_scale=self._tensor_scale(reader),
            bias=self._column(reader, self.bias, row_range),
        )

    def _read_reordered(self, reader: SliceReader, rows: range, cols: range) -> SourceMatrix:
        """Returns the part in floats: a group's columns are anywhere, which no layout of kernels has."""
        group = self._groups_of_columns(reader)[cols.start : cols.stop]
        scales = self._array("scales")
        assert scales is not None
        whole = range(self._stored_columns)
        found = as_float32(self._checked(scales, reader, rows, whole), scales.tensor.dtype)
        codes = self._integers(self._codes(reader, rows, cols), len(rows), len(cols))
        codes -= self._middles(reader, rows)[:, group]
        codes *= (found.T if scales.role.transposed else found)[:, group]
        bias = self._column(reader, self.bias, rows)
        return SourceMatrix(codes=codes, rows=len(rows), cols=len(cols), bias=bias)

    @property
    def holds_integers(self) -> bool:
        """Whether `read_sorted` can read it: integers in groups, and no part of another matrix."""
        is_known = self.scheme.bytes_in_words or self.scheme.layout in ("gptq_int4", "compressed_int4")
        return is_known and self.scheme.group_size > 0 and self.whole is None

    def column_order(self, reader: SliceReader) -> NDArray[np.uint32]:
        """Returns the stored columns in the order of their groups, uint32 `[columns]`.

        Raises CheckpointError naming the tensor where groups have not the size that the scheme says.
        """
        array = self._array("group_index")
        if array is None or not self.scheme.reorders:
            return np.arange(self.shape[1], dtype=np.uint32)
        groups, size = self._groups_of_columns(reader), self.scheme.group_size
        order = np.argsort(groups, kind="stable")
        if not np.array_equal(groups[order], np.arange(len(groups)) // size):
            found = ", ".join(map(str, np.unique(np.bincount(groups))))
            raise CheckpointError(
                f"tensor {array.tensor.name!r} has groups of {found} columns; packed experts have groups of "
                f"{size}: requantise them with --expert-dtype"
            )
        return order.astype(np.uint32)

    def read_sorted(
        self, reader: SliceReader, rows: NDArray[np.uint32], order: NDArray[np.uint32], cols: range
    ) -> SourceMatrix:
        """Reads some rows, in that order, and columns `cols` of those in the order of `column_order`.

        Where `holds_integers`; columns begin and end at whole groups. Raises CheckpointError as `read`.
        """
        if not self.scheme.reorders:
            self._check_group_index(reader)
        size = self.scheme.group_size
        whole = range(self.shape[0]), range(self.shape[1])
        codes, picked = self._codes(reader, *whole), order[cols.start : cols.stop]
        # Rows of words are picked before they are taken apart, which makes eight elements of each.
        if self.scheme.bytes_in_words:
            codes = codes.take(rows, 0).take(picked, 1)
        elif self.arrays[0].role.transposed:
            codes = unpack_nibbles(codes.take(rows, 1), 0).take(picked, 0).T
        else:
            codes = unpack_nibbles(codes.take(rows, 0), 1).take(picked, 1)
        scales = self._array("scales")
        assert scales is not None
        found = self._checked(scales, reader, *whole)
        groups = slice(cols.start // size, count_elements(cols.stop, size))
        zeros = self._zero_points(reader, whole[0])
        bias = self._column(reader, self.bias, whole[0])
        return SourceMatrix(
            codes=codes,
            code="int8" if self.scheme.bytes_in_words else "int4",
            rows=len(rows),
            cols=len(cols),
            scales=(found.T if scales.role.transposed else found)[rows, groups],
            scale_type=self._scale_type(),
            group_size=size,
            zeros=None if zeros is None else np.ascontiguousarray(zeros[rows, groups]),
            bias=None if bias is None else bias[rows],
        )

    @property
    def _stored_columns(self) -> int:
        """The columns of the stored matrix, of which this may be a part."""
        return (self.whole or self.shape)[1]

    def _integers(self, codes: Array, rows: int, cols: int) -> NDArray[np.float32]:
        """Returns `[rows, cols]`, 0 to 15 or -128 to 127."""
        if self.scheme.bytes_in_words:
            return codes[:rows, :cols].astype(np.float32)
        axis = 0 if self.arrays[0].role.transposed else 1
        unpacked = unpack_nibbles(codes, axis)
        return (unpacked if axis else unpacked.T)[:rows, :cols].astype(np.float32)

    def _middles(self, reader: SliceReader, rows: range) -> NDArray[np.float32]:
        """Returns what code means 0, `[rows, groups]`, or one value for all groups."""
        groups = count_elements(self._stored_columns, self.scheme.group_size)
        middle = 0 if self.scheme.bytes_in_words else 8
        zeros = self._zero_points(reader, rows)
        return np.full((1, groups), middle, np.float32) if zeros is None else zeros.astype(np.float32)

    def _zero_points(self, reader: SliceReader, rows: range) -> NDArray[np.uint8] | None:
        """Returns uint8 `[rows, groups]`, 0 to 15; None: the middle."""
        zeros, array = self._zeros(reader, rows, range(self._stored_columns)), self._array("zeros")
        if zeros is None or array is None:
            return None
        # Words are along out.
        codes = unpack_nibbles(zeros, 1 if array.role.transposed else 0)
        found = (codes.T if array.role.transposed else codes)[: len(rows)]
        # Sums of two such numbers stay below 256.
        points: NDArray[np.uint8] = (found + np.uint8(self.scheme.zeros_offset)) & np.uint8(15)
        return points

    def _groups_of_columns(self, reader: SliceReader) -> NDArray[np.int64]:
        """Returns `[cols]`. Raises CheckpointError naming the tensor where one is no group."""
        array = self._array("group_index")
        assert array is not None
        size = self.scheme.group_size
        found = reader.read(array.tensor).reshape(-1).astype(np.int64)
        # compressed-tensors has -1 where a module was quantised without an order.
        if (found == -1).all():
            return np.arange(self._stored_columns) // size
        groups = count_elements(self._stored_columns, size)
        if found.min() < 0 or found.max() >= groups:
            raise CheckpointError(
                f"tensor {array.tensor.name!r} has groups {found.min()} to {found.max()}; "
                f"allowed: 0 to {groups - 1}"
            )
        return found

    def _array(self, role: Role) -> StoredArray | None:
        for array in self.arrays:
            if array.role.role == role:
                return array
        return None

    def _codes(self, reader: SliceReader, rows: range, cols: range) -> Array:
        """Returns the codes as their layout has them: `[out, in]` for plain ones, whatever way they are
        stored.
        """
        array = self.arrays[0]
        stored, transposed = array.read(reader, rows, cols), array.role.transposed
        check_values(stored, array.tensor.dtype, array.tensor.name)
        if self.scheme.bytes_in_words:
            return unpack_bytes(stored, transposed)
        if self.scheme.layout == "mxfp4":
            # Pairs of codes, whatever the checkpoint calls their bytes.
            return stored.view(np.uint8)
        if not transposed or self.scheme.layout not in ("plain", "nvfp4"):
            return stored
        # Kernels take plain codes in either order, packed ones row by row.
        return stored.T if self.scheme.layout == "plain" else np.ascontiguousarray(stored.T)

    def _row_begin(self, rows: range) -> int:
        scales = self._array("scales")
        return (rows.start + scales.skipped) % scales.role.out_step if scales is not None else 0

    def _scale_type(self) -> ScaleType | None:
        scales = self._array("scales")
        if scales is None:
            return None
        return "float32" if self._widens_scales else SCALE_TYPES[scales.tensor.dtype]

    def _scales(self, reader: SliceReader, rows: range, cols: range) -> Array | None:
        scales = self._array("scales")
        if scales is None:
            return None
        self._check_group_index(reader)
        found = self._checked(scales, reader, rows, cols)
        found = self._per_group(found, scales, len(cols))
        if self.scheme.layout == "nvfp4":
            return np.ascontiguousarray(found.T) if scales.role.transposed else found
        if self.scheme.layout != "plain":
            return found
        values = as_float32(found, scales.tensor.dtype) if self._widens_scales else found
        return values.T if scales.role.transposed else values

    @property
    def _widens_scales(self) -> bool:
        """Blocks of fp8 are packed with float32 scales, whatever type is stored, but for MXFP8."""
        return self.scheme.code == "float8" and not self._has_powers

    @property
    def _has_powers(self) -> bool:
        """Whether scales are e8m0, as MXFP8 has them."""
        scales = self._array("scales")
        return self.scheme.group_size == 32 and scales is not None and scales.tensor.dtype in E8M0

    def _mins(self, reader: SliceReader, rows: range, cols: range) -> Array | None:
        mins = self._array("mins")
        if mins is None:
            return None
        return self._checked(mins, reader, rows, cols)

    def _checked(self, array: StoredArray, reader: SliceReader, rows: range, cols: range) -> Array:
        """Returns scales or mins, finite ones."""
        found = array.read(reader, rows, cols)
        if SCALE_TYPES[array.tensor.dtype] == "products":
            check_finite(product_factors(found), "F16", array.tensor.name)
        else:
            check_finite(found, array.tensor.dtype, array.tensor.name)
        return found

    def _zeros(self, reader: SliceReader, rows: range, cols: range) -> Array | None:
        zeros = self._array("zeros")
        if zeros is None:
            return None
        found = zeros.read(reader, rows, cols)
        middle = self.scheme.symmetric_zeros
        if middle is None:
            return self._per_group(found, zeros, len(cols))
        if not np.all(found.view(np.uint32) == middle):
            raise CheckpointError(
                f"tensor {zeros.tensor.name!r} holds zero points other than the middle, but "
                f"quantization_config says that {self.scheme.name} is symmetric"
            )
        return None

    def _per_group(self, found: Array, array: StoredArray, cols: int) -> Array:
        """Returns a value for the whole row or a wider group, repeated for groups that kernels know."""
        size, step = self.scheme.group_size, array.role.in_step
        axis = 0 if array.role.transposed else 1
        if not size:
            return np.repeat(found, count_elements(cols, ROW_GROUP), axis=axis)
        if step == size:
            return found
        repeated = np.repeat(found, step // size, axis=axis)
        return repeated.take(range(count_elements(cols, size)), axis=axis)

    def _column(
        self, reader: SliceReader, array: StoredArray | None, rows: range
    ) -> NDArray[np.float32] | None:
        if array is None:
            return None
        picked = array.out[rows.start : rows.stop]
        found = reader.read_slice(array.tensor, as_slice(picked), None, array.expert_index)
        check_finite(found, array.tensor.dtype, array.tensor.name)
        return as_float32(found, array.tensor.dtype).reshape(-1)

    def _tensor_scale(self, reader: SliceReader) -> float:
        factor, divisor = self._array("tensor"), self._array("tensor_reciprocal")
        array = factor or divisor
        if array is None:
            return 1.0
        found = reader.read(array.tensor).reshape(-1)[array.out.start :][:1]
        check_finite(found, array.tensor.dtype, array.tensor.name)
        value = float(as_float32(found, array.tensor.dtype)[0])
        if divisor is None:
            return value
        if value == 0.0:
            raise CheckpointError(f"tensor {array.tensor.name!r} is 0, but weights are divided by it")
        return 1.0 / value

    def _check_group_index(self, reader: SliceReader) -> None:
        """GPTQ with act-order permutes the columns; their groups then lie scattered over the row."""
        array = self._array("group_index")
        if array is None:
            return
        columns = self._stored_columns
        expected = np.arange(columns) // (self.scheme.group_size or columns)
        if not np.array_equal(reader.read(array.tensor).reshape(-1), expected):
            raise CheckpointError(
                f"tensor {array.tensor.name!r} reorders the columns (desc_act); only groups of "
                f"{self.scheme.group_size} consecutive columns are supported for {self.scheme.name}"
            )
