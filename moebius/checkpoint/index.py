"""Which tensors a checkpoint holds and where, read from its headers alone; here those of safetensors.

Format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON header, data).
Values are read by `reader` (copies) or `mapped_reader` (views whose pages are given back after use): pages
that stay mapped would count as resident memory, and a loader's peak memory has to stay bounded.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from moebius.checkpoint.derived import DerivedValues
from moebius.checkpoint.errors import CheckpointError, refuse_pointer

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WEIGHT_FILES = ("*.safetensors", "*.gguf")

# numpy has no bfloat16 and no float8: their bits are returned as unsigned integers of the same width.
NUMPY_DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}

# The safetensors library itself refuses longer headers.
MAX_HEADER_BYTES = 100_000_000


def has_weights(directory: str | Path) -> bool:
    """Returns whether any file of weights is there, or only the configuration."""
    path = Path(directory)
    return path.is_file() or any(next(path.glob(pattern), None) is not None for pattern in WEIGHT_FILES)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies; filled by `read_header`, or for GGUF by `gguf_index`."""

    name: str
    file: Path
    # Key of NUMPY_DTYPES, as the header spells it.
    dtype: str
    shape: tuple[int, ...]
    # First byte of the data, counted from the start of the file.
    offset: int
    nbytes: int
    # What makes the values where they do not lie in the file as such; None: they do.
    derived: DerivedValues | None = None
    # The packed format of an expert's matrix where it is not that of its type: values that were quantised
    # do not deserve 32 bits.
    packed_as: str = ""

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """Element type as numpy holds it (bfloat16 as uint16, float8 as uint8)."""
        return NUMPY_DTYPES[self.dtype]


@dataclass(frozen=True, eq=False)
class CheckpointIndex:
    """All tensors of a checkpoint directory by name; made by `models.checkpoint.open_index`."""

    # Of a GGUF model this may be a file.
    directory: Path
    tensors: Mapping[str, TensorInfo]
    # Keys of `expert_layouts.EXPERT_TENSOR_LAYOUTS` where the kind of file decides; empty: the family does.
    layouts: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> TensorInfo:
        """Returns the tensor's place; raises CheckpointError naming it when the checkpoint lacks it."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"tensor {name!r} is missing from {self.directory}")
        return info

    def __contains__(self, name: object) -> bool:
        return name in self.tensors


def open_safetensors(directory: str | Path) -> CheckpointIndex:
    """Read the headers of a single file, or of every shard that the index file names; once, while the result
    is in use and the files stay what they are: of tens of thousands of tensors it takes half a second.

    Raises CheckpointError naming the file when one is missing, truncated or malformed, when a tensor is
    listed but not present, or when a name occurs twice.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    key = directory, _signature(directory)
    found = _in_use.get(key)
    if found is None:
        found = _in_use[key] = _open_safetensors(directory)
    return found


_Signature = tuple[tuple[str, int, int, int, int, int], ...]
# What is open, as long as something refers to it.
_in_use: WeakValueDictionary[tuple[Path, _Signature], CheckpointIndex] = WeakValueDictionary()


def _signature(directory: Path) -> _Signature:
    """Returns what changes when a file with headers does: name, size, place and times."""
    found = []
    for entry in os.scandir(directory):
        if entry.name.endswith((".safetensors", INDEX_FILE)) and entry.is_file():
            status = entry.stat()
            times = status.st_mtime_ns, status.st_ctime_ns
            found.append((entry.name, status.st_size, status.st_dev, status.st_ino, *times))
    return tuple(sorted(found))


def _open_safetensors(directory: Path) -> CheckpointIndex:
    tensors: dict[str, TensorInfo] = {}
    weight_map = _weight_map(directory)
    for file in _shard_files(directory, weight_map):
        for info in read_header(file):
            if info.name in tensors:
                raise CheckpointError(f"tensor {info.name!r} is in {tensors[info.name].file} and in {file}")
            tensors[info.name] = info
    _check_weight_map(directory, weight_map, tensors)
    return CheckpointIndex(directory, tensors)


