"""Tables that stay in the checkpoint's files: which can, and how their rows lie there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gpu_service.device import dtype_name
from gpu_service.layers.ngrams import NGramRows
from gpu_service.layers.table_files import FileRows, StoredRows, kept_memory
from gpu_service.loader.names import Target
from gpu_service.loader.sources import PlainSource, WeightSource, as_torch
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.values import Dequantised
from moebius.checkpoint.index import TensorInfo
from moebius.checkpoint.stored_values import check_values


@dataclass(frozen=True, slots=True)
class FileForm:
    """The rows of a table in files; `held.KeptForm`."""

    # None: these are scales, which the table has with its codes.
    weight: StoredRows | None
    scale: StoredRows | None = None
    is_scaled: bool = False  # Whether the table is codes of 8 bits.

    def hold(self, module: nn.Module) -> None:
        """Raises CheckpointError for files that can not be opened."""
        if self.weight is None:
            return
        assert isinstance(module, NGramRows)
        if self.is_scaled:
            module.keep_fp8()
        module.leave_in_files(self.weight, self.scale)

    def nbytes(self, rows: int, columns: int) -> int:
        if self.weight is None:
            return 0
        row_bytes = self.weight.row_bytes + (0 if self.scale is None else self.scale.row_bytes)
        return kept_memory(row_bytes, rows)

    def num_elements(self, rows: int, columns: int) -> int:
        return rows * columns


def file_forms(
    expected: Mapping[str, Target], sources: Mapping[str, WeightSource], dtype: torch.dtype, is_scaled: bool
) -> dict[str, FileForm]:
    """Returns the forms of all tables that stay in the host's memory beside a GPU, and of their scales, by
    parameter.

    `dtype`: of values; `is_scaled`: tables are codes of 8 bits instead. Raises CheckpointError naming a table
    whose rows do not lie in a file as floats or GGUF blocks.
    """
    filling: dict[str, list[tuple[Target, WeightSource]]] = {}
    for name, target in expected.items():
        if target.weight.on_host:
            filling.setdefault(target.parameter, []).append((target, sources[name]))
    stored: dict[str, StoredRows] = {}
    for parameter, parts in filling.items():
        is_scale = parts[0][0].weight.dtype == "e8m0"
        own = torch.uint8 if is_scale else torch.float8_e4m3fn if is_scaled else dtype
        rows = _stored(parts, own)
        if rows is None:
            raise CheckpointError(
                f"embedding_tables: disk: {parameter} does not lie in a file row by row, as floats or as "
                "blocks of GGUF; allowed: ram"
            )
        stored[parameter] = rows
    forms: dict[str, FileForm] = {}
    for parameter, parts in filling.items():
        weight = parts[0][0].weight
        is_scale = weight.dtype == "e8m0"
        scale = stored.get(weight.scale) if is_scaled else None
        forms[parameter] = FileForm(None if is_scale else stored[parameter], scale, is_scaled)
    return forms


def _stored(filling: Sequence[tuple[Target, WeightSource]], dtype: torch.dtype) -> StoredRows | None:
    infos = [source.info for _, source in filling if isinstance(source, PlainSource)]
    stored = [_as_stored(info) for info in infos]
    whole = all(target.cols is None or target.cols.is_whole for target, _ in filling)
    forms = {(one.shape[-1], info.dtype) for one, info in zip(stored, infos, strict=True) if one is not None}
    if len(infos) < len(filling) or None in stored or not whole or len(forms) != 1:
        return None
    parts, row_bytes = [], 0
    for (target, _), one in sorted(zip(filling, stored, strict=True), key=lambda pair: pair[0][0].begin):
        assert one is not None
        row_bytes = one.shape[-1] * one.numpy_dtype.itemsize
        if target.rows.size:
            parts.append(FileRows(one.file, one.offset + target.rows.begin * row_bytes, target.rows.size))
    return StoredRows(row_bytes, tuple(parts), partial(_decoded, infos[0], dtype))


def _as_stored(info: TensorInfo) -> TensorInfo | None:
    """Returns the tensor whose rows lie in the file one after the other; None: values are put together."""
    if len(info.shape) != 2:
        return None
    if info.derived is None:
        return info
    return info.derived.stored if isinstance(info.derived, Dequantised) else None


def _decoded(info: TensorInfo, dtype: torch.dtype, rows: NDArray[np.uint8]) -> torch.Tensor:
    """Returns rows `[n, columns]` in `dtype` as loading converts them.

    Raises CheckpointError naming the tensor for values that are not finite.
    """
    if isinstance(info.derived, Dequantised):
        values: NDArray[np.generic] = info.derived.type.dequantise(rows)
    else:
        values = rows.view(info.numpy_dtype)
    check_values(values, info.dtype, info.name, dtype_name(dtype))
    return as_torch(values, info.dtype).to(dtype)
