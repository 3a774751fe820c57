"""Bytes of a page over all layers, and of a state, between the device's tensors and the host.

    payload of a page    | layer 0's row | layer 1's row | … | index keys of layer 0 | … |
    payload of a state   | part 0 of layer 0 | part 1 of layer 0 | … |

`HostPayloads` copies where tensors lie in the host's memory; `DevicePayloads` gathers pages on the device and
moves them with one copy for each page, on a stream of its own. Both block the calling thread, never another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu_service.cache.kv_cache import AttendedPages
from gpu_service.cache.state_cache import StateSlots
from gpu_service.device.stream import DeviceStream

Bytes = npt.NDArray[np.uint8]
# Pages that are gathered on the device at once, which takes as much memory there as they do.
_PAGES_AT_ONCE = 16


class Payloads(ABC):
    """Copies of pages and states. Any thread may call; a page may be read while steps read it, too."""

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


def _ends(rows: Sequence[torch.Tensor]) -> list[int]:
    return np.cumsum([row.shape[1] for row in rows]).tolist() if rows else []


class HostPayloads(Payloads):
    """The payloads of tensors in the host's memory; numpy lets other threads run during a copy."""

    def __init__(
        self, pages: Sequence[torch.Tensor], states: Sequence[torch.Tensor], stream: DeviceStream
    ) -> None:
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
        self._pages, self._states, self._stream = _rows(pages), _rows(states), stream
        self.page_bytes = sum(row.shape[1] for row in self._pages)
        self.state_bytes = sum(row.shape[1] for row in self._states)

    def read_pages(self, pages: Sequence[int], into: Sequence[Bytes]) -> None:
        for first in range(0, len(pages), _PAGES_AT_ONCE):
            part = slice(first, first + _PAGES_AT_ONCE)
            self._read(self._pages, pages[part], into[part])

    def write_pages(self, pages: Sequence[int], payloads: Sequence[Bytes]) -> None:
        for first in range(0, len(pages), _PAGES_AT_ONCE):
            part = slice(first, first + _PAGES_AT_ONCE)
            self._write(self._pages, pages[part], payloads[part])

    def read_state(self, slot: int, into: Bytes) -> None:
        self._read(self._states, [slot], [into])

    def write_state(self, slot: int, payload: Bytes) -> None:
        self._write(self._states, [slot], [payload])

    def scratch(self, nbytes: int) -> Bytes:
        memory: Bytes = self._stream.host_buffer(nbytes).numpy()
        return memory

    def _read(self, rows: Sequence[torch.Tensor], places: Sequence[int], into: Sequence[Bytes]) -> None:
        if not rows:  # of a pipeline stage without layers of this kind
            return
        with self._stream.active():
            index = torch.as_tensor(places, dtype=torch.int64, device=self._stream.device)
            gathered = torch.cat([row.index_select(0, index) for row in rows], dim=1)
            for payload, target in zip(gathered, into, strict=True):
                torch.from_numpy(target).copy_(payload, non_blocking=True)
            self._stream.record().wait()

    def _write(self, rows: Sequence[torch.Tensor], places: Sequence[int], payloads: Sequence[Bytes]) -> None:
        if not rows:
            return
        with self._stream.active():
            index = torch.as_tensor(places, dtype=torch.int64, device=self._stream.device)
            nbytes = sum(row.shape[1] for row in rows)
            arrived = torch.empty((len(places), nbytes), dtype=torch.uint8, device=self._stream.device)
            for target, payload in zip(arrived, payloads, strict=True):
                target.copy_(torch.from_numpy(payload), non_blocking=True)
            for row, part in zip(
                rows, torch.split(arrived, [row.shape[1] for row in rows], dim=1), strict=True
            ):
                row.index_copy_(0, index, part)
            self._stream.record().wait()
