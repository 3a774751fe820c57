"""What a decode step can not be faster than: the weights it reads over what memory gives.

Layer by layer attention comes before the experts, so the dense part and the experts follow one another;
resident experts are computed beside those of the servers. On a CPU device all of it comes from one memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that one decode step reads; filled by `measure`."""

    # By the expert servers together, and by resident experts from the GPU's memory.
    cpu_experts: float
    gpu_experts: float
    # Attention, routers, shared experts, head, and the KV of all streams.
    dense: float


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
    """Without a GPU, what it would read comes from the same memory as the experts."""
    if bandwidths.gpu is None:
        same = (traffic.cpu_experts + traffic.gpu_experts) / bandwidths.cpu
        return Bound(same, 0.0, traffic.dense / bandwidths.cpu)
    return Bound(
        traffic.cpu_experts / bandwidths.cpu,
        traffic.gpu_experts / bandwidths.gpu,
        traffic.dense / bandwidths.gpu,
    )


def expected_distinct(num_experts: int, top_k: int, rows: int) -> float:
    """Different experts of a layer that `rows` rows choose when they choose evenly and independently."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** rows)
