"""Collectives over `torch.distributed`: NCCL between GPUs, gloo between CPU processes.

All calls are made in stream order by one thread. On CUDA they run on the current stream, so a graph captures
them (capture with `capture_error_mode="thread_local"`: NCCL's watchdog queries events from its own thread).
Every collective must have run once before it is captured, because communicators are made at first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gpu_service.parallel.context import Collectives
from gpu_service.parallel.one_shot import OneShotAllReduce, takes_one_shot

# Renamed in torch 2.13; the former name warns there, the new one is missing before.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCollectives(Collectives):
    """One process group. Errors and timeouts are RuntimeErrors of torch, or its watchdog's abort (NCCL)."""

    def __init__(self, group: dist.ProcessGroup, size: int, one_shot: OneShotAllReduce | None = None) -> None:
        """`one_shot`: for small sums; None: they go the way of large ones."""
        self._group = group
        self._size = size
        self._one_shot = one_shot

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See the base class. Ring and tree reductions give all ranks the bits that one of them computed."""
        if self._one_shot is not None and takes_one_shot(tensor):
            return self._one_shot.add(tensor)
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        gathered = tensor.new_empty((self._size, *tensor.shape))
        _all_gather(gathered.flatten(0, 1), tensor.contiguous(), group=self._group)
        return gathered.movedim(0, -2).flatten(-2)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """See the base class."""
        dist.broadcast(tensor, group=self._group, group_src=source)
        return tensor

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """See the base class."""
        dist.send(tensor.contiguous(), group=self._group, group_dst=destination)

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """See the base class."""
        dist.recv(tensor, group=self._group, group_src=source)
        return tensor
