"""Linear layers that stay in the fp8 they are stored in: codes as they are, scales spread to single rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_service.layers.linear import Linear
from gpu_service.loader.names import Target
from gpu_service.loader.sources import Means, QuantisedSource, WeightSource, read_part, target_rows
from gpu_service.ops.fp8_linear import GROUP
from moebius.checkpoint.stored_matrix import StoredMatrix
from moebius.kernels_source import SourceMatrix

_WEIGHT, _SCALES = "weight", "weight_scales"


def keep_stored_fp8(expected: Mapping[str, Target], sources: dict[str, WeightSource]) -> None:
    """Replace the sources of linear layers that are stored in fp8 with all of their parts.

    What else holds a matrix (embeddings, projections that are absorbed) uses its values, so it gets them.
    """
    parts: dict[Linear, list[str]] = {}
    for name, target in expected.items():
        if isinstance(target.module, Linear) and target.parameter == _WEIGHT:
            parts.setdefault(target.module, []).append(name)
    for module, names in parts.items():
        found = [source for name in names if isinstance(source := sources[name], QuantisedSource)]
        if len(found) < len(names) or any(source.matrix.scheme.code != "float8" for source in found):
            continue
        cols = expected[names[0]].cols
        module.keep_fp8(cols.begin % GROUP if cols is not None else 0)
        for name, source in zip(names, found, strict=True):
            sources[name] = Fp8Source(source.matrix)


@dataclass(frozen=True, slots=True)
class Fp8Source:
    """A matrix whose codes and scales are kept: see `ops.fp8_linear`."""

    matrix: StoredMatrix

    def fill(self, target: Target, means: Means, device: torch.device) -> None:
        """See `WeightSource`; fills both parameters of the module."""
        weight, scales = (target_rows(target, name, device) for name in (_WEIGHT, _SCALES))
        if not len(weight):
            return
        # Rows of fp8 are no words: the part begins with its own first one.
        source, _, first_col = read_part(self.matrix, target, means.reader)
        codes = np.ascontiguousarray(source.codes[:, first_col : first_col + weight.shape[1]])
        weight.copy_(torch.from_numpy(codes).view(torch.float8_e4m3fn))
        scales.copy_(torch.from_numpy(_row_scales(source, scales.shape[1])))


def _row_scales(source: SourceMatrix, groups: int) -> NDArray[np.float32]:
    """`[rows, groups]` from those of blocks, rows or the whole matrix."""
    rows = len(source.codes)
    found = np.ones((rows, groups), np.float32)
    if source.scales is not None:
        first = source.scale_row_begin
        found *= np.repeat(source.scales, source.scale_rows, axis=0)[first : first + rows]
    if source.column_scale is not None:
        found *= source.column_scale[:, None]
    return found * np.float32(source.tensor_scale)
