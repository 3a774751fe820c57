"""Page-locked memory of the host, from which a GPU copies by itself: how it is made, how much there may be.

Drivers may have a limit to it: on WSL2 half of the RAM or less, and what a process may lock (`ulimit -l`).
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from moebius.process.limits import is_on_windows

MIB = 2**20
# What is left of page-locked memory where there is a limit to it, for what steps get their inputs through and
# for the buffers through which memory beyond the limit is copied.
LEFT_BYTES = 256 * MIB
# A limit is found to a 64th of what is wanted, in steps of at least this.
_STEPS, _LEAST_STEP = 64, 16 * MIB
_PORTABLE, _MAPPED = 1, 2
MORE_PINNED = (
    "raise the locked-memory limit: `ulimit -l unlimited`, LimitMEMLOCK=infinity of a systemd unit, "
    "`--ulimit memlock=-1` of a container; WSL2's is a part of its memory: more in %UserProfile%/.wslconfig"
)


class Registrar(ABC):
    """Makes the host's memory one that a GPU copies from without the host."""

    @abstractmethod
    def register(self, address: int, nbytes: int) -> str:
        """Returns why it cannot be registered; empty: it is.

        Called by one thread, the same as `unregister`.
        """

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Takes it back; copies from it must have ended."""

    def active(self) -> AbstractContextManager[Any]:
        """Returns the context in which the thread that opens segments works."""
        return nullcontext()


class NullRegistrar(Registrar):
    """The registrar of a device that reads any memory."""

    def register(self, address: int, nbytes: int) -> str:
        return ""

    def unregister(self, address: int) -> None:
        """Nothing was registered."""


class CudaRegistrar(Registrar):
    """By cudaHostRegister, for all contexts of the process, whose kernels read it at the host's addresses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda: Any = torch.cuda
        self._runtime = cuda.cudart()

    def register(self, address: int, nbytes: int) -> str:
        status = self._runtime.cudaHostRegister(address, nbytes, _PORTABLE | _MAPPED)
        return "" if int(status) == 0 else str(self._runtime.cudaGetErrorString(status))

    def unregister(self, address: int) -> None:
        self._runtime.cudaHostUnregister(address)

    def active(self) -> AbstractContextManager[Any]:
        """Or the thread would make a context on the first GPU, whose memory it takes."""
        return torch.cuda.device(self._device)


def registrar(device: torch.device) -> Registrar:
    """Returns the registrar of the device that computes."""
    return CudaRegistrar(device) if device.type == "cuda" else NullRegistrar()


def may_be_limited(root: Path = Path("/")) -> bool:
    """Returns whether there is a known reason for a limit: Windows below Linux, or one of locked memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return is_on_windows(root) or soft != resource.RLIM_INFINITY


def pinned_limit(registrar: Registrar, wanted: int) -> int | None:
    """Returns how many bytes can be page-locked beside what is already, tried in steps up to `wanted`; None:
    all of them.

    The steps are mappings of the same pages, which take the memory of one. CUDA remembers a refusal by
    thread, and a later call of that thread might be taken for it: so it is tried in one of its own.
    """
    found: list[int | None] = []

    def work() -> None:
        with registrar.active():
            found.append(_tried(registrar, wanted))

    thread = threading.Thread(target=work, name="pinned-limit")
    thread.start()
    thread.join()
    return found[0] if found else 0


def limit_of_first_gpu(wanted: int) -> int | None:
    """Returns the same of the first GPU's driver. Raises RuntimeError where torch sees none."""
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    return pinned_limit(registrar(torch.device("cuda", 0)), wanted)


def _tried(registrar: Registrar, wanted: int) -> int | None:
    step = -(-max(wanted // _STEPS, _LEAST_STEP) // mmap.PAGESIZE) * mmap.PAGESIZE
    locked: list[torch.Tensor] = []
    file = os.memfd_create("moebius-pinned-limit")
    try:
        os.ftruncate(file, step)
        while len(locked) * step < wanted:
            pages = torch.frombuffer(mmap.mmap(file, step), dtype=torch.uint8)
            if registrar.register(pages.data_ptr(), step):
                return len(locked) * step
            locked.append(pages)
    finally:
        for pages in locked:
            registrar.unregister(pages.data_ptr())
        os.close(file)
    return None


def in_place(sizes: Sequence[int], limit: int | None) -> int:
    """Returns how many of these parts, from the first on, are page-locked where `limit` bytes may be."""
    if limit is None:
        return len(sizes)
    room, count = limit - LEFT_BYTES, 0
    for nbytes in sizes:
        room -= nbytes
        if room < 0:
            break
        count += 1
    return count
