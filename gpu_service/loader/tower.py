"""Fills a vision tower from safetensors, tensor by tensor, and proves that nothing is missing.

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
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.tower_rules import tower_name

_FLOAT_DTYPES = ("F32", "F16", "BF16")


def load_tower(tower: VisionTower, directory: str | Path, model_type: str) -> None:
    """Give every parameter its values, converted to its dtype.

    Raises CheckpointError naming the tensors that are missing, unknown, mis-shaped or not floating-point.
    """
    index = CheckpointIndex.open(directory)
    tensors = tower.state_dict(keep_vars=True)
    missing = set(tensors)
    with SliceReader() as reader:
        for info in index.tensors.values():
            name = tower_name(model_type, info.name)
            if name is None:
                continue
            for parameter, values in tower.parts(name, _read(reader, info)):
                if parameter not in missing:
                    raise CheckpointError(f"{directory}: the vision tower has no use for {info.name}")
                _fill(tensors[parameter], values, info, directory)
                missing.remove(parameter)
    if missing:
        raise CheckpointError(f"{directory}: the vision tower lacks {', '.join(sorted(missing)[:20])}")


def _read(reader: SliceReader, info: TensorInfo) -> torch.Tensor:
    if info.dtype not in _FLOAT_DTYPES:
        raise CheckpointError(
            f"vision tensor {info.name} is {info.dtype}; allowed: {', '.join(_FLOAT_DTYPES)}"
        )
    array = reader.read(info)
    if info.dtype == "BF16":
        # torch reinterprets signed integers; numpy has no bfloat16.
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _fill(parameter: torch.Tensor, values: torch.Tensor, info: TensorInfo, source: str | Path) -> None:
    if parameter.shape != values.shape:
        shapes = f"{list(values.shape)}, expected {list(parameter.shape)}"
        raise CheckpointError(f"{source}: vision tensor {info.name} gives {shapes}")
    parameter.data.copy_(values)
