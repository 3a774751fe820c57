"""Writes safetensors shards from many threads: headers first, then every tensor at its place.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header
with dtype, shape and byte range of every tensor, then the data.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moebius.app.random_model.draws import Array
from moebius.errors import UserError

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "I64": 8}
_ALIGNMENT = 64
# One pwrite of more than this many bytes would hold its array for long.
_PIECE = 2**26


@dataclass(frozen=True)
class TensorSpec:
    """Name in the checkpoint, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return ITEM_BYTES[self.dtype] * int(np.prod(self.shape))


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are drawn together; one thread's piece of work."""

    tensors: tuple[TensorSpec, ...]
    # Arrays in the order of `tensors`.
    draw: Callable[[], Sequence[Array]]


@dataclass(frozen=True)
class _Placed:
    path: Path
    offsets: tuple[int, ...]
    group: TensorGroup


def write_shards(
    directory: Path,
    shards: Sequence[Sequence[TensorGroup]],
    threads: int,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> int:
    """Writes all shards and their index; returns the bytes of all tensors.

    `on_bytes` is told of progress, from this thread. Raises UserError when the file system does not take it.
    """
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    weight_map: dict[str, str] = {}
    total = 0
    try:
        placed: list[_Placed] = []
        for name, groups in zip(names, shards, strict=True):
            specs = [spec for group in groups for spec in group.tensors]
            weight_map |= dict.fromkeys((spec.name for spec in specs), name)
            total += sum(spec.nbytes for spec in specs)
            placed += _lay_out(directory / name, groups)
        for count in _in_threads(placed, threads):
            on_bytes(count)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")
    except OSError as error:
        raise UserError(f"{directory}: can not write {total / 2**30:.1f} GiB: {error.strerror}") from None
    return total


def _lay_out(path: Path, groups: Sequence[TensorGroup]) -> Iterator[_Placed]:
    """Writes the header, makes the file as long as it will be, and says where each group goes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in itertools.chain.from_iterable(group.tensors for group in groups):
        begin, end = end, end + spec.nbytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(len(encoded) + 8) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        position = file.tell()
        file.truncate(position + end)
    for group in groups:
        offsets = [position]
        for spec in group.tensors:
            offsets.append(offsets[-1] + spec.nbytes)
        position = offsets.pop()
        yield _Placed(path, tuple(offsets), group)


def _in_threads(placed: Sequence[_Placed], threads: int) -> Iterator[int]:
    """Bytes of each group as it is done. The first error ends everything that has not begun."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(_write, entry) for entry in placed]
        try:
            for future in concurrent.futures.as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _write(entry: _Placed) -> int:
    arrays = entry.group.draw()
    file = os.open(entry.path, os.O_WRONLY)
    try:
        for spec, offset, array in zip(entry.group.tensors, entry.offsets, arrays, strict=True):
            if array.nbytes != spec.nbytes:
                raise ValueError(f"{spec.name}: {array.nbytes} bytes were drawn, {spec.nbytes} are declared")
            data = np.ascontiguousarray(array).data.cast("B")
            begin = 0
            while begin < len(data):
                begin += os.pwrite(file, data[begin : begin + _PIECE], offset + begin)
    finally:
        os.close(file)
    return sum(spec.nbytes for spec in entry.group.tensors)
