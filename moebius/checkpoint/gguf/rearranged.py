"""Tensors that GGUF files hold in another order, in parts, or as another function of their values.

What llama.cpp's converters do to the weights of each family is undone here, when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.linear_heads import linear_heads
from moebius.checkpoint.gguf.model import GgufModel
from moebius.checkpoint.gguf.names import Change
from moebius.checkpoint.gguf.values import Applied, GatheredColumns, GatheredRows, MergedHeads, rows_of_pairs
from moebius.checkpoint.index import TensorInfo

Floats = NDArray[np.float32]


def rearranged(model: GgufModel, info: TensorInfo, change: Change) -> TensorInfo:
    """Returns the canonical tensor of one stored tensor.

    Raises CheckpointError naming the tensor where the metadata does not fit its shape.
    """
    for step in _STEPS.get(change, ()):
        info = step(model, info)
    return info


def merged(model: GgufModel, name: str, parts: Mapping[Change, TensorInfo]) -> TensorInfo:
    """Returns the canonical tensor that is stored in two parts.

    Raises CheckpointError where one is missing.
    """
    kinds, together, merge = next(row for row in _MERGES if parts.keys() & set(row[0]))
    if parts.keys() != set(kinds):
        found = next(iter(parts.values()))
        raise CheckpointError(f"{model.file}: {found.name!r} has no counterpart; {together} go together")
    first, second = (parts[kind] for kind in kinds)
    return replace(merge(model, first, second), name=name, nbytes=first.nbytes + second.nbytes, packed_as="")


def is_part(change: Change) -> bool:
    """Returns whether there is another tensor that belongs to it."""
    return any(change in kinds for kinds, *_ in _MERGES)


def _gathered(sources: Sequence[TensorInfo], order: NDArray[np.intp]) -> TensorInfo:
    """Returns the first source's shape but for the rows."""
    kinds = {source.dtype for source in sources}
    return replace(
        sources[0],
        dtype=kinds.pop() if len(kinds) == 1 else "F32",
        shape=(len(order), *sources[0].shape[1:]),
        derived=GatheredRows(tuple(sources), order),
    )


def _misfit(model: GgufModel, info: TensorInfo, wanted: str) -> CheckpointError:
    return CheckpointError(f"{model.file}: {info.name} {list(info.shape)} does not have {wanted}")


def _row(model: GgufModel, info: TensorInfo) -> TensorInfo:
    return replace(info, shape=(1, *info.shape)) if len(info.shape) == 1 else info


