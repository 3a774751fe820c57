"""Up to which size GPUs add tensors without NCCL: measured at start, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from gpu_service.device.timing import mean_seconds

# Bytes: those of one row of 2048 float32 values, and of steps up to 128 of them.
SIZES = tuple(2**power for power in range(13, 21))


def crossover_bytes(sizes: Sequence[int], small_s: Sequence[float], nccl_s: Sequence[float]) -> int:
    """Returns the largest of the ascending `sizes` up to which the small way takes no longer than NCCL at
    each; 0: NCCL is faster at the first.

    `small_s`, `nccl_s`: seconds by size.
    """
    most = 0
    for size, small, nccl in zip(sizes, small_s, nccl_s, strict=True):
        if small > nccl:
            break
        most = size
    return most


def measured_crossover(
    small: Callable[[torch.Tensor], torch.Tensor], group: dist.ProcessGroup, device: torch.device
) -> int:
    """Returns `crossover_bytes` of sums over a group of GPUs, by the slowest rank's times.

    All ranks call it at once.
    """

    def by_nccl(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=group)

    tensors = [torch.zeros(size // 4, dtype=torch.float32, device=device) for size in SIZES]
    seconds = torch.tensor(
        [[mean_seconds(partial(way, tensor)) for tensor in tensors] for way in (small, by_nccl)],
        device=device,
    )
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return crossover_bytes(SIZES, *seconds.tolist())
