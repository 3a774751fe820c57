"""What a decode step cannot be faster than: the weights it reads over what memory gives.

Layer by layer attention comes before the experts, so the dense part and the experts follow one another;
resident experts are computed while the servers compute theirs. On a CPU device there is one memory for all.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.bench.limits import BandwidthLimit, cache_bytes, probe_bytes
from moebius.host.kernel_times import cpu_name
from moebius.host.topology import Topology
from moebius.models.checkpoint import open_index
from moebius.models.read import read_geometry
from moebius.process.limits import available_memory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that one decode step reads; filled by `measure`."""

    # By the expert servers together, and by resident experts from the GPU's memory.
    cpu_experts: float
    gpu_experts: float
    dense: float  # Attention, routers, shared experts, head, and the KV of all streams.


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second, measured in the same run; `gpu` is None on a CPU device."""

    cpu: float
    gpu: float | None


@dataclass(frozen=True)
class Bound:
    """Seconds per step; filled by `bound_of`."""

    cpu_experts: float
    gpu_experts: float
    dense: float

    @property
    def step(self) -> float:
        """Shortest step: everything but what is computed side by side follows one another."""
        return self.dense + max(self.cpu_experts, self.gpu_experts)


def bound_of(traffic: StepTraffic, bandwidths: Bandwidths) -> Bound:
    """Returns the time that a step takes at least.

    Without a GPU, what it would read comes from the same memory as the experts.
    """
    if bandwidths.gpu is None:
        same = (traffic.cpu_experts + traffic.gpu_experts) / bandwidths.cpu
        return Bound(same, 0.0, traffic.dense / bandwidths.cpu)
    return Bound(
        traffic.cpu_experts / bandwidths.cpu,
        traffic.gpu_experts / bandwidths.gpu,
        traffic.dense / bandwidths.gpu,
    )


def expected_distinct(num_experts: int, top_k: float, rows: int) -> float:
    """Returns different experts of a layer that `rows` rows choose when they choose evenly and
    independently.
    """
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** rows)


_GPU_BYTES = 2**30
_GPU_PASSES = 10


def measure_bandwidths(device: torch.device, cpu_bytes: int = 0, gpus: int = 1) -> Bandwidths:
    """Measures read bandwidths of all allowed CPUs, best of many ways to read; and of the memory of `gpus`
    GPUs. Prints both.

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


_PACKAGES = ("torch", "triton", "flashinfer-python")


def facts(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Returns what is known of the host, for the JSON files of benches on an engine."""
    import torch

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "command": ["moebius", *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(cpuinfo),
        "cpus": len(Topology.detect().usable_cpus()),
        "gpu": gpu,
        "gpus": torch.cuda.device_count() if gpu else 0,
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    """Returns a package's version; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _routed_bytes(sizes: Mapping[str, int]) -> int:
    return sum(size for name, size in sizes.items() if ".experts." in name)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes as stored in the checkpoint; filled by `of`."""

    dense: int  # Read once per step: attention, norms, routers, shared experts, output projection.
    # All routed experts of all layers.
    routed: int
    num_experts: int
    top_k: int

    @staticmethod
    def of(directory: Path, expert_checkpoint: str = "") -> WeightBytes:
        """Sums up a checkpoint, and of another the experts that are taken from it. Raises CheckpointError."""
        sizes = {name: info.nbytes for name, info in open_index(directory).tensors.items()}
        geometry = read_geometry(directory)
        routed = _routed_bytes(sizes)
        dense = sum(sizes.values()) - routed
        if expert_checkpoint:
            others = open_index(expert_checkpoint).tensors.items()
            routed = _routed_bytes({name: info.nbytes for name, info in others})
        if any(name.startswith("lm_head.") for name in sizes):
            # A step looks up one row per stream of the input embedding; a tied one is the output projection.
            dense -= sum(size for name, size in sizes.items() if "embed_tokens" in name)
        return WeightBytes(dense, routed, geometry.num_experts, geometry.top_k)

    def per_step(self, rows: int) -> float:
        """Bytes one step of `rows` tokens reads.

        The share of experts that at least one row chose is 1 - (1 - top_k / experts)^rows for rows that
        choose evenly and independently; real rows choose more alike, which reads less.
        """
        touched = 1.0 - (1.0 - self.top_k / self.num_experts) ** rows
        return self.dense + self.routed * touched
