"""Ordered work on a device, as an engine that launches without waiting needs it.

The CUDA implementation is a thin face of torch's streams. On the host's, for machines without a GPU,
everything has ended when it was launched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# torch leaves these two untyped.
_cuda: Any = torch.cuda


class DeviceEvent(ABC):
    """A point in a stream."""

    @abstractmethod
    def query(self) -> bool:
        """Whether everything launched before it has ended."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the host until then, without burning a core. Raises what the device failed with."""


class DeviceStream(ABC):
    """Launches run one after another; `device` is where."""

    device: torch.device

    @abstractmethod
    def active(self) -> AbstractContextManager[None]:
        """Within it, kernels and copies are launched on this stream."""

    @abstractmethod
    def record(self) -> DeviceEvent:
        """The end of what was launched so far."""

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


class HostDeviceStream(DeviceStream):
    """The null object: the device is the host, and every launch has ended when it returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self) -> DeviceEvent:
        return _Ended()

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


class CudaDeviceStream(DeviceStream):
    """A stream of its own on one GPU, not torch's default stream: that one can not be captured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _cuda.Stream(device)
        # What was loaded so far was launched on the default stream.
        self.stream.wait_stream(torch.cuda.default_stream(device))

    def active(self) -> AbstractContextManager[None]:
        """Also makes the GPU the thread's current one."""
        return self._active()

    @contextmanager
    def _active(self) -> Iterator[None]:
        with torch.cuda.stream(self.stream):
            yield

    def record(self) -> DeviceEvent:
        return _CudaEvent(self.stream)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        self.stream.synchronize()


def device_stream(device: torch.device) -> DeviceStream:
    """The stream an engine computes on."""
    return CudaDeviceStream(device) if device.type == "cuda" else HostDeviceStream()
