"""Copies from ordinary memory to a device that go on while the host prepares what comes next."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

# torch leaves these untyped.
_cuda: Any = torch.cuda

_BUFFERS = 2


class StagedCopies:
    """One thread's copies, each through page-locked memory of its own.

    A copy from ordinary memory would keep the thread until the device is done, and the driver copies for one
    thread at a time. On a host without a GPU, or where memory cannot be page-locked, each copy has ended when
    `copy` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_staged = device.type == "cuda"
        # The buffer that was used longest ago comes first, with the end of its copy.
        self._buffers: deque[tuple[torch.Tensor, Any]] = deque()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launches a copy on the thread's current stream; `source`, on the host, may be changed afterwards.

        Both are uint8 and of one length.
        """
        buffer = self._take(source.shape[0])
        if buffer is None:
            target.copy_(source)
            return
        buffer[: source.shape[0]].copy_(source)
        target.copy_(buffer[: source.shape[0]], non_blocking=True)
        ended = _cuda.Event(blocking=True)
        ended.record()
        self._buffers.append((buffer, ended))

    def _take(self, nbytes: int) -> torch.Tensor | None:
        """Returns a buffer that no copy reads, at least as long; None: there is no page-locked memory."""
        if self._is_staged and len(self._buffers) == _BUFFERS:
            buffer, ended = self._buffers.popleft()
            ended.synchronize()
            if buffer.shape[0] >= nbytes:
                return buffer
        if self._is_staged:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # CUDA refuses: the host allows no more locked memory
                self._is_staged = False
        return None
