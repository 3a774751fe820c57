"""How long a start takes that compiles nothing: reading and packing the experts, and what is always done.

Constants are from "Start and recovery" of docs/benchmarks.md; docs/plan.md compares.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.planning.hardware import Hardware
from app.planning.memory import StoredExperts
from moebius.models.geometry import MoeGeometry

# Bytes of the checkpoint that a core packs in a second, and that files are read with, at most.
PACKED_PER_CORE, READ = 0.2e9, 2e9
# Of processes, imports and self-tests; with a GPU its kernels are tried and graphs captured. Seconds.
CPU_SECONDS, GPU_SECONDS = 3.0, 10.0


def predict_start(
    geometry: MoeGeometry, stored: Mapping[int, StoredExperts], dense_bytes: int, hardware: Hardware
) -> float:
    """Returns seconds from `moebius serve` until requests are answered. `dense_bytes`: of all ranks."""
    nbytes = dense_bytes + geometry.num_experts * sum(layer.nbytes for layer in stored.values())
    fixed = CPU_SECONDS if hardware.gpu is None else GPU_SECONDS
    return fixed + nbytes / min(READ, PACKED_PER_CORE * hardware.cores)
