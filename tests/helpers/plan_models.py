"""config.json of published models, checkpoints of headers only, and hardware to plan for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from app.planning.gpu_models import find_gpu_model
from app.planning.hardware import Hardware
from lab.random_model.shapes import parse_shape
from moebius.config import MoebiusConfig
from moebius.config.loader import load_config
from tests.helpers.published_checkpoints import Published
from tests.helpers.quantised_checkpoints import gptq

GIB = 2**30
# What their makers state, in parameters without layers of multi-token prediction.
_PARAMETERS = {
    "deepseek-v3": 671e9,
    "kimi-k2": 1.026e12,
    "glm-4.7": 355e9,
    "gpt-oss-120b": 116.83e9,
    "longcat-flash-chat": 560e9,
    "ernie-4.5-vl-424b-a47b": 424e9,
}
# Name -> (config.json, parameters).
PUBLISHED: Mapping[str, tuple[dict[str, Any], float]] = {
    "qwen3-30b-a3b": (parse_shape("qwen3-30b-a3b", 0).hf_config(None), 30.5e9),
    **{name: (Published.load(name).config, parameters) for name, parameters in _PARAMETERS.items()},
}


def write_config(directory: Path, config: Mapping[str, Any]) -> Path:
    """Returns a directory with nothing but config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_headers(directory: Path, tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> None:
    """model.safetensors of (name, dtype, shape, bytes) whose data is a hole in the file."""
    header: dict[str, Any] = {}
    position = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    raw = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + position)


_GROUP = 128
# Matrices that quantisers of 4 bits leave in 16.
_LEFT = re.compile(r"(embed_tokens|lm_head|\.gate|shared_expert_gate|in_proj_ba|conv1d|mtp\..*)\.weight$")


def published_once(factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that returns a published model's directory of headers; each is written once."""
    return cache(lambda name: write_published(factory.mktemp(name), name))


def write_published(directory: Path, name: str, int4: bool = False) -> Path:
    """Returns a directory with a published model's configuration and headers; `int4`: its matrices of layers
    in GPTQ's groups of 128, dense ones and experts alike.
    """
    tensors = Published.load(name).index(directory).tensors.values()
    stored = [(each.name, each.dtype, each.shape, each.nbytes) for each in tensors]
    if int4:
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"] = gptq(_GROUP, symmetric=True)
        (directory / "config.json").write_text(json.dumps(config))
        stored = [part for each in stored for part in _in_groups(*each)]
    write_headers(directory, stored)
    return directory


def _in_groups(
    name: str, dtype: str, shape: tuple[int, ...], nbytes: int
) -> Iterable[tuple[str, str, tuple[int, ...], int]]:
    """Returns GPTQ's tensors of a matrix, or what is left as it is."""
    if len(shape) != 2 or not name.endswith(".weight") or _LEFT.search(name):
        return [(name, dtype, shape, nbytes)]
    (rows, columns), module = shape, name.removesuffix(".weight")
    groups = -(-columns // _GROUP)
    parts = (
        ("qweight", "I32", (columns // 8, rows), 4),
        ("qzeros", "I32", (groups, rows // 8), 4),
        ("scales", "F16", (groups, rows), 2),
        ("g_idx", "I32", (columns,), 4),
    )
    return [(f"{module}.{part}", kind, size, math.prod(size) * item) for part, kind, size, item in parts]


def settings(model: Path, **flags: Any) -> MoebiusConfig:
    """Returns the settings as `moebius plan MODEL --flag ...` reads them."""
    return load_config(None, {"model": str(model), **flags})


def hardware(gpu: str | None = None, gpus: int = 1, ram_gib: float = 1024, **changes: Any) -> Hardware:
    """Returns a host with two sockets of 32 AMX cores, and GPUs of the table where one is named."""
    numbers: dict[str, Any] = {
        "gpus": gpus if gpu else 0,
        "gpu": find_gpu_model(gpu) if gpu else None,
        "ram_bytes": int(ram_gib * GIB),
        "sockets": 2,
        "cores": 64,
        "bandwidth": 500e9,
        "cpu_flops": 100e12,
        "isa": "amx",
    }
    return Hardware(**numbers | changes)
