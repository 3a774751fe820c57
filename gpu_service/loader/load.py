"""Fills a model from safetensors, tensor by tensor, and proves that nothing is missing or left over.

Knows names and shapes; which rows a name fills comes from the modules (`loader/names.py`). Peak memory is
the model plus one tensor: nothing is mapped, and routed experts are never read. A rank of several reads
its rows and columns only; what is left over is proven by all stages together.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gpu_service.loader.names import Target, expected_names, wanted_name
from gpu_service.models.common import CausalLM
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import CheckpointIndex, TensorInfo
from moebius.checkpoint.reader import SliceReader

# How many names an error lists before it only counts the rest.
_MAX_LISTED = 20
_FLOAT_DTYPES = ("F32", "F16", "BF16")


def load_weights(model: CausalLM, directory: str | Path) -> None:
    """Give every parameter memory on `model.device` and its values from the checkpoint.

    Values are converted to each parameter's dtype. Raises CheckpointError listing every name that is
    missing, unused, mis-shaped or not a floating-point tensor, before the first weight is read; the
    model is unusable after an error.
    """
    index = CheckpointIndex.open(directory)
    present = _present(index, model)
    expected = expected_names(model)
    _check(index.directory, present, expected)
    with SliceReader() as reader:
        for name, target in expected.items():
            _fill(target, _read(reader, present[name], target), model.device)
    _check_no_meta(model)
    model.pack()


def _present(index: CheckpointIndex, model: CausalLM) -> dict[str, TensorInfo]:
    """The checkpoint's tensors that this process reads, by canonical name."""
    present: dict[str, TensorInfo] = {}
    for name, info in index.tensors.items():
        canonical = wanted_name(name, model.config, model.parallel)
        if canonical is None:
            continue
        if canonical in present:
            raise CheckpointError(
                f"{index.directory}: {present[canonical].name} and {name} are both {canonical}"
            )
        present[canonical] = info
    return present


def _check(directory: Path, present: dict[str, TensorInfo], expected: dict[str, Target]) -> None:
    found = {name: info for name, info in present.items() if name in expected}
    problems = {
        "missing": [name for name in expected if name not in present],
        "unused": [info.name for name, info in present.items() if name not in expected],
        "mis-shaped": [
            f"{name} {list(info.shape)} (expected {list(expected[name].shape)})"
            for name, info in found.items()
            if info.shape != expected[name].shape
        ],
        "mis-typed": [
            f"{name} {info.dtype} (allowed {', '.join(_FLOAT_DTYPES)})"
            for name, info in found.items()
            if info.dtype not in _FLOAT_DTYPES
        ],
    }
    lines = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in problems.items() if names]
    if lines:
        raise CheckpointError(f"{directory} does not fit its config.json: {'; '.join(lines)}")


def _listed(items: Iterable[str]) -> str:
    names = sorted(items)
    more = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _read(reader: SliceReader, info: TensorInfo, target: Target) -> torch.Tensor:
    cols = None if target.cols is None or target.cols.is_whole else target.cols.slice
    array = reader.read_slice(info, target.rows.slice, cols)
    if info.dtype == "BF16":
        # torch reinterprets signed integers; numpy has no bfloat16.
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _fill(target: Target, values: torch.Tensor, device: torch.device) -> None:
    parameter = target.module.get_parameter(target.parameter)
    if parameter.is_meta:
        # Rows that no tensor fills (a padded vocabulary) must be finite.
        make = torch.empty if target.rows.size == parameter.shape[0] else torch.zeros
        memory = make(parameter.shape, dtype=parameter.dtype, device=device)
        parameter = nn.Parameter(memory, requires_grad=False)
        setattr(target.module, target.parameter, parameter)
    parameter.data.narrow(0, target.begin, target.rows.size).copy_(values)


def _check_no_meta(model: CausalLM) -> None:
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise CheckpointError(f"parameters without values after loading: {_listed(empty)}")
