"""Bytes of a page over all layers, and of a state, between the device's tensors and the host.

    payload of a page    | layer 0's row | layer 1's row | … | index keys of layer 0 | … |
    payload of a state   | part 0 of layer 0 | part 1 of layer 0 | … |

`HostPayloads` copies where tensors lie in the host's memory; `DevicePayloads` gathers pages on the device and
moves them with one copy for each page, on a stream of its own: copies of the next pages are queued while
those before are spread over the layers. Both block the calling thread, never another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu_service.cache.kv_cache import AttendedPages
from gpu_service.cache.state_cache import StateSlots
from gpu_service.device.stream import DeviceStream

Bytes = npt.NDArray[np.uint8]
# Of pages that are gathered on the device at once, which takes as much memory there: enough that a kernel for
# each layer takes little beside their copies.
_BYTES_AT_ONCE = 48 * 2**20


class Payloads(ABC):
    """Copies of pages and states. Any thread may call; a page may be read while steps read it, too."""

    device: torch.device  # of the pages
    page_bytes: int
    state_bytes: int  # 0: the model has no states

    @abstractmethod
    def read_pages(self, pages: Sequence[int], into: Sequence[Bytes]) -> None:
        """Copies each page to the host, uint8 `[page_bytes]`; nothing may write the page meanwhile."""

    @abstractmethod
    def write_pages(self, pages: Sequence[int], payloads: Sequence[Bytes]) -> None:
        """Copies each payload into its page, which nothing reads or writes meanwhile."""

    @abstractmethod
    def read_state(self, slot: int, into: Bytes) -> None:
        """Copies a state to the host, uint8 `[state_bytes]`; nothing may write the slot meanwhile."""

    @abstractmethod
    def write_state(self, slot: int, payload: Bytes) -> None:
        """Copies a payload into a slot, which nothing reads or writes meanwhile."""

    @abstractmethod
    def scratch(self, nbytes: int) -> Bytes:
        """Memory of the host that copies are fast from and to."""


def make_payloads(cache: AttendedPages, states: StateSlots | None, stream: DeviceStream) -> Payloads:
    """Payloads of a cache; `stream` is one of its device that no step runs on."""
    kind = DevicePayloads if stream.device.type == "cuda" else HostPayloads
    return kind(cache.page_tensors(), [] if states is None else states.tensors(), stream)


def _rows(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the same memory as uint8 `[pages or slots, bytes of a row]`, without tensors whose rows are
    empty.
    """
    return [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in tensors if tensor[0].numel()]


def _wide(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the same memory in elements of 8 bytes where all rows can be divided: a kernel's thread moves
    one."""
    if any(row.shape[1] % 8 or row.data_ptr() % 8 for row in rows):
        return rows
    return [row.view(torch.int64) for row in rows]


def _ends(rows: Sequence[torch.Tensor]) -> list[int]:
    return np.cumsum([row.shape[1] for row in rows]).tolist() if rows else []


class HostPayloads(Payloads):
    """The payloads of tensors in the host's memory; numpy lets other threads run during a copy."""

    def __init__(
        self, pages: Sequence[torch.Tensor], states: Sequence[torch.Tensor], stream: DeviceStream
    ) -> None:
        self.device = stream.device
        self._pages, self._states = ([row.numpy() for row in _rows(part)] for part in (pages, states))
        self._page_ends, self._state_ends = _ends(_rows(pages)), _ends(_rows(states))
        self.page_bytes = self._page_ends[-1] if self._page_ends else 0
        self.state_bytes = self._state_ends[-1] if self._state_ends else 0

    def read_pages(self, pages: Sequence[int], into: Sequence[Bytes]) -> None:
        for page, payload in zip(pages, into, strict=True):
            self._read(self._pages, self._page_ends, page, payload)

    def write_pages(self, pages: Sequence[int], payloads: Sequence[Bytes]) -> None:
        for page, payload in zip(pages, payloads, strict=True):
            self._write(self._pages, self._page_ends, page, payload)

    def read_state(self, slot: int, into: Bytes) -> None:
        self._read(self._states, self._state_ends, slot, into)

    def write_state(self, slot: int, payload: Bytes) -> None:
        self._write(self._states, self._state_ends, slot, payload)

    def scratch(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    @staticmethod
    def _read(rows: Sequence[Bytes], ends: Sequence[int], index: int, into: Bytes) -> None:
        begin = 0
        for row, end in zip(rows, ends, strict=True):
            into[begin:end] = row[index]
            begin = end

    @staticmethod
    def _write(rows: Sequence[Bytes], ends: Sequence[int], index: int, payload: Bytes) -> None:
        begin = 0
        for row, end in zip(rows, ends, strict=True):
            row[index] = payload[begin:end]
            begin = end


class DevicePayloads(Payloads):
    """The payloads of tensors on a GPU. Page-locked host memory is copied to and from without staging."""

    def __init__(
        self, pages: Sequence[torch.Tensor], states: Sequence[torch.Tensor], stream: DeviceStream
    ) -> None:
        self.device = stream.device
        narrow, of_states = _rows(pages), _rows(states)
        self.page_bytes = sum(row.shape[1] for row in narrow)
        self.state_bytes = sum(row.shape[1] for row in of_states)
        self._pages, self._states, self._stream = _wide(narrow), _wide(of_states), stream

    def read_pages(self, pages: Sequence[int], into: Sequence[Bytes]) -> None:
        self._read(self._pages, pages, into)

    def write_pages(self, pages: Sequence[int], payloads: Sequence[Bytes]) -> None:
        self._write(self._pages, pages, payloads)

    def read_state(self, slot: int, into: Bytes) -> None:
        self._read(self._states, [slot], [into])

    def write_state(self, slot: int, payload: Bytes) -> None:
        self._write(self._states, [slot], [payload])

    def scratch(self, nbytes: int) -> Bytes:
        memory: Bytes = self._stream.host_buffer(nbytes).numpy()
        return memory

    def _read(self, rows: Sequence[torch.Tensor], places: Sequence[int], into: Sequence[Bytes]) -> None:
        if not (rows and places):  # a pipeline stage may have no layers of this kind
            return
        with self._stream.active():
            for part, index in self._parts(rows, places):
                gathered = torch.cat([row.index_select(0, index) for row in rows], dim=1)
                for payload, target in zip(gathered.view(torch.uint8), into[part], strict=True):
                    torch.from_numpy(target).copy_(payload, non_blocking=True)
            self._stream.record().wait()

    def _write(self, rows: Sequence[torch.Tensor], places: Sequence[int], payloads: Sequence[Bytes]) -> None:
        if not (rows and places):
            return
        sizes = [row.shape[1] for row in rows]
        with self._stream.active():
            for part, index in self._parts(rows, places):
                # The allocator gives the memory of the part before: copies into it follow its kernels.
                arrived = torch.empty((len(index), sum(sizes)), dtype=rows[0].dtype, device=index.device)
                for target, payload in zip(arrived.view(torch.uint8), payloads[part], strict=True):
                    target.copy_(torch.from_numpy(payload), non_blocking=True)
                for row, own in zip(rows, torch.split(arrived, sizes, dim=1), strict=True):
                    row.index_copy_(0, index, own)
            self._stream.record().wait()

    def _parts(
        self, rows: Sequence[torch.Tensor], places: Sequence[int]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields which of the places are copied together, and these, int64 on the device."""
        index = torch.as_tensor(places, dtype=torch.int64, device=self._stream.device)
        count = max(1, _BYTES_AT_ONCE // sum(row[0].nbytes for row in rows))
        for first in range(0, len(places), count):
            part = slice(first, first + count)
            yield part, index[part]
