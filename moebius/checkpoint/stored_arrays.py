"""Arrays of a checkpoint that together hold one matrix: found by name, checked by shape, read by slice."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import MatrixTemplate
from moebius.checkpoint.index import TensorInfo
from moebius.checkpoint.reader import Array, SliceReader
from moebius.checkpoint.weight_schemes import StoredRole


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One matrix's part of a stored array; filled by `locate_array`."""

    role: StoredRole
    # Of two axes, or of three with the expert first.
    tensor: TensorInfo
    expert_index: int | None
    out: range  # The elements' positions along out.
    in_size: int  # Their number along in.
    # Weights of the first element that belong to another matrix: blocks may begin before this one does.
    skipped: int = 0

    def read(self, reader: SliceReader, rows: range, cols: range) -> Array:
        """Returns what covers the logical `[rows, cols]`, in stored orientation; they begin at whole
        elements.
        """
        stored_rows = range(rows.start + self.skipped, rows.stop + self.skipped)
        first, last = _elements(stored_rows, self.role.out_step, len(self.out))
        picked = self.out[first:last]
        out = as_slice(picked)
        begin, end = _elements(cols, self.role.in_step, self.in_size)
        inner = slice(begin, end) if end - begin < self.in_size else None
        if not self.role.transposed:
            return reader.read_slice(self.tensor, out, inner, self.expert_index)
        whole = len(picked) == self.tensor.shape[-1]
        return reader.read_slice(self.tensor, slice(begin, end), None if whole else out, self.expert_index)


def as_slice(picked: range) -> slice:
    """Returns the same positions; a range of step 2 may end beyond its last one."""
    return slice(picked.start, picked[-1] + 1 if picked else picked.start, picked.step)


def _elements(wanted: range, step: int, count: int) -> tuple[int, int]:
    """Returns the elements of `step` weights (0: one for all) that hold the wanted weights."""
    if step == 0:
        return 0, count
    return wanted.start // step, min(-(-wanted.stop // step), count)


def count_elements(size: int, step: int) -> int:
    """Returns the number of elements of `step` weights (0: one for all) in `size` weights."""
    return -(-size // step) if step else 1


def locate_array(
    tensor: TensorInfo,
    role: StoredRole,
    template: MatrixTemplate,
    expert: int,
    shape: tuple[int, int],
    scheme: str,
) -> StoredArray:
    """Returns the part of `tensor` that belongs to a matrix of the logical `shape`.

    Raises CheckpointError naming tensor, scheme, the shape found and the one expected.
    """
    if tensor.dtype not in role.dtypes:
        raise CheckpointError(
            f"tensor {tensor.name!r} has dtype {tensor.dtype}; allowed for {scheme}: {', '.join(role.dtypes)}"
        )
    if role.role == "scales" and not template.stacked and tensor.shape[1::2] == (1, 1):
        # ModelOpt's blocks: [rows, 1, columns, 1].
        tensor = replace(tensor, shape=tensor.shape[::2])
    out_weights, in_weights = shape[0] * template.parts, shape[1]
    out, inner = count_elements(out_weights, role.out_step), count_elements(in_weights, role.in_step)
    expected = (inner, out) if role.transposed else (out, inner)
    tensor, expert_index = _select_expert(tensor, template, expert, scheme)
    if role.role in ("channel", "group_index"):
        tensor = _as_columns(tensor, template.stacked)
        expected = (in_weights, 1) if role.role == "group_index" else (out, 1)
    if tensor.shape[-2:] != expected:
        raise CheckpointError(
            f"tensor {tensor.name!r} of shape {list(tensor.shape)} does not fit {scheme}: "
            f"a matrix {list(shape)}{' next to another' if template.parts > 1 else ''} "
            f"calls for {list(expected)}"
        )
    part, skipped = _part(tensor, template, role, shape[0], scheme)
    return StoredArray(role, tensor, expert_index, part, inner, skipped)


def _select_expert(
    tensor: TensorInfo, template: MatrixTemplate, expert: int, scheme: str
) -> tuple[TensorInfo, int | None]:
    if not template.stacked:
        return tensor, None
    if len(tensor.shape) == 4:  # MXFP4: [E, out, groups, bytes of a group]
        tensor = replace(tensor, shape=(*tensor.shape[:2], tensor.shape[2] * tensor.shape[3]))
    if not tensor.shape or expert >= tensor.shape[0]:
        count = tensor.shape[0] if tensor.shape else 0
        raise CheckpointError(f"tensor {tensor.name!r} has {count} experts; expert {expert} is missing")
    return tensor, expert


def _as_columns(tensor: TensorInfo, stacked: bool) -> TensorInfo:
    """Returns one value per row, written with or without a last axis of 1."""
    axes = 2 if stacked else 1
    return replace(tensor, shape=(*tensor.shape, 1)) if len(tensor.shape) == axes else tensor


def _part(
    tensor: TensorInfo, template: MatrixTemplate, role: StoredRole, rows: int, scheme: str
) -> tuple[range, int]:
    """Returns the elements that cover a matrix of `rows` rows, and how far into the first of them
    it begins.
    """
    step, first, last = role.out_step, template.part * rows, (template.part + 1) * rows
    # Blocks may be cut (kernels receive how far into one a matrix begins), words may not.
    if (template.interleaved and step != 1) or (first % step and role.role != "scales"):
        raise CheckpointError(
            f"tensor {tensor.name!r} of shape {list(tensor.shape)} cannot hold gate and up as {scheme}"
        )
    if template.interleaved:
        return range(template.part, rows * template.parts, template.parts), 0
    return range(first // step, count_elements(last, step)), first % step
