"""What the memories of this machine give, measured in the run that is compared with it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from moebius.app.bench.engine.bounds import Bandwidths
from moebius.app.bench.kernels_limits import BandwidthLimit, available_memory, cache_bytes, probe_bytes
from moebius.topology import Topology

if TYPE_CHECKING:
    import torch

_GPU_BYTES = 2**30
_GPU_PASSES = 10


def measure_bandwidths(device: torch.device, cpu_bytes: int = 0, gpus: int = 1) -> Bandwidths:
    """Of all allowed CPUs, best of many ways to read; and of the memory of `gpus` GPUs. Prints both.

    Tensor-parallel ranks read at once, stages one after another, so `gpus` is the number of the former.
    `cpu_bytes`: size of the buffer read; 0: several times the caches.
    """
    cpus = Topology.detect().usable_cpus()
    nbytes = cpu_bytes or probe_bytes(cache_bytes(cpus), available_memory())
    limit = BandwidthLimit("auto", list(cpus), nbytes)
    speed, pattern = limit.best
    gpu = gpus * gpu_bandwidth(device) if device.type == "cuda" else None
    print(f"memory read bandwidth of {len(cpus)} CPUs: {speed / 1e9:.1f} GB/s ({pattern})")
    if gpu is not None:
        print(f"GPU memory bandwidth: {gpu / 1e9:.0f} GB/s (copying, read and written; {gpus} GPUs)")
    return Bandwidths(speed, gpu)


def gpu_bandwidth(device: torch.device) -> float:
    """Bytes per second read and written by a copy of 1 GiB; best of ten."""
    import torch

    source = torch.ones(_GPU_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(_GPU_PASSES):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        best = max(best, 2 * _GPU_BYTES / (time.perf_counter() - begin))
    del source, target
    torch.cuda.empty_cache()
    return best
