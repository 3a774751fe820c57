"""Ways in which a published checkpoint may be corrupt or incomplete, each with what its error must name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.checkpoints import write_safetensors, write_sharded
from tests.helpers.quantised_models import QuantisedModel

Edit = Callable[[QuantisedModel], object]
FileEdit = Callable[[Path], object]

LFS_POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 4997748696
"""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.experts.2.down_proj"
NORM = "model.norm.weight"


@dataclass(frozen=True)
class Spoilt:
    """`spoils`: of the tensors and config.json before they are written; `files`: of the files afterwards."""

    # Key of `MODEL_FORMATS`.
    format: str
    # All of them are in the message.
    named: tuple[str, ...]
    spoils: Edit = lambda model: None
    files: FileEdit = lambda directory: None


def without(*names: str) -> Edit:
    def spoil(model: QuantisedModel) -> None:
        for name in names:
            del model.tensors[name]

    return spoil


def reshaped(name: str, *shape: int) -> Edit:
    """Returns an edit to a tensor of ones, in the type it had."""

    def spoil(model: QuantisedModel) -> None:
        model.tensors[name] = np.ones(shape, model.tensors[name].dtype)

    return spoil


def filled(name: str, value: Any) -> Edit:
    """Returns one element of it changed."""

    def spoil(model: QuantisedModel) -> None:
        array = model.tensors[name].copy()
        array.flat[array.size // 2] = value
        model.tensors[name] = array

    return spoil


def added(name: str, array: Any) -> Edit:
    def spoil(model: QuantisedModel) -> None:
        model.tensors[name] = array

    return spoil


def typed(name: str, dtype: str) -> Edit:
    """The header says another type of the same size."""

    def spoil(model: QuantisedModel) -> None:
        model.dtypes[name] = dtype

    return spoil


def configured(**changes: Any) -> Edit:
    """Returns an edit of quantization_config."""

    def spoil(model: QuantisedModel) -> None:
        model.config["quantization_config"] = {**model.config["quantization_config"], **changes}

    return spoil


def weights_configured(**changes: Any) -> Edit:
    """Returns an edit of the one group's weights in compressed-tensors."""

    def spoil(model: QuantisedModel) -> None:
        config = json.loads(json.dumps(model.config["quantization_config"]))
        config["config_groups"]["group_0"]["weights"] |= changes
        model.config["quantization_config"] = config

    return spoil


def unconfigured(model: QuantisedModel) -> None:
    """Quantised tensors of which config.json says nothing."""
    del model.config["quantization_config"]


def truncated(directory: Path) -> None:
    """The file ends in the middle of its last tensor."""
    file = directory / SINGLE
    file.write_bytes(file.read_bytes()[:-100])


def garbled(directory: Path) -> None:
    """A header that is no JSON."""
    file = directory / SINGLE
    content = bytearray(file.read_bytes())
    content[8:16] = b"\xff" * 8
    file.write_bytes(bytes(content))


def header_too_long(directory: Path) -> None:
    """A length that exceeds the file."""
    (directory / SINGLE).write_bytes((1 << 40).to_bytes(8, "little") + b"{}")


def header_of(text: str) -> FileEdit:
    """Returns a whole header that is this text, before the data of another."""

    def spoil(directory: Path) -> None:
        raw = text.encode()
        (directory / SINGLE).write_bytes(len(raw).to_bytes(8, "little") + raw)

    return spoil


def longer(directory: Path) -> None:
    """Bytes that no tensor has."""
    with (directory / SINGLE).open("ab") as stream:
        stream.write(bytes(64))


def header_changed(name: str, **changes: Any) -> FileEdit:
    """Returns one entry of the header, whatever follows; data stay where they are."""

    def spoil(directory: Path) -> None:
        file = directory / SINGLE
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header[name] |= changes
        raw = json.dumps(header).encode()
        raw += b" " * (length - len(raw))
        file.write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + length :])

    return spoil


def sharded(edit: FileEdit) -> FileEdit:
    """In two shards with an index file, then edited."""

    def spoil(directory: Path) -> None:
        values = np.ones(4, np.float32)
        (directory / SINGLE).unlink()
        write_sharded(directory, {NORM: values, f"{Q}.weight": values}, shards=2)
        edit(directory)

    return spoil


def indexed(changes: dict[str, str]) -> FileEdit:
    """Returns the names of tensors that the index file puts elsewhere."""

    def spoil(directory: Path) -> None:
        content = json.loads((directory / INDEX).read_text())
        content["weight_map"] |= changes
        (directory / INDEX).write_text(json.dumps(content))

    return spoil


def twice(directory: Path) -> None:
    """A tensor in both shards."""
    values = np.ones(4, np.float32)
    write_safetensors(directory / "model-00002-of-00002.safetensors", {NORM: values, f"{Q}.weight": values})


def removed(name: str) -> FileEdit:
    return lambda directory: (directory / name).unlink()


def written(name: str, text: str) -> FileEdit:
    return lambda directory: (directory / name).write_text(text)
