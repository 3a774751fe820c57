"""Dense layers that are kept in the format of their checkpoint: which ones, and what fills them."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from gpu_service.layers.linear import StoredWeight
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
from moebius.kernels.weight_formats import PANEL_COLUMNS, WEIGHT_FORMATS
from moebius.models.layers.ranks import ShardRange

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


def keep_packed(
    expected: Mapping[str, Target],
    sources: dict[str, WeightSource],
    rank: tuple[int, int],
    *,
    on_cpu: bool,
) -> dict[str, KeptForm]:
    """Replaces the sources of weights all of whose parts a packed format holds as they are stored; returns
    their forms by parameter. `rank`: its index, and the number of ranks.

    Weights in plain floats alone are kept on a CPU; a GPU has faster products of them.
    """
    forms: dict[str, KeptForm] = {}
    for parameter, names in names_of_parameters(expected, "product", "lookup").items():
        found = [_kept(sources[name], expected[name]) for name in names]
        kept = [one for one in found if one is not None]
        sizes = [expected[name].rows.size for name in names]
        # Rows that no tensor fills (a vocabulary padded for several ranks) have no format.
        held = sum(expected[name].weight.held_shape(*rank)[0] for name in names)
        if len(kept) < len(names) or sum(sizes) != held:
            continue
        if not on_cpu and all(WEIGHT_FORMATS[one.format].code in FLOATS for one in kept):
            continue
        parts = (PackedPart(one.format, size) for one, size in zip(kept, sizes, strict=True))
        forms[parameter] = PackedForm(tuple(parts))
        for part, (name, one) in enumerate(zip(names, kept, strict=True)):
            sources[name] = PackedSource(one, part)
    return forms


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
    fits = _cuts(target.rows, found.matrix.row_multiple) and _cuts(cols, found.matrix.col_multiple)
    return found if fits else None


def _cuts(shard: ShardRange, multiple: int) -> bool:
    """Returns whether a stored matrix can be cut where the shard begins and ends."""
    return shard.begin % multiple == 0 and (shard.end % multiple == 0 or shard.end == shard.total)
