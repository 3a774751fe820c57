"""Host tensors to the device and results back, without a wait, through page-locked memory.

All tensors of a call travel packed in one buffer. A copy from ordinary memory would block the host until the
device has done all earlier work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_service.device.stream import DeviceEvent, DeviceStream

# Starts of packed tensors: what vectorised loads of any kernel may assume.
_ALIGNMENT = 64
_SMALLEST = 1 << 16


class HostBuffers:
    """Buffers of host memory, each reused once it was given back and the device is done with it."""

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._free: list[torch.Tensor] = []
        self._busy: list[tuple[torch.Tensor, DeviceEvent]] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8, at least `nbytes` long; never waits."""
        busy, self._busy = self._busy, []
        for buffer, event in busy:
            if event.query():
                self._free.append(buffer)
            else:
                self._busy.append((buffer, event))
        for index, buffer in enumerate(self._free):
            if buffer.shape[0] >= nbytes:
                return self._free.pop(index)
        return self._stream.host_buffer(max(_SMALLEST, 1 << (nbytes - 1).bit_length()))

    def give_back(self, buffer: torch.Tensor, after: DeviceEvent) -> None:
        """The buffer may be used again once `after` has ended."""
        self._busy.append((buffer, after))


def packed_offsets(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins in a packed buffer, and the buffer's length, in bytes."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def packed_views(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous views of a uint8 buffer with the tensors' shapes and types, at `packed_offsets`."""
    offsets, _ = packed_offsets(tensors)
    return [
        buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for offset, tensor in zip(offsets, tensors, strict=True)
    ]


class Uploader:
    """Host tensors to the device. Call it with the stream active."""

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._buffers = HostBuffers(stream)

    def upload(
        self, tensors: Sequence[torch.Tensor], destination: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Copies on the device; the given ones may be changed afterwards.

        `destination`: uint8 memory on the device to use instead of new memory; equal shapes and types
        then land at equal addresses.
        """
        _, total = packed_offsets(tensors)
        if destination is None:
            destination = torch.empty(total, dtype=torch.uint8, device=self._stream.device)
        if total:
            staging = self._buffers.take(total)
            for view, tensor in zip(packed_views(staging, tensors), tensors, strict=True):
                view.copy_(tensor)
            destination[:total].copy_(staging[:total], non_blocking=True)
            self._buffers.give_back(staging, self._stream.record())
        return packed_views(destination, tensors)


class Download:
    """Device tensors on their way to the host; `tensors` may be read once `event` has ended."""

    def __init__(self, stream: DeviceStream, buffers: HostBuffers, tensors: Sequence[torch.Tensor]) -> None:
        _, total = packed_offsets(tensors)
        self._buffers = buffers
        self._buffer = buffers.take(total) if total else torch.empty(0, dtype=torch.uint8)
        self.tensors = packed_views(self._buffer, tensors)
        for view, tensor in zip(self.tensors, tensors, strict=True):
            view.copy_(tensor, non_blocking=True)
        self.event = stream.record()

    def release(self) -> None:
        """The host has read what it needs; the memory goes back."""
        if self._buffer.shape[0]:
            self._buffers.give_back(self._buffer, self.event)
        self._buffer, self.tensors = torch.empty(0, dtype=torch.uint8), []
