"""Proves from headers that a vision tower is complete, and fills it, tensor by tensor.

Towers stay in floating point in every published checkpoint; tensors that are not theirs are the text
loader's business.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gpu_service.models.vision.tower import VisionTower
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import CheckpointIndex, TensorInfo
from moebius.checkpoint.reader import Array, SliceReader
from moebius.checkpoint.stored_values import check_values
from moebius.checkpoint.tower_rules import tower_name

_FLOAT_DTYPES = ("F32", "F16", "BF16")


def load_tower(tower: VisionTower, directory: str | Path, model_type: str) -> None:
    """Give every parameter its values, converted to its dtype.

    Raises CheckpointError as `check_tower` does, and naming a tensor that holds NaN or infinity.
    """
    located = check_tower(tower, directory, model_type)
    tensors = tower.state_dict(keep_vars=True)
    with SliceReader() as reader:
        for name, info in located:
            array = reader.read(info)
            for parameter, values in tower.parts(name, _as_torch(array, info.dtype)):
                rounded = tensors[parameter].dtype == torch.bfloat16
                check_values(array, info.dtype, info.name, rounded)
                tensors[parameter].data.copy_(values)


def check_tower(
    tower: VisionTower, directory: str | Path, model_type: str
) -> tuple[tuple[str, TensorInfo], ...]:
    """What fills a tower, which may be without memory, from headers alone; names are the tower's.

    Raises CheckpointError naming the tensors that are missing, unknown, mis-shaped or not floating-point.
    """
    index = CheckpointIndex.open(directory)
    shapes = {name: tensor.shape for name, tensor in tower.state_dict().items()}
    missing = set(shapes)
    located: list[tuple[str, TensorInfo]] = []
    for info in index.tensors.values():
        name = tower_name(model_type, info.name)
        if name is None:
            continue
        if info.dtype not in _FLOAT_DTYPES:
            allowed = ", ".join(_FLOAT_DTYPES)
            raise CheckpointError(f"vision tensor {info.name} is {info.dtype}; allowed: {allowed}")
        for parameter, values in _parts(tower, name, info, directory):
            if parameter not in missing:
                raise CheckpointError(f"{directory}: the vision tower has no use for {info.name}")
            if shapes[parameter] != values.shape:
                found = f"{list(values.shape)}, expected {list(shapes[parameter])}"
                raise CheckpointError(f"{directory}: vision tensor {info.name} gives {found}")
            missing.remove(parameter)
        located.append((name, info))
    if missing:
        raise CheckpointError(f"{directory}: the vision tower lacks {', '.join(sorted(missing)[:20])}")
    return tuple(located)


def _parts(
    tower: VisionTower, name: str, info: TensorInfo, directory: str | Path
) -> list[tuple[str, torch.Tensor]]:
    """Without memory."""
    try:
        return list(tower.parts(name, torch.empty(info.shape, device="meta")))
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{directory}: vision tensor {info.name} of shape {list(info.shape)} can not be divided: {error}"
        ) from error


def _as_torch(array: Array, dtype: str) -> torch.Tensor:
    if dtype == "BF16":
        # torch reinterprets signed integers; numpy has no bfloat16.
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
