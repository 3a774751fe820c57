"""Where the values of parameters come from: tensors of floats, and quantised matrices, dequantised or kept.

Quantised weights are read at their stored size and dequantised block by block into the parameter, so that
peak memory stays the model plus one tensor. A rank reads the groups and words that its part lies in. Linear
layers may stay in the fp8 they are stored in: codes as they are, scales repeated for single rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gpu_service.device import dtype_name
from gpu_service.device.stream import own_pages
from gpu_service.layers.linear import PackedMaker
from gpu_service.loader.held import Fp8Form, KeptForm
from gpu_service.loader.names import Target
from gpu_service.ops.linear import GROUP
from moebius import _kernels
from moebius.checkpoint.index import TensorInfo
from moebius.checkpoint.reader import Array, SliceReader
from moebius.checkpoint.stored_matrix import StoredMatrix
from moebius.checkpoint.stored_values import check_values
from moebius.checkpoint.weight_schemes import WeightScheme
from moebius.kernels.source import SourceMatrix
from moebius.models.layers.ranks import ShardRange
from moebius.models.layers.weights import WeightUse

# Elements that are dequantised at once by a thread: their float32 values stay in its cache.
_BLOCK_ELEMENTS = 1 << 18
# Rows of a block: whole words, and mostly whole blocks of fp8 scales.
_BLOCK_ROWS = 8
# Elements of a tensor that are computed from others before they go into the parameter.
_DERIVED_ELEMENTS = 1 << 22
# The same of a matrix whose columns are in the order of activations.
_REORDERED_ELEMENTS = 1 << 25
# Types of tables of numbers that are no weights.
INTEGERS = ("I64", "I32")


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What a load works with; filled by `load.load_weights`."""

    reader: SliceReader
    module_of: Callable[[str], nn.Module]  # Of a parameter, by its canonical name.
    # Dequantises as many blocks at a time as it has threads.
    workers: Executor
    num_workers: int
    # Of weights that are kept as they are stored; None: there are none.
    packed_maker: PackedMaker | None = None


class WeightSource(Protocol):
    """One tensor of a checkpoint, by whatever number of arrays it is stored in."""

    def fill(self, target: Target, context: LoadContext, device: torch.device) -> None:
        """Write the target's part to its parameter, which gets memory on `device` if it has none.

        Raises CheckpointError naming a tensor that can not be read, or that holds NaN or infinity.
        """


def as_torch(array: Array, dtype: str) -> torch.Tensor:
    """Returns the same memory as a tensor; `dtype` is that of a float tensor in the checkpoint."""
    if dtype == "BF16":
        # torch reinterprets signed integers; numpy has no bfloat16.
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if dtype == "F8_E4M3":
        return torch.from_numpy(array).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)


# Several targets fill one parameter.
_making = threading.Lock()


def target_rows(target: Target, context: LoadContext, device: torch.device, beside: str = "") -> torch.Tensor:
    """Returns the rows that a target fills of its parameter, or of the one called `beside` of its module; any
    thread may be the first to ask.
    """
    module, parameter = context.module_of(target.parameter), beside or target.parameter.rpartition(".")[2]
    with _making:
        found = module.get_parameter(parameter)
        if found.is_meta:
            if target.weight.on_host and device.type != "cpu":
                memory = own_pages(found.shape, found.dtype)
            else:
                # Rows that no tensor fills (a padded vocabulary) must be finite.
                make = torch.empty if target.rows.size == found.shape[0] else torch.zeros
                memory = make(found.shape, dtype=found.dtype, device=device)
            found = nn.Parameter(memory, requires_grad=False)
            setattr(module, parameter, found)
    return found.data.narrow(0, target.begin, target.rows.size)


