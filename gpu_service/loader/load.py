"""Fills a model from safetensors, tensor by tensor, and proves that nothing is missing or left over.

Knows names and shapes; which rows a name fills comes from the modules (`loader/names.py`). Peak memory is
the model plus one tensor: nothing is mapped, and routed experts are never read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gpu_service.loader.names import Target, expected_names, is_skipped
from gpu_service.models.common import CausalLM
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import CheckpointIndex, TensorInfo
from moebius.checkpoint.reader import SliceReader

# How many names an error lists before it only counts the rest.
_MAX_LISTED = 20
_FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_weights(model: CausalLM, directory: str | Path) -> None:
    """Give every parameter memory on `model.device` and its values from the checkpoint.

    Values are converted to each parameter's dtype. Raises CheckpointError listing every name that is
    missing, unused, mis-shaped or not a floating-point tensor, before the first weight is read; the
    model is unusable after an error.
    """
    index = CheckpointIndex.open(directory)
    expected = expected_names(model)
    _check(index, expected, model)
    with SliceReader() as reader:
        for name, target in expected.items():
            _fill(target, _read(reader, index[name]), model.device)
    _check_no_meta(model)
    model.pack()


def _check(index: CheckpointIndex, expected: dict[str, Target], model: CausalLM) -> None:
    present = index.tensors
    missing = [name for name in expected if name not in present]
    unused = [name for name in present if name not in expected and not is_skipped(name, model)]
    wrong = [
        f"{name} has shape {list(present[name].shape)}, expected {list(target.shape)}"
        for name, target in expected.items()
        if name in present and present[name].shape != target.shape
    ]
    types = [
        f"{name} has dtype {present[name].dtype}, allowed: {', '.join(_FLOAT_DTYPES)}"
        for name in expected
        if name in present and present[name].dtype not in _FLOAT_DTYPES
    ]
    problems = [
        f"{len(items)} {kind}: {_listed(items)}"
        for kind, items in (
            ("missing", missing),
            ("unused", unused),
            ("mis-shaped", wrong),
            ("mis-typed", types),
        )
        if items
    ]
    if problems:
        raise CheckpointError(
            f"{index.directory} does not fit {model.config.model_type}: {'; '.join(problems)}"
        )


def _listed(items: Iterable[str]) -> str:
    names = sorted(items)
    more = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _read(reader: SliceReader, info: TensorInfo) -> torch.Tensor:
    array = reader.read(info)
    if info.dtype == "BF16":
        # torch reinterprets signed integers; numpy has no bfloat16.
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _fill(target: Target, values: torch.Tensor, device: torch.device) -> None:
    parameter = target.module.get_parameter(target.parameter)
    if parameter.is_meta:
        memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        parameter = nn.Parameter(memory, requires_grad=False)
        setattr(target.module, target.parameter, parameter)
    parameter.data.narrow(0, target.begin, target.shape[0]).copy_(values)


def _check_no_meta(model: CausalLM) -> None:
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise CheckpointError(f"parameters without values after loading: {_listed(empty)}")
