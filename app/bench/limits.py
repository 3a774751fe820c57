"""What the machine could do: read bandwidth and compute peaks, measured on the cores that are compared.

The bandwidth of a run is the best of many ways to read (`ReadPattern`), each measured several times, and
measured again with every figure; the peak of a unit is that of a loop which never leaves its registers.

The probe of `read_bandwidth` is `memchr` of the C library over a buffer that does not hold the byte: one
vectorised pass of pure reads, faster than memory on any current core, and without the GIL (ctypes drops
it).
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moebius import _kernels_testing

PASSES = 3
REFRESHED = 3
PEAK_SECONDS = 0.1
SMALLEST_PROBE = 512 * 2**20
CACHES = 8


@dataclass(frozen=True, order=True)
class ReadPattern:
    """One way for all threads together to read a buffer; filled by `patterns`."""

    # 0: one contiguous slice per thread; else blocks in random order, each taken by the next free thread.
    block_bytes: int
    prefetch_bytes: int  # Distance of software prefetch; 0: none.
    hint: str  # Where prefetched lines go: "t0", "t1" or "nta".
    huge_pages: bool  # Whether the buffer asks for 2 MiB pages.

    def __str__(self) -> str:
        order = (
            f"{self.block_bytes // 1024} KiB blocks in random order"
            if self.block_bytes
            else "contiguous slices"
        )
        ahead = (
            f"prefetch {self.prefetch_bytes} bytes ahead ({self.hint})"
            if self.prefetch_bytes
            else "no prefetch"
        )
        return f"{order}, {ahead}, {'2 MiB' if self.huge_pages else '4 KiB'} pages"


def patterns(huge_pages: bool) -> list[ReadPattern]:
    """Returns all ways that are tried: orders x prefetch distances x hints on 2 MiB pages, fewer on 4 KiB
    pages.
    """
    blocks = (0, 16 * 1024, 64 * 1024, 256 * 1024)
    if not huge_pages:
        return [ReadPattern(block, ahead, "t0", False) for block in blocks for ahead in (0, 2048)]
    plain = [ReadPattern(block, 0, "t0", True) for block in blocks]
    ahead = itertools.product(blocks, (1024, 2048, 4096), ("t0", "t1", "nta"))
    return plain + [ReadPattern(block, distance, hint, True) for block, distance, hint in ahead]


class BandwidthLimit:
    """Best read bandwidth seen so far, bytes per second, of `cpus` at instruction-set level `isa`."""

    def __init__(self, isa: str, cpus: Sequence[int], nbytes: int) -> None:
        """Measures every pattern over a buffer of `nbytes`, PASSES times.

        Raises:
            ValueError: a cpu cannot be used, or the level does not exist here.
        """
        self.speeds: dict[ReadPattern, float] = {}
        for huge_pages in (False, True):
            # The last one stays, for `refresh`; the first is freed before, not to need the memory of both.
            self._probe: _kernels_testing.BandwidthProbe | None = None
            self._probe = _kernels_testing.BandwidthProbe(
                isa=isa, cpus=list(cpus), nbytes=nbytes, huge_pages=huge_pages
            )
            # In turn, so that a disturbance does not hit one pattern only.
            for _ in range(PASSES):
                self._measure(patterns(huge_pages))

    def refresh(self) -> None:
        """Measures the best patterns once more."""
        for _ in range(PASSES):
            self._measure(self._best_first()[:REFRESHED])

    def refresh_best(self) -> float:
        """One more pass of the best pattern; returns its bytes per second."""
        return self._measure(self._best_first()[:1])

    @property
    def best(self) -> tuple[float, ReadPattern]:
        """Bytes per second and the pattern that gave them."""
        pattern = max(self.speeds, key=self.speeds.__getitem__)
        return self.speeds[pattern], pattern

    def best_of_each_order(self) -> list[ReadPattern]:
        """Returns the best pattern of each block and page size."""
        best: dict[tuple[int, bool], ReadPattern] = {}
        for pattern, speed in self.speeds.items():
            key = (pattern.block_bytes, pattern.huge_pages)
            if key not in best or speed > self.speeds[best[key]]:
                best[key] = pattern
        return [best[key] for key in sorted(best)]

    def _best_first(self) -> list[ReadPattern]:
        # Those on 2 MiB pages, which the probe that stayed has.
        return sorted((p for p in self.speeds if p.huge_pages), key=self.speeds.__getitem__, reverse=True)

    def _measure(self, chosen: Iterable[ReadPattern]) -> float:
        assert self._probe is not None
        highest = 0.0
        for pattern in chosen:
            speed = self._probe.measure(
                block_bytes=pattern.block_bytes,
                prefetch_bytes=pattern.prefetch_bytes,
                hint=pattern.hint,
                passes=1,
            )
            highest = max(highest, speed)
            self.speeds[pattern] = max(speed, self.speeds.get(pattern, 0.0))
        return highest


class PeakLimit:
    """Best operations per second seen so far of every unit that level `isa` has on `cpus`."""

    def __init__(self, isa: str, cpus: Sequence[int]) -> None:
        self._cpus = list(cpus)
        self._row_types = dict(_kernels_testing.peak_units(isa))
        self.speeds = {unit: self._measure(unit) for unit in self._row_types}

    def refresh(self, row_type: str) -> None:
        """Measures the unit of `best(row_type)` once more."""
        unit = self.best(row_type)[1]
        self.speeds[unit] = max(self.speeds[unit], self._measure(unit))

    def best(self, row_type: str) -> tuple[float, str]:
        """Operations per second and name of the fastest unit that can compute GEMMs of `row_type`.

        bfloat16 and int8 values are exact in float32, so a float32 unit can always stand in.
        """
        units = [unit for unit, kind in self._row_types.items() if kind in (row_type, "float32")]
        unit = max(units, key=self.speeds.__getitem__)
        return self.speeds[unit], unit

    def _measure(self, unit: str) -> float:
        return _kernels_testing.measure_peak(unit, cpus=self._cpus, seconds=PEAK_SECONDS)


def row_type_of(weight_format: str) -> str:
    """Returns whose peak a format is compared with: int8 for W8A8, float32 for itself, bfloat16 for
    the rest.
    """
    return {"int8_w8a8": "int8", "float32": "float32"}.get(weight_format, "bfloat16")


def cache_bytes(cpus: Sequence[int], root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Returns the size of all last-level caches that `cpus` use; 0 when the system does not say."""
    caches: dict[str, int] = {}
    for cpu in cpus:
        for level in (3, 2):
            directory = root / f"cpu{cpu}" / "cache" / f"index{level}"
            if (directory / "size").is_file():
                size = (directory / "size").read_text().strip()
                shared = (directory / "shared_cpu_list").read_text().strip()
                caches[f"{level}:{shared}"] = int(size.removesuffix("K")) * 1024
                break
    return sum(caches.values())


def probe_bytes(cache: int, memory: int) -> int:
    """Returns the size of the buffer that bandwidth is measured with: several caches, an eighth of the memory
    at most.
    """
    return max(SMALLEST_PROBE, min(CACHES * cache, memory // 8))


PROBE_BYTES = 512 * 2**20


def read_bandwidth(total_bytes: int = PROBE_BYTES, threads: int = 0) -> float:
    """Returns the bytes per second that `threads` threads (0: one per allowed CPU) read together; best of 3
    passes.

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
