"""The doorbell kernels on the host: the very same source, compiled by g++ behind a shim of CUDA's names."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from gpu_service.experts.doorbell.client import DoorbellExpertClient, DoorbellLauncher
from gpu_service.experts.doorbell.program import (
    PACK_CLEAR,
    PACK_HIDDEN,
    PACK_RING,
    WAIT_ADD,
    WAIT_ANSWERS,
    Box,
    State,
    make_box,
    program,
)
from gpu_service.experts.doorbell.watch import Watch
from moebius.mailbox import Mailbox, field_offsets
from moebius.models.geometry import MoeGeometry
from tests.helpers.compiled_sources import compiled

HERE = Path(__file__).parent
_devices = 0
DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


@cache
def _directory() -> Path:
    """Returns where this process's copies of the library are."""
    found = Path(tempfile.mkdtemp(prefix="moebius-doorbell-"))
    atexit.register(shutil.rmtree, found, ignore_errors=True)
    return found


def host_kernels() -> ctypes.CDLL:
    """Returns a device of its own: another copy of the library, as blocks keep shared memory in its
    globals.
    """
    global _devices
    _devices += 1
    shim, entry = ((HERE / name).read_text() for name in ("doorbell_shim.h", "doorbell_entry.h"))
    options = ("-std=c++20", "-O1", "-Wall", "-Wno-unused-function", "-shared", "-fPIC", "-pthread")
    library, _ = compiled(("g++", *options), "\n".join((shim, program(), entry)))
    kernels = ctypes.CDLL(str(shutil.copy(library, _directory() / f"device-{_devices}.so")))
    kernels.launch_ping_pong.restype = ctypes.c_uint64
    return kernels


class HostLauncher(DoorbellLauncher):
    """Runs each launch at once, as an operation of torch, so that the host's twin of graphs can record it.

    It also keeps them itself: `replay` repeats all launches so far.
    """

    def __init__(
        self, mailbox: Mailbox, deadline_ms: int, *, grid: int = 1, block: int = 1, is_memops: bool = False
    ) -> None:
        """`is_memops`: wait for the constant flags first, as a stream memory operation would."""
        self.state = torch.zeros(State.END, dtype=torch.int64)
        self.box: Box = make_box(mailbox, mailbox.kernel.address, self.state.data_ptr(), deadline_ms)
        self.launched: list[Callable[[], None]] = []
        self.kernels = host_kernels()
        self.shape = (grid, block)
        self._mailbox, self._is_memops = mailbox, is_memops
        _launchers[self.state.data_ptr()] = self

    def pack(
        self,
        slot: int,
        layer: int,
        rows: int,
        begin: int,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> None:
        parts = PACK_HIDDEN | PACK_RING | (PACK_CLEAR if self._is_memops else 0)
        numbers = [slot, layer, rows, begin, hidden_states.shape[0], parts]
        self._run(lambda: _pack(self.state, hidden_states, topk_ids, topk_weights, numbers))

    def add(self, slot: int, layer: int, begin: int, partial: torch.Tensor) -> None:
        numbers = [slot, layer, begin, partial.shape[0], WAIT_ANSWERS | WAIT_ADD]
        self._run(lambda: _add(self.state, partial, numbers))

    def await_flags(self, slot: int) -> None:
        """What cuStreamWaitValue32 does where it is asked for: nothing but wait, without a deadline."""
        if not self._is_memops:
            return
        base, sizes = self._mailbox.kernel.address, field_offsets()
        for server in range(self.box.num_servers):
            line = base + self.box.done_lines + (slot * self.box.num_servers + server) * sizes["DoneLine"]
            flag = ctypes.c_uint32.from_address(line + sizes["DoneLine.answered"] + 4 * self._mailbox.client)
            while flag.value != 1:
                time.sleep(0)

    def _run(self, launch: Callable[[], None]) -> None:
        self.launched.append(launch)
        launch()

    def replay(self) -> None:
        """All launches again, in order, with the same arguments."""
        for launch in list(self.launched):
            launch()

    def set_words(self, first: int, values: Sequence[int]) -> None:
        words = (ctypes.c_int64 * len(values))(*(_signed(value) for value in values))
        # Not by torch: a word set while something is captured is no part of it.
        ctypes.memmove(self.state.data_ptr() + 8 * first, words, 8 * len(values))

    def synchronize(self) -> None:
        """Everything has ended."""

    def close(self) -> None:
        """Nothing is held."""
        _launchers.pop(self.state.data_ptr(), None)


# By the address of their state, which is what an operation of torch can be given.
_launchers: dict[int, HostLauncher] = {}


@torch.library.custom_op("moebius_test::pack_and_ring", mutates_args=("state",))
def _pack(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    numbers: list[int],
) -> None:
    launcher = _launchers[state.data_ptr()]
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (hidden_states, ids, weights))
    launcher.kernels.launch_pack(
        *launcher.shape, ctypes.byref(launcher.box), *pointers, DTYPE_CODES[hidden_states.dtype], *numbers
    )


@torch.library.custom_op("moebius_test::wait_and_add", mutates_args=("state", "partial"))
def _add(state: torch.Tensor, partial: torch.Tensor, numbers: list[int]) -> None:
    launcher = _launchers[state.data_ptr()]
    launcher.await_flags(numbers[0])
    pointers = (ctypes.c_void_p(partial.data_ptr()), None)
    launcher.kernels.launch_add(*launcher.shape, ctypes.byref(launcher.box), *pointers, *numbers)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


@contextmanager
def doorbell_client(
    mailbox: Mailbox, geometry: MoeGeometry, *, deadline_ms: int = 60_000, watch_ms: int = 0, **launcher: int
) -> Iterator[tuple[DoorbellExpertClient, HostLauncher]]:
    """A client whose device is the host. `watch_ms`: the watch's deadline, if not later than the kernel's."""
    slots = range(mailbox.geometry.num_slots)
    host = HostLauncher(mailbox, deadline_ms, **launcher)  # type: ignore[arg-type]
    watch = Watch(mailbox, slots, watch_ms or deadline_ms + 1000, bool(launcher.get("is_memops")))
    client = DoorbellExpertClient(mailbox, geometry, host, slots, deadline_ms, watch)
    try:
        yield client, host
    finally:
        client.close()
