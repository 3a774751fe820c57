"""All parts of a GGUF model as one: its metadata, and its tensors by name."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.blocks import BlockType, block_type
from moebius.checkpoint.gguf.files import gguf_files
from moebius.checkpoint.gguf.header import GgufHeader, GgufTensor, read_header


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """One tensor of the file, its type known and its size checked; filled by `open_gguf`."""

    name: str
    file: Path
    type: BlockType
    # Of values, outermost axis first.
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class GgufModel:
    """Filled by `open_gguf`."""

    # The first part, which has the metadata.
    file: Path
    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredBlocks]

    def value(self, key: str) -> Any:
        """Returns `<architecture>.<key>`; None where the file does not have it."""
        return self.metadata.get(f"{self.architecture}.{key}")


def open_gguf(model_path: str | Path) -> GgufModel:
    """Headers of all parts, read once for as long as the files stay the same.

    Raises CheckpointError naming a file that is missing, malformed or truncated, a tensor of an unknown type
    or stored twice, or parts that are not of one model.
    """
    files = gguf_files(model_path)
    stats = [file.stat() for file in files]
    return _open(files, tuple((stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats))


# The key's second half makes a file that was replaced another one.
@lru_cache(maxsize=4)
def _open(files: tuple[Path, ...], _identity: tuple[tuple[int, int, int], ...]) -> GgufModel:
    headers = [read_header(file) for file in files]
    metadata = headers[0].metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(
            f"{files[0]} has no general.architecture: it is not (the first part of) a model"
        )
    _check_parts(files, headers)
    tensors: dict[str, StoredBlocks] = {}
    for header in headers:
        for entry in header.tensors:
            if entry.name in tensors:
                raise CheckpointError(
                    f"tensor {entry.name!r} is in {tensors[entry.name].file} and in {entry.file}"
                )
            tensors[entry.name] = _stored(entry)
    promised = metadata.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise CheckpointError(
            f"{files[0]} declares {reprlib.repr(promised)} tensors, but its parts contain {len(tensors)}"
        )
    return GgufModel(files[0], architecture, metadata, tensors)


def _check_parts(files: tuple[Path, ...], headers: list[GgufHeader]) -> None:
    """Every part knows its number and how many there are."""
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        found = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1)
        if not all(isinstance(value, int) for value in found):
            raise CheckpointError(
                f"{file}: split.no and split.count are {reprlib.repr(found)}; allowed: integers"
            )
        if found != (number, len(files)) and not (len(files) == 1 and found[1] == 0):
            raise CheckpointError(
                f"{file} says it is part {found[0] + 1} of {found[1]}, "
                f"but its name says {number + 1} of {len(files)}"
            )


def _stored(entry: GgufTensor) -> StoredBlocks:
    kind = block_type(entry.type_number, entry.name)
    count = math.prod(entry.shape)
    if not entry.shape or entry.shape[-1] % kind.weights:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name!r} of shape {list(entry.shape)} is {kind.name}, which stores "
            f"rows of multiples of {kind.weights}"
        )
    nbytes = count // kind.weights * kind.nbytes
    size = entry.file.stat().st_size
    if entry.offset + nbytes > size:
        raise CheckpointError(
            f"{entry.file} is truncated: tensor {entry.name!r} ends at byte {entry.offset + nbytes} of {size}"
        )
    return StoredBlocks(entry.name, entry.file, kind, entry.shape, entry.offset, nbytes)
