"""Adds small tensors of the GPUs of one host without NCCL: every GPU reads all others' memory itself.

At the sizes of a decode step an all-reduce is all latency. One kernel that writes its part to memory the
peers can read, waits for them once and adds has the least of it; above some hundred KiB it reads too much.
torch's symmetric memory does it; no multicast is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Larger tensors are NCCL's.
MAX_BYTES = 256 * 1024
# Elements are moved in words of this many bytes.
_WORD_BYTES = 16
_DTYPES = (torch.float32, torch.bfloat16)


def takes_one_shot(tensor: torch.Tensor) -> bool:
    """Whether the kernel takes a tensor of this size, type and place."""
    return (
        tensor.dtype in _DTYPES
        and 0 < tensor.nbytes <= MAX_BYTES
        and tensor.nbytes % _WORD_BYTES == 0
        and tensor.data_ptr() % _WORD_BYTES == 0
        and tensor.is_contiguous()
    )


class OneShotAllReduce:
    """Owns the memory that peers read. Made by all ranks of the group at once; capturable afterwards.

    Peers have read it when a call's kernel has ended, so that calls may follow one another on one stream.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Raises RuntimeError where GPUs can not reach each other's memory."""
        # Only here: not every build of torch has it.
        import torch.distributed._symmetric_memory as symmetric_memory

        module: Any = symmetric_memory
        self._name = group.group_name
        self._buffers = {
            dtype: module.empty(MAX_BYTES // dtype.itemsize, dtype=dtype, device=device) for dtype in _DTYPES
        }
        for buffer in self._buffers.values():
            module.rendezvous(buffer, self._name)
        self._add: Callable[..., torch.Tensor] = torch.ops.symm_mem.one_shot_all_reduce_copy_out

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the group, in place; returns it. For tensors that `takes_one_shot`."""
        buffer = self._buffers[tensor.dtype][: tensor.numel()].view(tensor.shape)
        self._add(buffer, tensor, "sum", self._name, tensor)
        return tensor
