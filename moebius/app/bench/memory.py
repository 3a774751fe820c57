"""What this machine's memory gives: the limit that decode speed is compared with.

The probe is `memchr` of the C library over a buffer that does not hold the byte: one vectorised pass of
pure reads, faster than memory on any current core, and without the GIL (ctypes drops it).
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import mmap
import os
import time

PROBE_BYTES = 512 * 2**20
PASSES = 3


def read_bandwidth(total_bytes: int = PROBE_BYTES, threads: int = 0) -> float:
    """Bytes per second that `threads` threads (0: one per allowed CPU) read together; best of 3 passes.

    `total_bytes` is divided among the threads; it has to be well above the last-level cache.
    """
    threads = threads or len(os.sched_getaffinity(0))
    libc = ctypes.CDLL(None)
    libc.memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    libc.memchr.restype = ctypes.c_void_p
    share = total_bytes // threads

    def fill() -> mmap.mmap:
        # Written by the thread that reads it, so that its pages lie on that thread's NUMA node.
        area = mmap.mmap(-1, share)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(area)), 1, share)
        return area

    def read(area: mmap.mmap) -> None:
        found = libc.memchr(ctypes.addressof(ctypes.c_char.from_buffer(area)), 0, share)
        if found is not None:
            raise RuntimeError("the probe's buffer was overwritten")

    best = 0.0
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        areas = [future.result() for future in [pool.submit(fill) for _ in range(threads)]]
        for _ in range(PASSES):
            begin = time.perf_counter()
            for future in [pool.submit(read, area) for area in areas]:
                future.result()
            best = max(best, share * threads / (time.perf_counter() - begin))
    return best