def _halves_of_pairs(key: str) -> Callable[[GgufModel, TensorInfo], TensorInfo]:
    """Returns the rows of as many heads as the key says, see `rows_of_pairs`."""

    def change(model: GgufModel, info: TensorInfo) -> TensorInfo:
        heads = model.value(key)
        if isinstance(heads, list):
            # One for each layer, 0 where a layer has none.
            heads = max(heads)
        if not isinstance(heads, int) or heads < 1 or info.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{model.file}: {info.name} {list(info.shape)} cannot be divided among {heads!r} heads "
                f"({key})"
            )
        return _gathered([info], rows_of_pairs(np.arange(info.shape[0]), info.shape[0] // heads))

    return change


def _less_one(values: Floats) -> Floats:
    return values - np.float32(1)


def _log_of_negative(values: Floats) -> Floats:
    return np.log(-values)


def _log(values: Floats) -> Floats:
    return np.log(values)


def _applied(function: Callable[[Floats], Floats]) -> Callable[[GgufModel, TensorInfo], TensorInfo]:
    def change(model: GgufModel, info: TensorInfo) -> TensorInfo:
        return replace(info, dtype="F32", derived=Applied(info, function))

    return change


def _flat(model: GgufModel, info: TensorInfo) -> TensorInfo:
    return replace(info, shape=(math.prod(info.shape),))


def _axes(model: GgufModel, info: TensorInfo) -> TensorInfo:
    return replace(info, shape=(1, 1, math.prod(info.shape), 1))


def _taps(model: GgufModel, info: TensorInfo) -> TensorInfo:
    """Returns `[channels, 1, width]`; the axis between is one that converters leave out."""
    if len(info.shape) != 2 or info.shape[0] != linear_heads(model).channels:
        raise _misfit(model, info, f"{linear_heads(model).channels} channels of as many taps")
    return replace(info, shape=(info.shape[0], 1, info.shape[1]))


def _channel_taps(model: GgufModel, info: TensorInfo) -> TensorInfo:
    """Some files have an axis of one before the channels as well."""
    width = info.shape[-1]
    return replace(info, shape=(math.prod(info.shape) // width, 1, width))


def _tiled(mixed: bool) -> Callable[[GgufModel, TensorInfo], TensorInfo]:
    """Returns the rows by value head, put back one after another; `mixed`: queries and keys lie
    before them.
    """

    def change(model: GgufModel, info: TensorInfo) -> TensorInfo:
        heads = linear_heads(model)
        before = 2 * heads.key_size if mixed else 0
        width, rest = divmod(info.shape[0] - before, heads.value_heads)
        if width < 1 or rest:
            raise _misfit(model, info, f"{before} rows and those of {heads.value_heads} value heads")
        if heads.repeats == 1:
            return info
        return _gathered([info], np.concatenate((np.arange(before), before + heads.tiled(width))))

    return change


def _tiled_columns(model: GgufModel, info: TensorInfo) -> TensorInfo:
    heads = linear_heads(model)
    if len(info.shape) != 2 or info.shape[1] != heads.value_size:
        raise _misfit(model, info, f"{heads.value_size} columns")
    if heads.repeats == 1:
        return info
    return replace(info, derived=GatheredColumns(info, heads.tiled(heads.value_dim)))


def _merged_latent(model: GgufModel, keys: TensorInfo, values: TensorInfo) -> TensorInfo:
    """Returns kv_b_proj `[heads * (nope + value), rank]`."""
    shapes = keys.shape, values.shape
    if [len(shape) for shape in shapes] != [3, 3] or keys.shape[:2] != (values.shape[0], values.shape[2]):
        raise CheckpointError(
            f"{model.file}: {keys.name!r} {list(keys.shape)} and {values.name!r} {list(values.shape)} are not"
            " [heads, rank, nope] and [heads, value, rank]"
        )
    heads, rank, nope = keys.shape
    shape = (heads * (nope + values.shape[1]), rank)
    return replace(keys, dtype="F32", shape=shape, derived=MergedHeads(keys, values))


def _one_after_the_other(model: GgufModel, gate: TensorInfo, up: TensorInfo) -> TensorInfo:
    if gate.shape != up.shape:
        raise _misfit(model, gate, f"the shape of {up.name} {list(up.shape)}")
    return _gathered([gate, up], np.arange(gate.shape[0] + up.shape[0]))


def _rows_together(model: GgufModel, first: TensorInfo, later: TensorInfo) -> TensorInfo:
    if len(later.shape) != 2 or first.shape[1:] != later.shape[1:]:
        raise _misfit(model, later, f"rows as long as those of {first.name} {list(first.shape)}")
    return _gathered([first, later], np.arange(first.shape[0] + later.shape[0]))


def _mixed_by_key_head(model: GgufModel, mixed: TensorInfo, gate: TensorInfo) -> TensorInfo:
    """Returns in_proj_qkvz: of each key head its query, its key, and the values and gates that
    belong to it.
    """
    heads = linear_heads(model)
    for info, rows in ((mixed, heads.channels), (gate, heads.value_size)):
        if info.shape != (rows, mixed.shape[-1]):
            raise _misfit(model, info, f"{rows} rows of {mixed.shape[-1]}")
    return _gathered([mixed, gate], heads.mixed_rows())


_Step = Callable[[GgufModel, TensorInfo], TensorInfo]
# What is done for each change, one after the other.
_STEPS: Mapping[Change, tuple[_Step, ...]] = {
    "row": (_row,),
    "query_pairs": (_halves_of_pairs("attention.head_count"),),
    "key_pairs": (_halves_of_pairs("attention.head_count_kv"),),
    "one_plus_weight": (_applied(_less_one),),
    "decay": (_applied(_log_of_negative),),
    "flat": (_flat,),
    "flat_decay": (_flat, _applied(_log_of_negative)),
    "flat_log": (_flat, _applied(_log)),
    "axes_decay": (_axes, _applied(_log_of_negative)),
    "taps": (_taps,),
    "channel_taps": (_channel_taps,),
    "tiled_rows": (_tiled(mixed=False),),
    "tiled_mixed": (_tiled(mixed=True),),
    "tiled_decay": (_tiled(mixed=False), _applied(_log_of_negative)),
    "tiled_taps": (_taps, _tiled(mixed=True)),
    "tiled_columns": (_tiled_columns,),
}
# Two parts, what messages call them, and what makes one of them.
_MERGES: tuple[
    tuple[tuple[Change, Change], str, Callable[[GgufModel, TensorInfo, TensorInfo], TensorInfo]], ...
] = (
    (("key_part", "value_part"), "attn_k_b and attn_v_b", _merged_latent),
    (("mixed_part", "gate_part"), "attn_qkv and attn_gate", _mixed_by_key_head),
    (("gate_half", "up_half"), "ffn_gate_shexp and ffn_up_shexp", _one_after_the_other),
    (("first_rows", "later_rows"), "indexer.q_proj and indexer.k_proj", _rows_together),
)
