"""What to change when a plan does not fit: each proposal alone would make it fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moebius.config import MoebiusConfig


class Line(Protocol):
    """A part of a plan."""

    @property
    def part(self) -> str: ...

    @property
    def nbytes(self) -> int: ...


def advice(
    config: MoebiusConfig,
    lines: Sequence[Line],
    short: int,
    expert_bytes: int,
    num_experts: int,
    token_bytes: float,
) -> str:
    """Proposals that free at least `short` bytes, as one line; what can not help is not proposed.

    `token_bytes`: what one token more in a step takes of the activations.
    """
    sizes = {line.part: line.nbytes for line in lines}
    found = []
    if expert_bytes and num_experts * expert_bytes >= short:
        kept = num_experts - -(-short // expert_bytes)
        ratio = kept / num_experts
        found.append(f"at most {kept} experts on the GPU ({ratio:.0%} of the {num_experts} asked for)")
    tokens = config.gpu.max_num_batched_tokens
    fewer = int(tokens - short / token_bytes) // 16 * 16
    if fewer >= 16:
        found.append(f"max_num_batched_tokens {fewer} instead of {tokens}")
    if sizes.get("CUDA graphs", 0) >= short:
        found.append("cuda_graphs off")
    wanted = config.gpu.kv_cache_gib
    if wanted is not None and wanted * 2**30 > short:
        found.append(f"kv_cache_gib {(wanted * 2**30 - short) / 2**30:.2f}")
    if config.gpu.gpu_memory_utilization < 0.95:
        found.append("a larger gpu_memory_utilization")
    ranks = config.parallel.tensor_parallel_size
    found.append(f"tensor_parallel_size above {ranks}, or a GPU with more memory")
    return "; ".join(found)
