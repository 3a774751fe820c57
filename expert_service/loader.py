"""Streams one slice of the experts from safetensors into the packed form: read, pack, free.

At no time is more than one expert's slice held besides the packed weights: reads are `pread` into
buffers of that size (see `moebius.checkpoint.reader`), which die before the next expert is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from expert_service.slicing import ExpertSlice
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import ExpertSources, LocatedLayout, MatrixSource
from moebius.checkpoint.index import CheckpointIndex
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.rules import find_layout, is_routed_expert
from moebius.kernels import ExpertEngine

PACKABLE = ("F32", "BF16", "F16")


class LoadCancelled(Exception):
    """The process was asked to stop while it loaded."""


def open_layout(model: MoeGeometry, model_path: str) -> LocatedLayout:
    """Find the experts and check all of them, this server's or not, before anything is read.

    Raises CheckpointError naming the first tensor that is missing, mis-shaped, of a type that can not be
    packed, or that belongs to an expert the configuration does not know.
    """
    layout = find_layout(CheckpointIndex.open(model_path), model.model_type)
    used: set[str] = set()
    for layer in model.moe_layers:
        for expert in range(model.num_experts):
            sources = layout.tensors(layer, expert)
            _check_expert(model, sources)
            used |= {source.tensor.name for source in (sources.gate, sources.up, sources.down)}
    _check_unused(model, layout, used)
    return layout


def stored_dtype(model: MoeGeometry, layout: LocatedLayout) -> str:
    """The checkpoint's own expert type, as an engine can hold it: "float32" or "bfloat16"."""
    dtype = layout.source(model.moe_layers[0], 0, "gate").tensor.dtype
    return "bfloat16" if dtype == "BF16" else "float32"


def load_experts(
    engine: ExpertEngine,
    model: MoeGeometry,
    part: ExpertSlice,
    layout: LocatedLayout,
    cancelled: Callable[[], bool],
) -> Iterator[int]:
    """Pack every expert of the slice, yielding each layer's number once it is done.

    Raises CheckpointError naming a tensor, or LoadCancelled.
    """
    neurons = slice(part.intermediate_begin, part.intermediate_end)
    with SliceReader() as reader:
        for layer in model.moe_layers:
            for expert in range(part.expert_begin, part.expert_end):
                if cancelled():
                    raise LoadCancelled
                sources = layout.tensors(layer, expert)
                engine.load_expert(layer, expert, *_read_expert(reader, sources, neurons))
            yield layer


def _read_expert(reader: SliceReader, sources: ExpertSources, neurons: slice) -> list[npt.NDArray[Any]]:
    """gate and up `[I, H]`, down `[H, I]` of this slice: all float32, or all bfloat16 bits."""
    arrays = [
        sources.gate.read(reader, rows=neurons),
        sources.up.read(reader, rows=neurons),
        sources.down.read(reader, cols=neurons),
    ]
    stored = [source.tensor.dtype for source in (sources.gate, sources.up, sources.down)]
    if set(stored) == {"BF16"}:
        return arrays
    return [widen(array, dtype) for array, dtype in zip(arrays, stored, strict=True)]


def widen(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Stored values as float32, exactly. bfloat16 is float32's upper half."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def _check_expert(model: MoeGeometry, sources: ExpertSources) -> None:
    wide = (model.moe_intermediate_size, model.hidden_size)
    _check_matrix(sources.gate, wide)
    _check_matrix(sources.up, wide)
    _check_matrix(sources.down, wide[::-1])


def _check_matrix(source: MatrixSource, expected: tuple[int, int]) -> None:
    tensor = source.tensor
    if tensor.dtype not in PACKABLE:
        raise CheckpointError(
            f"tensor {tensor.name!r} has dtype {tensor.dtype}; allowed for experts: {', '.join(PACKABLE)}"
        )
    if source.shape != expected:
        raise CheckpointError(
            f"tensor {tensor.name!r} of shape {list(tensor.shape)} gives a matrix {list(source.shape)}; "
            f"the configuration calls for {list(expected)}"
        )


def _check_unused(model: MoeGeometry, layout: LocatedLayout, used: set[str]) -> None:
    """An expert tensor nobody asked for, in a layer that the model has: configuration and file differ."""
    for name in layout.index.tensors:
        if name in used or not is_routed_expert(name) or not name.startswith(layout.prefix):
            continue
        # Layers behind the last are multi-token prediction, which is not served.
        if int(name.removeprefix(layout.prefix).split(".")[0]) < model.num_layers:
            raise CheckpointError(
                f"tensor {name!r} is an expert's, but the configuration has {model.num_experts} experts "
                f"in layers {list(model.moe_layers)}: it would be left unused"
            )