def _shard_files(directory: Path, weight_map: Mapping[str, str]) -> list[Path]:
    """Returns the files that make up the checkpoint, ascending by name; the index file wins over a single
    one.
    """
    files = [directory / name for name in sorted(set(weight_map.values()))] or [directory / SINGLE_FILE]
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing (a checkpoint has {SINGLE_FILE} or {INDEX_FILE} with its shards): "
                "was its download broken off?"
            )
    return files


def _weight_map(directory: Path) -> dict[str, str]:
    """Returns tensor name to shard file name, from the index file; empty when there is none."""
    path = directory / INDEX_FILE
    if not path.exists():
        return {}
    refuse_pointer(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    content = _json(raw, path, str(path))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no 'weight_map' object")
    plain: set[str] = set()
    for name, file in weight_map.items():
        if isinstance(file, str) and (file in plain or Path(file).name == file):
            plain.add(file)
            continue
        raise CheckpointError(
            f"{path}: tensor {name!r} names the shard {file!r}; a plain file name is allowed"
        )
    return weight_map


def _check_weight_map(
    directory: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> None:
    """Every tensor the index file promises is in the shard it names."""
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise CheckpointError(f"tensor {name!r} is not in {directory / file}, where {INDEX_FILE} puts it")


def read_header(file: Path) -> list[TensorInfo]:
    """Returns every tensor of one safetensors file.

    Raises CheckpointError naming the file, and the tensor if one.
    """
    refuse_pointer(file)
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file} is truncated or not safetensors: header of {length} bytes, file of {size}"
                )
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    header = _json(raw, file, f"{file} is not safetensors: its header")
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} is not safetensors: its header is not a JSON object")
    start = 8 + length
    found = [
        _tensor_info(file, name, entry, start, size)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    _check_covered(file, found, start, size)
    return found


def _json(raw: bytes, file: Path, what: str) -> object:
    """Raises CheckpointError for what is no JSON, or has a name twice, of which one value would be lost."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{file} contains the name {twice!r} twice")
        return found

    try:
        content: object = json.loads(raw, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON ({error})") from error
    return content


def _check_covered(file: Path, tensors: list[TensorInfo], start: int, size: int) -> None:
    """The format has tensors lie side by side up to the end: anything else is a header of other data."""
    position = start
    for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
        if info.offset != position:
            raise CheckpointError(
                f"{file}: tensor {info.name!r} begins at byte {info.offset}, but the tensor before "
                f"it ends at byte {position}; the file is damaged"
            )
        position += info.nbytes
    if position != size:
        raise CheckpointError(f"{file} has {size} bytes, but its tensors end at byte {position}")


def _tensor_info(file: Path, name: str, entry: object, start: int, size: int) -> TensorInfo:
    """Returns one header entry, checked against the file's size and its own shape."""
    try:
        if not isinstance(entry, dict):
            raise TypeError("not an object")
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if not isinstance(dtype, str) or any(type(n) is not int for n in (*shape, begin, end)):
            raise TypeError("a dtype that is no text, or sizes that are no integers")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: the header entry of tensor {name!r} is malformed") from error
    if dtype not in NUMPY_DTYPES:
        raise CheckpointError(
            f"{file}: tensor {name!r} has dtype {reprlib.repr(dtype)}; known: {', '.join(NUMPY_DTYPES)}"
        )
    expected = math.prod(shape) * NUMPY_DTYPES[dtype].itemsize
    if min(shape, default=0) < 0 or begin < 0 or end - begin != expected:
        raise CheckpointError(
            f"{file}: tensor {name!r} spans {end - begin} bytes, {dtype} {list(shape)} needs {expected}"
        )
    if start + end > size:
        raise CheckpointError(f"{file} is truncated: tensor {name!r} ends at byte {start + end} of {size}")
    return TensorInfo(name, file, dtype, shape, start + begin, expected)


def open_for_reading(file: Path) -> int:
    """Returns a read-only descriptor; the caller closes it. Raises CheckpointError naming the file."""
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be opened: {error.strerror}") from error
