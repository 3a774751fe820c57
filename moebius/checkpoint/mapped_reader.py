"""Reads parts of tensors without a copy: views of pages that are mapped for as long as they are needed.

A loader that packs what it reads needs no copy in between, and copying costs as much as packing. Pages are
brought in with MADV_POPULATE_READ, which reports a truncated file or a failing disk as an error where plain
access would end the process, and are given back with MADV_DONTNEED, so that resident memory stays bounded.

The system keeps what was read, for the next read of it. Where memory is about to be full of what is packed
from it, that drives out files that are in use (a killed server then starts from the disk) and leaves no 2 MiB
in one piece for packed weights; then it is better dropped.
"""

from __future__ import annotations

import collections
import errno
import math
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import TensorInfo
from moebius.checkpoint.reader import Array, SliceReader
from moebius.process.memory_advice import MADV_POPULATE_READ, advise


class MappedReader(SliceReader):
    """Like `SliceReader`, but results are read-only views, may be strided, and stay valid until `reset`.

    Rows are mapped whole; what was not asked for is left out by strides. Where the kernel cannot populate
    mappings, and for tensors that do not lie at a multiple of their element's size, results are copies. Not
    thread safe.
    """

    def __init__(self, cached_bytes: int | None = None) -> None:
        """`cached_bytes`: how much the system shall keep of what was given back, the newest; None: all.

        Processes that want parts of the same rows read the disk twice if they are farther apart.
        """
        super().__init__()
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}
        # Files of which something is populated.
        self._populated: set[Path] = set()
        self._cached_bytes = cached_bytes
        # What the system may still keep, if that is limited, oldest first: file, offset, bytes.
        self._kept: collections.deque[tuple[Path, int, int]] = collections.deque()
        self._kept_bytes = 0
        self._can_populate = True

    def reset(self) -> None:
        """Give back the pages of all results."""
        for file in self._populated:
            # All of it: kernels map whole folios, which reach beyond what was asked for.
            area = self._maps[file]
            advise(area.ctypes.data, area.size, mmap.MADV_DONTNEED)
        self._populated.clear()
        while self._cached_bytes is not None and self._kept_bytes > self._cached_bytes:
            file, begin, length = self._kept.popleft()
            os.posix_fadvise(self._descriptor(file), begin, length, os.POSIX_FADV_DONTNEED)
            self._kept_bytes -= length

    def close(self) -> None:
        """Close all files; what still refers to results keeps their mapping."""
        self.reset()
        self._maps.clear()
        super().close()

    def _read_rows(self, info: TensorInfo, base: int, rows: range, width: int, cols: range) -> Array:
        size = info.numpy_dtype.itemsize
        count = (rows[-1] + 1 - rows.start) * width if rows else 0
        begin = info.offset + (base + rows.start * width) * size
        if count == 0 or begin % size or not self._populate(info, begin, count * size):
            return super()._read_rows(info, base, rows, width, cols)
        block = self._map(info.file)[begin : begin + count * size].view(info.numpy_dtype).reshape(-1, width)
        return block[:: rows.step, cols.start : cols.stop : cols.step]

    def _map(self, file: Path) -> npt.NDArray[np.uint8]:
        found = self._maps.get(file)
        if found is None:
            size = os.fstat(self._descriptor(file)).st_size
            area = mmap.mmap(self._descriptor(file), size, mmap.MAP_SHARED, mmap.PROT_READ)
            found = self._maps[file] = np.frombuffer(area, np.uint8)
        return found

    def _populate(self, info: TensorInfo, begin: int, count: int) -> bool:
        """Bring in the file's bytes; False where the kernel cannot. Raises CheckpointError."""
        if not self._can_populate:
            return False
        area = self._map(info.file)
        if begin + count > area.size:
            raise CheckpointError(
                f"{info.file} ended at byte {area.size} while tensor {info.name!r} was read"
            )
        first = begin - begin % mmap.PAGESIZE
        length = math.ceil((begin + count - first) / mmap.PAGESIZE) * mmap.PAGESIZE
        address = area.ctypes.data + first
        number = advise(address, length, MADV_POPULATE_READ)
        if number == 0:
            self._populated.add(info.file)
            if self._cached_bytes is not None:
                self._kept.append((info.file, first, length))
                self._kept_bytes += length
            return True
        if number == errno.EINVAL:
            self._can_populate = False
            return False
        raise CheckpointError(
            f"{info.file} could not be read at byte {begin}, where tensor {info.name!r} lies: "
            f"{'the file was truncated or its disk fails' if number == errno.EFAULT else os.strerror(number)}"
        )
