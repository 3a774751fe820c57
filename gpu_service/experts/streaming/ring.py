"""The ring of buffers that pieces pass through on their way to the products, and the device under it.

    copy stream    | piece 0 | piece 1 | piece 2 (waits for the reader of 0) | …
    compute stream |         | products of 0    | products of 1 | …

The host only queues work and events: it waits for nothing. What was begun and not finished (a step that was
broken off) needs no cleaning up, since a buffer's next copy follows its last one on the same stream, and its
last reader by an event.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpu_service.experts.streaming.plan import CopyRun, Piece

# torch leaves these untyped.
_cuda: Any = torch.cuda
# The largest single copy. Others (a decode step's inputs, answers of expert servers) have their turns between
# two, and a link loses nothing by it: 53 GB/s in copies of 3 MiB, 55 in those of 32.
_COPY_BYTES = 8 * 2**20
# What a profiler notes of one such copy (views of both sides, the call, the copy itself), and of a piece
# besides: its events, and the kernels that compute it.
_COPY_OPERATIONS, _PIECE_OPERATIONS = 8, 60


class TransferDevice(ABC):
    """What a ring needs of a device: a stream for copies next to those that compute, and events between them.

    `current` is the stream on which the calling thread launches its kernels.
    """

    device: torch.device
    # Whether everything launched has ended when the call returns.
    is_synchronous = False

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns uint8 `[nbytes]` on the device."""

    @abstractmethod
    def upload(self, source: torch.Tensor) -> torch.Tensor:
        """Returns a small host tensor on the device, without waiting; on the current stream."""

    @abstractmethod
    def download(self, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """A small tensor on the host, filled when the current stream has come so far; waits for nothing.

        `into`: what an earlier download of the same shape returned, whose values are needed no more.
        """

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """From the host's registered memory to a buffer, uint8 of equal size, on the copy stream."""

    @abstractmethod
    def record_copied(self) -> Any:
        """An event at the end of the copy stream, with its time."""

    @abstractmethod
    def record_read(self) -> Any:
        """An event at the end of the current stream, with its time."""

    @abstractmethod
    def copy_waits(self, event: Any) -> None:
        """Copies launched from now on follow the event."""

    @abstractmethod
    def compute_waits(self, event: Any) -> None:
        """What is launched on the current stream from now on follows the event."""

    @abstractmethod
    def has_ended(self, event: Any) -> bool:
        """Whether an event has come."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """Blocks the host until the event has passed."""

    @abstractmethod
    def seconds_between(self, begin: Any, end: Any) -> float:
        """Returns the seconds, by the device's clock, between two events that have passed."""

    def time_copy(self, target: torch.Tensor, source: torch.Tensor) -> float:
        """Returns the seconds of a `copy` while there is no other. Not for the thread that launches steps."""
        begin = time.perf_counter()
        self.copy(target, source)
        self.wait(self.record_copied())
        return time.perf_counter() - begin


class HostTransfers(TransferDevice):
    """The null object: the device is the host, and copies are done when they are launched.

    Events are the times at which they were recorded, `time.perf_counter()`.
    """

    is_synchronous = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        return source

    def download(self, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        return source

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def record_copied(self) -> float:
        return time.perf_counter()

    def record_read(self) -> float:
        return time.perf_counter()

    def copy_waits(self, event: float) -> None:
        """Everything has ended."""

    def compute_waits(self, event: float) -> None:
        """Everything has ended."""

    def has_ended(self, event: float) -> bool:
        return True

    def wait(self, event: float) -> None:
        """Everything has ended."""

    def seconds_between(self, begin: float, end: float) -> float:
        return end - begin


class CudaTransfers(TransferDevice):
    """A copy stream on one GPU. Sources must be registered with CUDA, or copies block the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _cuda.Stream(device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        return source.pin_memory().to(self.device, non_blocking=True)

    def download(self, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        # Page-locked memory takes the host 0.2 ms to get.
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True) if into is None else into
        return target.copy_(source, non_blocking=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with _cuda.stream(self._stream):
            for begin in range(0, source.shape[0], _COPY_BYTES):
                end = begin + _COPY_BYTES
                target[begin:end].copy_(source[begin:end], non_blocking=True)

    def record_copied(self) -> Any:
        return self._record(self._stream)

    def record_read(self) -> Any:
        return self._record(_cuda.current_stream(self.device))

    def copy_waits(self, event: Any) -> None:
        self._stream.wait_event(event)

    def compute_waits(self, event: Any) -> None:
        _cuda.current_stream(self.device).wait_event(event)

    def has_ended(self, event: Any) -> bool:
        return bool(event.query())

    def wait(self, event: Any) -> None:
        event.synchronize()

    def seconds_between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) * 1e-3

    def time_copy(self, target: torch.Tensor, source: torch.Tensor) -> float:
        # By the GPU's clock, and at once: next to a thread that captures graphs Python's lock comes late.
        begin, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        with _cuda.stream(self._stream):
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def _record(self, stream: Any) -> Any:
        event = _cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event


def transfer_device(device: torch.device) -> TransferDevice:
    """Returns the transfers of the device that computes."""
    return CudaTransfers(device) if device.type == "cuda" else HostTransfers()


Copy = Callable[[torch.Tensor, Piece, CopyRun], None]
"""Launches one run's copy to its place in a buffer; may raise, and then nothing of the step is computed."""


class BufferRing:
    """Fills buffers ahead of who reads them. Driven by the thread that launches steps."""

    def __init__(self, device: TransferDevice, num_buffers: int, buffer_bytes: int) -> None:
        """Takes the memory. `num_buffers` of 2 and more let copies run while products read."""
        self._device = device
        memory = device.allocate(num_buffers * buffer_bytes)
        self.buffers: Sequence[torch.Tensor] = memory.view(num_buffers, buffer_bytes).unbind(0)
        self.buffer_bytes = buffer_bytes
        self._read: list[Any] = [None] * num_buffers
        self._copied: list[Any] = [None] * num_buffers
        self._pieces: Sequence[Piece] = ()
        self._copy: Copy | None = None
        # Of the present pieces: copied, and given back by their reader. The first one's buffer.
        self._launched = self._done = self._first = 0
        # How many buffers they may fill.
        self._usable = num_buffers
        # Of all pieces so far, roughly: what a profiler would have noted.
        self.operations = 0
        # Of the present pieces' copies that were launched: events before and after each. Pieces that follow
        # have a list of their own, so the step that has begun keeps this one.
        self.copies: list[tuple[Any, Any]] = []

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return len(self.buffers) * self.buffer_bytes

    def start(self, pieces: Sequence[Piece], copy: Copy, keeps_one_free: bool = False) -> None:
        """Begins with other pieces; what is left of the earlier ones is forgotten. Launches the first copies.

        They may run while an earlier step still computes. `keeps_one_free`: a buffer, for `fetch`. Raises
        what `copy` raises.
        """
        self._first = (self._first + self._launched) % len(self.buffers)
        self._pieces, self._copy = pieces, copy
        self._usable = len(self.buffers) - int(keeps_one_free)
        self._launched = self._done = 0
        self.copies = []
        self._fill()

    def stop(self) -> None:
        """Launches no more copies."""
        self.start((), _no_copy)

    def take(self) -> tuple[int, Piece]:
        """The next piece and its buffer, which the current stream may read from now on."""
        buffer = self._buffer(self._done)
        self._device.compute_waits(self._copied[buffer])
        return buffer, self._pieces[self._done]

    def give_back(self) -> None:
        """The current stream's launches so far are all that reads the piece that was taken.

        Its buffer's next copy is launched. Raises what `copy` raises.
        """
        self._read[self._buffer(self._done)] = self._device.record_read()
        self._done += 1
        self._fill()

    def fetch(self, piece: Piece) -> int:
        """Copies one that is none of the present pieces, after all copies that were launched, to the buffer
        that is kept free, which the current stream may read from now on. Give it back with `release`.
        """
        # The next of the present pieces' copies goes there, after its reader.
        index = self._buffer(self._launched)
        self._launch(piece, index)
        self._device.compute_waits(self._copied[index])
        return index

    def release(self, buffer: int) -> None:
        """The current stream's launches so far are all that reads what was fetched."""
        self._read[buffer] = self._device.record_read()

    def _buffer(self, piece: int) -> int:
        return (self._first + piece) % len(self.buffers)

    def _fill(self) -> None:
        while self._launched < min(len(self._pieces), self._done + self._usable):
            piece, index = self._pieces[self._launched], self._buffer(self._launched)
            # Counted first: a copy that raises half-way leaves the buffer to a later one.
            self._launched += 1
            self.copies.append(self._launch(piece, index))

    def _launch(self, piece: Piece, index: int) -> tuple[Any, Any]:
        """Returns the copies of a piece; events before and after."""
        assert self._copy is not None
        if self._read[index] is not None:
            self._device.copy_waits(self._read[index])
            self._read[index] = None
        begin = self._device.record_copied()
        for run in piece.runs:
            self._copy(self.buffers[index][run.target : run.target + run.nbytes], piece, run)
            self.operations += _COPY_OPERATIONS * -(-run.nbytes // _COPY_BYTES)
        self.operations += _PIECE_OPERATIONS
        self._copied[index] = end = self._device.record_copied()
        return begin, end


def _no_copy(target: torch.Tensor, piece: Piece, run: CopyRun) -> None:
    raise AssertionError("there is nothing to copy")
