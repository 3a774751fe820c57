"""Measures how fast a NUMA node's memory is read by how many of its cores, in about a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from app.bench.limits import cache_bytes
from moebius import _kernels_testing
from moebius.process.limits import available_memory

# As the kernels read: blocks in random order, with prefetch ahead.
_BLOCK_BYTES, _PREFETCH_BYTES = 64 * 1024, 2048
_PASSES = 3
# The buffer, several times the caches: what little of it stays there does not make a knee.
_SMALLEST_BYTES, _CACHES = 256 * 2**20, 3
# Of the memory that is free, for the buffers of all nodes together.
_MEMORY_SHARE = 8
_STEPS = 8


def thread_counts(most: int) -> tuple[int, ...]:
    """Returns the numbers of threads that are measured, up to `most`: eighths of it, from a quarter on."""
    return tuple(sorted({-(-most * step // _STEPS) for step in range(_STEPS // 4, _STEPS + 1)}))


def measure_read_curves(
    nodes: Mapping[int, Sequence[int]], most: int
) -> dict[int, tuple[tuple[int, float], ...]]:
    """Measures NUMA node -> (threads, bytes per second), for each node's `cpus`, one of each core; nodes at
    once.

    Thread i of a measurement is pinned to the i-th CPU; at most `most` threads read on a node. Raises
    ValueError where too little memory is free, or a CPU cannot be used.
    """
    caches = {node: cache_bytes(cpus) for node, cpus in nodes.items()}
    wanted = max(_SMALLEST_BYTES, _CACHES * max(caches.values()))
    allowed = available_memory() // _MEMORY_SHARE // len(nodes)
    if allowed < _SMALLEST_BYTES:
        raise ValueError(f"{allowed >> 20} MiB of memory are too few to measure how fast it is read")

    def measure(cpus: Sequence[int]) -> tuple[tuple[int, float], ...]:
        counts = thread_counts(min(most, len(cpus)))
        return tuple((count, _speed(cpus[:count], min(wanted, allowed))) for count in counts)

    with ThreadPoolExecutor(len(nodes)) as pool:
        return dict(zip(nodes, pool.map(measure, nodes.values()), strict=True))


def _speed(cpus: Sequence[int], nbytes: int) -> float:
    """Bytes per second of the best pass."""
    probe = _kernels_testing.BandwidthProbe(isa="auto", cpus=list(cpus), nbytes=nbytes, huge_pages=True)
    return probe.measure(block_bytes=_BLOCK_BYTES, prefetch_bytes=_PREFETCH_BYTES, hint="t0", passes=_PASSES)
