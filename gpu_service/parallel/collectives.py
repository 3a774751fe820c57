"""Collectives over `torch.distributed`: NCCL between GPUs, gloo between CPU processes.

All calls are made in stream order by one thread. On CUDA they run on the current stream, so a graph captures
them (capture with `capture_error_mode="thread_local"`: NCCL's watchdog queries events from its own thread).
Every collective must have run once before it is captured, because communicators are made at first use.

Small tensors of the GPUs of one host are added without NCCL: at the sizes of a decode step an all-reduce is
all latency, and one kernel that writes its part to memory the other GPUs can read, waits for them once and
adds has the least of it; above some hundred KiB (`crossover`) it reads too much. torch's symmetric memory
does it; no multicast is used.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from gpu_service.core.parallel import Collectives

# Larger tensors are NCCL's, where nothing was measured; and memory for the largest that ever are not.
DEFAULT_BYTES = 256 * 1024
MAX_BYTES = 1024 * 1024
# Elements are moved in words of this many bytes.
_WORD_BYTES = 16
_DTYPES = (torch.float32, torch.bfloat16)


def takes_one_shot(tensor: torch.Tensor, most_bytes: int = DEFAULT_BYTES) -> bool:
    """Returns whether the kernel takes a tensor of this size, at most `most_bytes`, type and place."""
    return (
        tensor.dtype in _DTYPES
        and 0 < tensor.nbytes <= most_bytes
        and tensor.nbytes % _WORD_BYTES == 0
        and tensor.data_ptr() % _WORD_BYTES == 0
        and tensor.is_contiguous()
    )


class OneShotAllReduce:
    """Owns the memory that the other GPUs read. Made by all ranks of a group at once; capturable afterwards.

    They have read it when a call's kernel has ended, so that calls may follow one another on one stream.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Raises RuntimeError where GPUs cannot reach each other's memory."""
        # Only here: not every build of torch has it.
        import torch.distributed._symmetric_memory as symmetric_memory

        module: Any = symmetric_memory
        # Of tensors that go this way; 0: none.
        self.most_bytes = DEFAULT_BYTES
        self._name = group.group_name
        self._buffers = {
            dtype: module.empty(MAX_BYTES // dtype.itemsize, dtype=dtype, device=device) for dtype in _DTYPES
        }
        for buffer in self._buffers.values():
            module.rendezvous(buffer, self._name)
        self._add: Callable[..., torch.Tensor] = torch.ops.symm_mem.one_shot_all_reduce_copy_out

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the group, in place; returns it. For tensors that `takes_one_shot` up to `MAX_BYTES`."""
        buffer = self._buffers[tensor.dtype][: tensor.numel()].view(tensor.shape)
        self._add(buffer, tensor, "sum", self._name, tensor)
        return tensor


# Renamed in torch 2.13; the former name warns there, the new one is missing before.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCollectives(Collectives):
    """One process group. Errors and timeouts are RuntimeErrors of torch, or its watchdog's abort (NCCL)."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        size: int,
        one_shot: OneShotAllReduce | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`one_shot`: for small sums; None: they go the way of large ones.

        `waiting`: entered around each other collective.
        """
        self._group = group
        self._waiting = waiting
        self._size = size
        self._one_shot = one_shot

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Ring and tree reductions give all ranks the bits that one of them computed."""
        if self._one_shot is not None and takes_one_shot(tensor, self._one_shot.most_bytes):
            return self._one_shot.add(tensor)
        with self._waiting():
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty((self._size, *tensor.shape))
        with self._waiting():
            _all_gather(gathered.flatten(0, 1), tensor.contiguous(), group=self._group)
        return gathered.movedim(0, -2).flatten(-2)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        with self._waiting():
            dist.broadcast(tensor, group=self._group, group_src=source)
        return tensor

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        with self._waiting():
            dist.send(tensor.contiguous(), group=self._group, group_dst=destination)

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        with self._waiting():
            dist.recv(tensor, group=self._group, group_src=source)
        return tensor


class LaneCollectives(Collectives):
    """Those of an engine with a prefill lane: its steps and the main lane's have a communicator each.

    With one for both, a decode step's sums would wait for those that the lane has queued before them. Ranks
    launch the collectives of both streams in one order (`LaneSight`).
    """

    def __init__(self, main: Collectives, lane: Collectives) -> None:
        self._main, self._lane = main, lane
        # Whether the calling thread launches a step of the lane; set once there is one.
        self.is_lane: Callable[[], bool] = lambda: False

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._current.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._current.all_gather(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return self._current.broadcast(tensor, source)

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        self._current.send(tensor, destination)

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return self._current.receive(tensor, source)

    @property
    def _current(self) -> Collectives:
        return self._lane if self.is_lane() else self._main
