"""Ordered work on a device, as an engine that launches without waiting needs it, and copies to it and back.

The CUDA implementation is a thin face of torch's streams. On the host's, for machines without a GPU,
everything has ended when it was launched.

Copies go through page-locked memory, all tensors of a call packed in one buffer: a copy from ordinary memory
would block the host until the device has done all earlier work.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moebius.errors import UserError

# torch leaves these untyped.
_cuda: Any = torch.cuda


class DeviceEvent(ABC):
    """A point in a stream's order of work, which hosts and other streams can wait for."""

    @abstractmethod
    def query(self) -> bool:
        """Returns whether everything launched before it has ended."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the host until then, without burning a core. Raises what the device failed with."""


class DeviceStream(ABC):
    """Launches run one after another; `device` is where."""

    device: torch.device

    @abstractmethod
    def active(self) -> AbstractContextManager[None]:
        """Within it, kernels and copies are launched on this stream."""

    @property
    @abstractmethod
    def is_current(self) -> bool:
        """Returns whether the calling thread is in `active` of this stream, and of no other since."""

    @abstractmethod
    def record(self) -> DeviceEvent:
        """Returns the end of what was launched so far."""

    @abstractmethod
    def wait_for(self, event: DeviceEvent) -> None:
        """What is launched from now on runs after an event of another stream; the host does not wait."""

    @abstractmethod
    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """uint8 `[nbytes]` on the host which copies to and from the device do not block on."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks until everything launched has ended."""


class _Ended(DeviceEvent):
    def query(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is pending, ever."""


# The stream that a thread is in; what torch keeps of a GPU's.
_host = threading.local()


class HostDeviceStream(DeviceStream):
    """The null object: the device is the host, and every launch has ended when it returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def active(self) -> AbstractContextManager[None]:
        return self._active()

    @contextmanager
    def _active(self) -> Iterator[None]:
        before = getattr(_host, "stream", None)
        _host.stream = self
        try:
            yield
        finally:
            _host.stream = before

    @property
    def is_current(self) -> bool:
        return getattr(_host, "stream", None) is self

    def record(self) -> DeviceEvent:
        return _Ended()

    def wait_for(self, event: DeviceEvent) -> None:
        """Every event has ended."""

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        """Nothing is pending, ever."""


class _CudaEvent(DeviceEvent):
    def __init__(self, stream: Any) -> None:
        self._event = _cuda.Event(blocking=True)
        self._event.record(stream)

    def query(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def hold(self, stream: Any) -> None:
        """A stream's further work waits for the event."""
        stream.wait_event(self._event)


class CudaDeviceStream(DeviceStream):
    """A stream of its own on one GPU, not torch's default stream: that one cannot be captured."""

    def __init__(self, device: torch.device, *, is_urgent: bool = False) -> None:
        """`is_urgent`: its kernels take free multiprocessors before those of other streams."""
        self.device = device
        self.stream = _cuda.Stream(device, priority=-1 if is_urgent else 0)
        # What was loaded so far was launched on the default stream.
        self.stream.wait_stream(torch.cuda.default_stream(device))

    def active(self) -> AbstractContextManager[None]:
        """Also makes the GPU the thread's current one."""
        return self._active()

    @contextmanager
    def _active(self) -> Iterator[None]:
        with torch.cuda.stream(self.stream):
            yield

    @property
    def is_current(self) -> bool:
        return bool(_cuda.current_stream(self.device) == self.stream)

    def record(self) -> DeviceEvent:
        return _CudaEvent(self.stream)

    def wait_for(self, event: DeviceEvent) -> None:
        assert isinstance(event, _CudaEvent), "both streams are of one device"
        event.hold(self.stream)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Returns page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        self.stream.synchronize()


class _CallersStream(CudaDeviceStream):
    """The stream that the thread which makes it is in."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, _cuda.current_stream(device)


def current_stream(device: torch.device) -> DeviceStream:
    """Returns the stream that the calling thread is in, for other threads to use, too."""
    return _CallersStream(device) if device.type == "cuda" else HostDeviceStream()


def has_context(device: torch.device) -> bool:
    """Returns whether this process has a context on a GPU, which takes memory there."""
    torch_c: Any = torch._C  # which builds without CUDA have less of
    return device.type == "cuda" and bool(torch_c._cuda_hasPrimaryContext(device.index))


def stream_of(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the caller's current stream another thread's: memory that is filled belongs to one stream."""
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.current_stream(device)
    return lambda: torch.cuda.stream(stream)


def device_stream(device: torch.device) -> DeviceStream:
    """The stream an engine computes on; next to a prefill lane it goes first."""
    return CudaDeviceStream(device, is_urgent=True) if device.type == "cuda" else HostDeviceStream()


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
        """Returns uint8, at least `nbytes` long; never waits."""
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
    """Returns where each tensor begins in a packed buffer, and the buffer's length, in bytes."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def packed_views(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns contiguous views of a uint8 buffer with the tensors' shapes and types, at `packed_offsets`."""
    offsets, _ = packed_offsets(tensors)
    # The buffer as elements of each type: every step makes dozens of views, so each is one operation.
    typed = {dtype: buffer.view(dtype) for dtype in {tensor.dtype for tensor in tensors}}
    return [
        typed[tensor.dtype].as_strided(
            tensor.shape, tensor.contiguous().stride(), offset // tensor.element_size()
        )
        for offset, tensor in zip(offsets, tensors, strict=True)
    ]


class Uploader:
    """Host tensors to the device. Call it with the stream active."""

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._buffers = HostBuffers(stream)
        # The buffers that `fill` had, as arrays: each is the same object in every call.
        self._arrays: dict[torch.Tensor, npt.NDArray[np.uint8]] = {}

    def upload(
        self, tensors: Sequence[torch.Tensor], destination: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Returns copies on the device; the given ones may be changed afterwards.

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

    def fill(
        self, destination: torch.Tensor, nbytes: int, write: Callable[[npt.NDArray[np.uint8]], None]
    ) -> None:
        """The first `nbytes` of uint8 memory on the device become what `write` writes on the host, to one of
        few arrays.
        """
        staging = self._buffers.take(nbytes)
        array = self._arrays.get(staging)
        if array is None:
            array = self._arrays[staging] = staging.numpy()
        write(array)
        destination[:nbytes].copy_(staging[:nbytes], non_blocking=True)
        self._buffers.give_back(staging, self._stream.record())


class Download:
    """Device tensors on their way to the host; `tensors` may be read once `event` has ended.

    Made with the stream active: copies on another one would not wait for what computes the tensors.
    """

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


_PORTABLE, _MAPPED = 1, 2


def own_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros on the host in pages that hold nothing else: pages are locked as a whole, and once."""
    nbytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes).view(dtype).view(*shape)


def page_lock(tensor: torch.Tensor, device: torch.device, what: str) -> None:
    """Lets kernels of a GPU read a tensor of `own_pages` in place, as long as it lives.

    Raises UserError with advice when CUDA refuses.
    """
    address, runtime = tensor.data_ptr(), _cuda.cudart()
    with torch.cuda.device(device):
        status = int(runtime.cudaHostRegister(address, tensor.nbytes, _PORTABLE | _MAPPED))
    if status:
        raise UserError(
            f"CUDA refuses to page-lock {what} ({tensor.nbytes / 2**30:.1f} GiB): error {status}. Allow "
            "locked memory (ulimit -l unlimited; containers: --ulimit memlock=-1:-1)"
        )
    # Not at the process's end, when CUDA may have gone before.
    weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False
