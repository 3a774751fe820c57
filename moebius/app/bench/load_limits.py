"""How fast files can be read on this machine: the limits that loading is compared with.

Two of them. "reused": every thread reads into a small buffer of its own, again and again; the bytes are gone
afterwards. "kept": into fresh memory that holds all of the file, as any loader has to; the kernel then also
clears and maps that memory.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CHUNK_BYTES = 1 << 20


def read_speed(files: list[Path], threads: int, *, keep: bool) -> float:
    """Bytes per second of one pass over all files with `threads` threads."""
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
    memory = [_fresh(size) if keep else None for size in sizes]
    chunks = itertools.chain.from_iterable(
        ((index, begin) for begin in range(0, size, CHUNK_BYTES)) for index, size in enumerate(sizes)
    )
    take = _locked(chunks)
    begin = time.perf_counter()
    try:
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            work = [pool.submit(_read, take, descriptors, memory) for _ in range(threads)]
            read = sum(future.result() for future in work)
        seconds = time.perf_counter() - begin
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        for area in memory:
            if area is not None:
                area.close()
    if read != sum(sizes):
        raise RuntimeError(f"{read} of {sum(sizes)} bytes were read")
    return read / seconds


def _fresh(size: int) -> mmap.mmap:
    """Untouched memory, in huge pages where allowed, as packed weights have."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    return area


def _locked(chunks: Iterator[tuple[int, int]]) -> Callable[[], tuple[int, int] | None]:
    # A generator may not be advanced by two threads at once; a list's iterator may.
    items = iter(list(chunks))
    return lambda: next(items, None)


def _read(
    take: Callable[[], tuple[int, int] | None], descriptors: list[int], memory: list[mmap.mmap | None]
) -> int:
    total = 0
    buffer = bytearray(CHUNK_BYTES)
    while (item := take()) is not None:
        index, begin = item
        area = memory[index]
        if area is None:
            total += os.preadv(descriptors[index], [buffer], begin)
            continue
        with memoryview(area) as whole, whole[begin : begin + CHUNK_BYTES] as part:
            total += os.preadv(descriptors[index], [part], begin)
    return total
