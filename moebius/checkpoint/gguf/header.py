"""What one GGUF file says before its data: metadata and where each tensor lies."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebius.checkpoint.errors import CheckpointError, refuse_pointer

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# Characters; ggml itself takes 63.
MAX_NAME = 512
# ggml knows no more axes.
MAX_AXES = 4
# Arrays within arrays; no writer makes any, and each level of them is one of Python's calls.
MAX_ARRAY_DEPTH = 4

_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
# Value types of the format by number, as struct spells them.
_SCALARS: Mapping[int, str] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


class CutHeaderError(CheckpointError):
    """The file ends inside of its header."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the header; filled by `read_header`."""

    name: str
    file: Path
    type_number: int  # Number of its quantisation type, as ggml counts them.
    shape: tuple[int, ...]  # Of values, outermost axis first (the file has them the other way round).
    offset: int  # First byte of the data, counted from the start of the file.


@dataclass(frozen=True)
class GgufHeader:
    """Filled by `read_header`."""

    # Numbers, strings, and lists of them.
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


class _Cursor:
    """Reads values from the start of a file on, and says where it ends too early."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self.file = file
        self.position = 0
        self._content = content

    def take(self, count: int) -> bytes:
        """Returns the next bytes. Raises CutHeaderError at the file's end."""
        end = self.position + count
        if end > len(self._content):
            raise CutHeaderError(
                f"{self.file} is truncated: its header reaches to byte {end} of {len(self._content)} at least"
            )
        data = self._content[self.position : end]
        self.position = end
        return data

    def number(self, kind: str) -> Any:
        """Returns one scalar of a struct type."""
        return struct.unpack(kind, self.take(struct.calcsize(kind)))[0]

    def text(self) -> str:
        """Returns a string: its length, then UTF-8."""
        # Vocabularies may hold pieces that are no text; nothing is looked up by them.
        return self.take(self.number("<Q")).decode(errors="replace")

    def texts(self, count: int) -> list[str]:
        """Returns `count` strings that follow one another: a vocabulary has hundreds of thousands."""
        content, position = self._content, self.position
        found: list[str] = []
        for _ in range(count):
            begin = position + _LENGTH.size
            if begin > len(content):
                break
            (size,) = _LENGTH.unpack_from(content, position)
            if begin + size > len(content):
                break
            position = begin + size
            found.append(content[begin:position].decode(errors="replace"))
        self.position = position
        # The first one that the file does not hold whole is refused as any other.
        return found if len(found) == count else [*found, self.text()]

    def value(self, kind: int) -> Any:
        """Returns a metadata value of that type.

        Raises CheckpointError for a type that the format does not have, and for deeply nested arrays.
        """
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(1)
        return self.number(self._scalar(kind))

    def _array(self, depth: int) -> list[Any]:
        if depth > MAX_ARRAY_DEPTH:
            raise CheckpointError(
                f"{self.file}: at byte {self.position} arrays are nested in {depth - 1} others; "
                f"allowed: {MAX_ARRAY_DEPTH - 1}"
            )
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            return self.texts(count)
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(count)]
        letter = self._scalar(kind)[1]
        return list(struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize(f"<{letter}"))))

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.file} is malformed: value type {kind} at byte {self.position}")
        return _SCALARS[kind]


def read_header(file: Path) -> GgufHeader:
    """Returns metadata and tensors of one file.

    Raises CheckpointError naming the file and what is wrong with it.
    """
    refuse_pointer(file)
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _read(_Cursor(file, content))
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} cannot be read as GGUF: {error}") from error


def _read(cursor: _Cursor) -> GgufHeader:
    if cursor.take(len(MAGIC)) != MAGIC:
        raise CheckpointError(f"{cursor.file} is not GGUF: it does not begin with {MAGIC.decode()}")
    version = cursor.number("<I")
    if version not in VERSIONS:
        raise CheckpointError(
            f"{cursor.file} is GGUF of version {version}; little-endian files of "
            f"{' and '.join(map(str, VERSIONS))} are supported"
        )
    num_tensors, num_values = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("<I"))
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{cursor.file}: general.alignment is {alignment!r}; allowed: 1 and more")
    begin = -(-cursor.position // alignment) * alignment
    tensors = (GgufTensor(name, cursor.file, kind, shape, begin + at) for name, kind, shape, at in entries)
    return GgufHeader(metadata, tuple(tensors))


def _read_entry(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Name, type, shape, and offset from the start of the data."""
    name = cursor.text()
    if len(name) > MAX_NAME:
        raise CheckpointError(
            f"{cursor.file} is malformed: a tensor's name of {len(name)} characters before byte "
            f"{cursor.position}; allowed: {MAX_NAME}"
        )
    axes = cursor.number("<I")
    if axes > MAX_AXES:
        raise CheckpointError(f"{cursor.file}: tensor {name!r} has {axes} axes; allowed: {MAX_AXES}")
    sizes = [cursor.number("<Q") for _ in range(axes)]
    kind, offset = cursor.number("<I"), cursor.number("<Q")
    return name, kind, tuple(reversed(sizes)), offset
