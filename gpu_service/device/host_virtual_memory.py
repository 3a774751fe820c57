"""`VirtualMemory` of the host: a reservation that may not be touched, and pages of one file mapped into it.

A touch of what is not mapped is a fault, and bytes move with their chunk, as on a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import torch

from gpu_service.device.virtual_memory import VirtualMemory, VirtualMemoryUnavailable

_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE, _FAILED = 0, 0x10, 0x4000, ctypes.c_void_p(-1).value
_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


class HostVirtualMemory(VirtualMemory):
    """Handles are offsets in a file that has no name."""

    granularity = mmap.PAGESIZE

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        kinds = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
        self._libc.mmap.argtypes = kinds
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._file = os.memfd_create("moebius-pool")
        self._end = 0

    def __del__(self) -> None:
        os.close(self._file)

    def create(self, nbytes: int) -> int:
        handle, self._end = self._end, self._end + nbytes
        os.ftruncate(self._file, self._end)
        return handle

    def release(self, handle: int) -> None:
        """The file's pages go with it: this is the memory of tests."""

    def reserve(self, nbytes: int) -> int:
        return self._mmap(None, nbytes, _PROT_NONE, _NOTHING, -1, 0)

    def unreserve(self, address: int, nbytes: int) -> None:
        self._libc.munmap(address, nbytes)

    def map(self, address: int, nbytes: int, handles: Sequence[int]) -> None:
        for number, handle in enumerate(handles):
            place = address + number * nbytes
            self._mmap(place, nbytes, _ACCESS, mmap.MAP_SHARED | _MAP_FIXED, self._file, handle)

    def unmap(self, address: int, nbytes: int, count: int) -> None:
        self._mmap(address, nbytes * count, _PROT_NONE, _NOTHING | _MAP_FIXED, -1, 0)

    def tensor(self, address: int, nbytes: int, keeps: object) -> torch.Tensor:
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        memory.keeps = keeps  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _mmap(self, address: int | None, nbytes: int, access: int, flags: int, file: int, offset: int) -> int:
        found = self._libc.mmap(address, nbytes, access, flags, file, offset)
        if found is None or found == _FAILED:
            raise VirtualMemoryUnavailable(os.strerror(ctypes.get_errno()))
        return int(found)