@dataclass(frozen=True, slots=True)
class PlainSource:
    """A tensor stored as floats, or of whole numbers, converted to the parameter's dtype."""

    info: TensorInfo

    def fill(self, target: Target, context: LoadContext, device: torch.device) -> None:
        output, cols = target_rows(target, context, device), target.cols
        picked = None if cols is None or cols.is_whole else cols.slice
        first, last, step = target.rows.begin, target.rows.end, self._step(target.rows.size)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            array = context.reader.read_slice(self.info, slice(begin, end), picked)
            if self.info.dtype not in INTEGERS:
                check_values(array, self.info.dtype, self.info.name, dtype_name(output.dtype))
            output[begin - first : end - first].copy_(as_torch(array, self.info.dtype))

    def _step(self, num_rows: int) -> int:
        """Rows that are read at once: all, unless the values have to be computed."""
        if self.info.derived is None or len(self.info.shape) < 2:
            return max(1, num_rows)
        return max(1, _DERIVED_ELEMENTS // math.prod(self.info.shape[1:]))


@dataclass(frozen=True, slots=True)
class ZeroSource:
    """What the checkpoint may leave out, where it does."""

    def fill(self, target: Target, context: LoadContext, device: torch.device) -> None:
        """Writes zeros."""
        target_rows(target, context, device).zero_()


@dataclass(frozen=True, slots=True)
class QuantisedSource:
    """A matrix that is dequantised in float32, then rounded to the parameter's dtype."""

    matrix: StoredMatrix

    def fill(self, target: Target, context: LoadContext, device: torch.device) -> None:
        output = target_rows(target, context, device)
        if not len(output):
            return
        first, step = target.rows.begin, self._step(output.shape)
        for begin in range(0, len(output), step):
            end = min(begin + step, len(output))
            rows = replace(target.rows, begin=first + begin, end=first + end)
            self._fill_rows(replace(target, rows=rows), output[begin:end], context)

    def _step(self, shape: torch.Size) -> int:
        """Rows that are read at once: all, unless they are read in floats."""
        return max(1, _REORDERED_ELEMENTS // shape[1]) if self.matrix.scheme.reorders else shape[0]

    def _fill_rows(self, target: Target, output: torch.Tensor, context: LoadContext) -> None:
        source, first_row, first_col = read_part(self.matrix, target, context.reader)
        wanted = slice(first_col, first_col + output.shape[1])
        for begin, values in _dequantised(source, context):
            # Finite codes and scales may multiply to values that are not.
            check_values(values, "F32", self.matrix.name, dtype_name(output.dtype))
            # Rows of this block that the rank wants, counted from its first one.
            first, last = max(begin, first_row), min(begin + len(values), first_row + len(output))
            block = torch.from_numpy(values[max(0, first - begin) : max(0, last - begin), wanted])
            output[max(0, first - first_row) : max(0, last - first_row)].copy_(block)


def read_part(matrix: StoredMatrix, target: Target, reader: SliceReader) -> tuple[SourceMatrix, int, int]:
    """Returns what of a matrix holds the target's part, in whole words and groups; row and column it begins
    at.
    """
    rows, cols = target.rows, target.cols or ShardRange.whole(matrix.shape[1])
    row_range, col_range = _outwards(rows, matrix.row_multiple), _outwards(cols, matrix.col_multiple)
    source = matrix.read(reader, rows=row_range, cols=col_range)
    return source, rows.begin - row_range.start, cols.begin - col_range.start


def _outwards(shard: ShardRange, multiple: int) -> slice:
    """Returns the smallest range around the shard that begins and ends at multiples, or at the end."""
    begin = shard.begin // multiple * multiple
    return slice(begin, min(-(-shard.end // multiple) * multiple, shard.total))


def _dequantised(
    source: SourceMatrix, context: LoadContext
) -> Iterator[tuple[int, np.typing.NDArray[np.float32]]]:
    """Yields the blocks of rows in order, each with its first row's position."""
    assert source.rows is not None
    assert source.cols is not None
    step = max(1, _BLOCK_ELEMENTS // source.cols // _BLOCK_ROWS) * _BLOCK_ROWS
    bounds = [(begin, min(begin + step, source.rows)) for begin in range(0, source.rows, step)]
    for first in range(0, len(bounds), context.num_workers):
        together = bounds[first : first + context.num_workers]
        parts = [source.take_rows(*bound) for bound in together]
        if len(parts) == 1:
            yield together[0][0], _kernels.dequantise_matrix(parts[0])
            continue
        found = context.workers.map(_kernels.dequantise_matrix, parts)
        yield from zip((begin for begin, _ in together), found, strict=True)


_WEIGHT, _SCALES = "weight", "weight_scales"


def names_of_parameters(expected: Mapping[str, Target], *uses: WeightUse) -> dict[str, list[str]]:
    """Returns the names that fill each parameter whose weights are used so."""
    found: dict[str, list[str]] = {}
    for name, target in expected.items():
        if target.weight.use in uses:
            found.setdefault(target.parameter, []).append(name)
    return found


def keep_stored_fp8(expected: Mapping[str, Target], sources: dict[str, WeightSource]) -> dict[str, KeptForm]:
    """Replaces the sources of products' weights that are stored in fp8 with all of their parts; returns their
    forms by parameter.

    What else holds a matrix (embeddings, projections that are absorbed) uses its values, so it gets them.
    """
    forms: dict[str, KeptForm] = {}
    for parameter, names in names_of_parameters(expected, "product").items():
        found = [source for name in names if isinstance(source := sources[name], QuantisedSource)]
        if len(found) < len(names) or not all(is_kept_fp8(source.matrix.scheme) for source in found):
            continue
        cols = expected[names[0]].cols
        forms[parameter] = Fp8Form(cols.begin % GROUP if cols is not None else 0)
        for name, source in zip(names, found, strict=True):
            sources[name] = Fp8Source(source.matrix)
    return forms


def is_kept_fp8(scheme: WeightScheme) -> bool:
    """Returns whether it is fp8 whose scales are of rows, or of blocks of whole groups of columns."""
    return scheme.code == "float8" and scheme.group_size in (0, GROUP)


@dataclass(frozen=True, slots=True)
class Fp8Source:
    """A matrix whose codes and scales are kept: see `ops.linear.fp8_linear`."""

    matrix: StoredMatrix

    def fill(self, target: Target, context: LoadContext, device: torch.device) -> None:
        """Writes codes and scales, both parameters of the `Linear`."""
        weight, scales = (target_rows(target, context, device, name) for name in (_WEIGHT, _SCALES))
        if not len(weight):
            return
        # Rows of fp8 are no words: the part begins with its own first one.
        source, _, first_col = read_part(self.matrix, target, context.reader)
        codes = np.ascontiguousarray(source.codes[:, first_col : first_col + weight.shape[1]])
        weight.copy_(torch.from_numpy(codes).view(torch.float8_e4m3fn))
        scales.copy_(torch.from_numpy(_row_scales(source, first_col // GROUP, scales.shape[1])))


def _row_scales(source: SourceMatrix, begin: int, groups: int) -> NDArray[np.float32]:
    """Returns `[rows, groups]` from those of blocks, rows or the whole matrix; `begin`: the first group."""
    rows = len(source.codes)
    found = np.ones((rows, groups), np.float32)
    if source.scales is not None:
        first = source.scale_row_begin
        scales = source.scales[:, begin : begin + groups]
        found *= np.repeat(scales, source.scale_rows, axis=0)[first : first + rows]
    if source.column_scale is not None:
        found *= source.column_scale[:, None]
    return found * np.float32(source.tensor_scale)
