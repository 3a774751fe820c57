"""Dense layers that are kept in the format of their checkpoint: which ones, and what fills them."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from gpu_service.device import TORCH_DTYPES
from gpu_service.layers.linear import StoredWeight
from gpu_service.layers.rank_weights import empty_parameter
from gpu_service.loader.held import KeptForm, PackedForm
from gpu_service.loader.names import Target
from gpu_service.loader.sources import (
    LoadContext,
    PlainSource,
    QuantisedSource,
    WeightSource,
    names_of_parameters,
)
from gpu_service.ops.packed_weight import PackedPart
from moebius.checkpoint.kept_matrix import KeptMatrix, kept_floats, kept_matrix
from moebius.kernels.source import SourceMatrix
from moebius.kernels.weight_formats import PANEL_COLUMNS, WEIGHT_FORMATS
from moebius.models.config import DTypeName
from moebius.models.layers.ranks import ShardRange
from moebius.models.layers.weights import Weight

# Codes that are values.
FLOATS = frozenset({"float32", "bfloat16", "float16"})
# Elements that are read and packed at a time.
_BLOCK_ELEMENTS = 1 << 24
_making = threading.Lock()


@dataclass(frozen=True, slots=True)
class PackedSource:
    """A stored matrix that fills one part of a module's packed weight."""

    kept: KeptMatrix
    part: int

    def fill(self, target: Target, context: LoadContext, device: torch.device) -> None:
        """Packs the target's rows and columns. Raises CheckpointError as reading does."""
        module = context.module_of(target.parameter)
        assert isinstance(module, StoredWeight)
        assert context.packed_maker is not None, "the load has what computes with weights that are kept"
        with _making:
            packed = module.make_packed(context.packed_maker)
        rows, cols = target.rows, target.cols or ShardRange.whole(self.kept.matrix.shape[1])
        multiple = math.lcm(PANEL_COLUMNS, self.kept.matrix.row_multiple)
        step = max(1, _BLOCK_ELEMENTS // cols.size // multiple) * multiple
        for first in range(0, rows.size, step):
            wanted = slice(rows.begin + first, rows.begin + min(first + step, rows.size))
            packed.pack(self.part, first, self.kept.read(context.reader, wanted, cols.slice))


@dataclass(frozen=True, slots=True)
class RoundedSource:
    """Values of the activations' type that fill one part of a module's packed weight."""

    values: WeightSource
    part: int
    dtype: torch.dtype

    def fill(self, target: Target, context: LoadContext, device: torch.device) -> None:
        """Packs the target's rows and columns, which are in memory as values meanwhile.

        Raises CheckpointError as reading does.
        """
        holder = nn.Module()
        cols = target.cols or ShardRange.whole(target.shape[1])
        holder.weight = empty_parameter(target.rows.size, cols.size, dtype=self.dtype)
        own = replace(target, weight=replace(target.weight, name="weight", into=""), begin=0)
        # Packing reads them on the host.
        self.values.fill(own, replace(context, module_of=lambda _: holder), torch.device("cpu"))
        module = context.module_of(target.parameter)
        assert isinstance(module, StoredWeight)
        assert context.packed_maker is not None, "the load has what computes with weights that are kept"
        with _making:
            packed = module.make_packed(context.packed_maker)
        values = holder.weight.data
        # numpy has no bfloat16.
        codes = (
            values.view(torch.int16).numpy().view(np.uint16)
            if self.dtype == torch.bfloat16
            else values.numpy()
        )
        packed.pack(self.part, 0, SourceMatrix(codes))


def keep_packed(
    expected: Mapping[str, Target],
    sources: dict[str, WeightSource],
    rank: tuple[int, int],
    dtype: DTypeName,
    *,
    on_cpu: bool,
) -> dict[str, KeptForm]:
    """Replaces the sources of weights that packed formats hold; returns their forms by parameter.

    Where formats hold some weights as they are stored, the other products of the model are kept as values of
    `dtype`, the activations' type, so that one kind of kernel computes all of them. A GPU has faster products
    of values: there those alone are kept that have a part in another form. `rank`: its index, and the number
    of ranks.
    """
    forms: dict[str, KeptForm] = {}
    used = names_of_parameters(expected, "product", "lookup")
    kept = {name: _kept(sources[name], expected[name]) for names in used.values() for name in names}
    rounds = dtype != "float16" and any(kept.values())
    for parameter, names in used.items():
        targets = [expected[name] for name in names]
        if not all(kept[name] or (rounds and _is_rounded(expected[name].weight)) for name in names):
            continue
        sizes = [target.rows.size for target in targets]
        # Rows that no tensor fills (a vocabulary padded for several ranks) have no format.
        if sum(sizes) != sum(target.weight.held_shape(*rank)[0] for target in targets):
            continue
        found = [kept[name] for name in names]
        if not on_cpu and all(one is None or WEIGHT_FORMATS[one.format].code in FLOATS for one in found):
            continue
        formats = [dtype if one is None else one.format for one in found]
        parts = (PackedPart(form, size) for form, size in zip(formats, sizes, strict=True))
        forms[parameter] = PackedForm(tuple(parts))
        for part, (name, one) in enumerate(zip(names, found, strict=True)):
            rounded = RoundedSource(sources[name], part, TORCH_DTYPES[dtype])
            sources[name] = rounded if one is None else PackedSource(one, part)
    return forms


def _is_rounded(weight: Weight) -> bool:
    """Returns whether a weight that no format holds may be kept as values."""
    return weight.use == "product" and weight.dtype == "activation" and len(weight.shape) == 2


def _kept(source: WeightSource, target: Target) -> KeptMatrix | None:
    """The matrix as it can be kept for a target; None: dequantise it."""
    found: KeptMatrix | None = None
    if isinstance(source, QuantisedSource):
        found = kept_matrix(replace(source.matrix, bias=None))
    elif isinstance(source, PlainSource) and source.info.derived is not None:
        # Only files of GGUF have derived tensors; their package takes long to import.
        from moebius.checkpoint.gguf.kept import kept_blocks

        found = kept_blocks(source.info)
    elif isinstance(source, PlainSource):
        found = kept_floats(source.info)
    if found is None or found.matrix.shape != target.shape:
        return None
    cols = target.cols or ShardRange.whole(found.matrix.shape[1])
    rows_fit = is_cut_within(target.rows, found.matrix.row_multiple)
    return found if rows_fit and is_cut_within(cols, found.matrix.col_multiple) else None


def is_cut_within(shard: ShardRange, multiple: int) -> bool:
    """Returns whether a stored matrix can be cut where the shard begins and ends."""
    return shard.begin % multiple == 0 and (shard.end % multiple == 0 or shard.end == shard.total)
