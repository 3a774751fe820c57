"""The doorbell kernels on the host: the very same source, compiled by g++ behind a shim of CUDA's names."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from gpu_service.experts.doorbell.client import DoorbellExpertClient
from gpu_service.experts.doorbell.interface import (
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
from gpu_service.experts.doorbell.launcher import DoorbellLauncher
from gpu_service.experts.doorbell.watch import Watch
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.mailbox import Mailbox

HERE = Path(__file__).parent
_devices = 0
DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2}


@cache
def _library() -> Path:
    """The compiled kernels; built once per process."""
    directory = Path(tempfile.mkdtemp(prefix="moebius-doorbell-"))
    source, library = directory / "doorbell.cc", directory / "doorbell.so"
    shim, entry = ((HERE / name).read_text() for name in ("doorbell_shim.h", "doorbell_entry.h"))
    source.write_text("\n".join((shim, program(), entry)))
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Wno-unused-function", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    return library


def host_kernels() -> ctypes.CDLL:
    """A device of its own: another copy of the library, as blocks keep shared memory in its globals."""
    global _devices
    _devices += 1
    library = shutil.copy(_library(), _library().with_name(f"device-{_devices}.so"))
    kernels = ctypes.CDLL(str(library))
    kernels.launch_ping_pong.restype = ctypes.c_uint64
    return kernels


class HostLauncher(DoorbellLauncher):
    """Runs each launch at once; keeps them, so that `replay` repeats a step as a captured graph does."""

    def __init__(
        self, mailbox: Mailbox, deadline_ms: int, *, grid: int = 1, block: int = 1, is_memops: bool = False
    ) -> None:
        """`is_memops`: wait for the constant flags first, as a stream memory operation would."""
        self.state = torch.zeros(State.END, dtype=torch.int64)
        self.box: Box = make_box(mailbox, mailbox.kernel.address, self.state.data_ptr(), deadline_ms)
        self.launched: list[Callable[[], None]] = []
        self._mailbox, self._grid, self._block, self._is_memops = mailbox, grid, block, is_memops
        self._kernels = host_kernels()

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
        """See the base class."""
        tensors = (hidden_states, topk_ids, topk_weights)
        parts = PACK_HIDDEN | PACK_RING | (PACK_CLEAR if self._is_memops else 0)
        numbers = (DTYPE_CODES[hidden_states.dtype], slot, layer, rows, begin, hidden_states.shape[0], parts)

        def launch() -> None:
            pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
            self._kernels.launch_pack(self._grid, self._block, ctypes.byref(self.box), *pointers, *numbers)

        self._run(launch)

    def add(self, slot: int, layer: int, begin: int, partial: torch.Tensor) -> None:
        """See the base class."""
        parts = WAIT_ANSWERS | WAIT_ADD

        def launch() -> None:
            if self._is_memops:
                self._await_flags(slot)
            numbers = (slot, layer, begin, partial.shape[0], parts)
            pointers = (ctypes.c_void_p(partial.data_ptr()), None)
            self._kernels.launch_add(self._grid, self._block, ctypes.byref(self.box), *pointers, *numbers)

        self._run(launch)

    def _await_flags(self, slot: int) -> None:
        """What cuStreamWaitValue32 does: nothing but wait, without a deadline."""
        from moebius.mailbox_layout import offsets

        base, sizes = self._mailbox.kernel.address, offsets()
        for server in range(self.box.num_servers):
            line = base + self.box.done_lines + (slot * self.box.num_servers + server) * sizes["DoneLine"]
            flag = ctypes.c_uint32.from_address(line + sizes["DoneLine.answered"] + 4 * self._mailbox.client)
            while flag.value != 1:
                pass

    def _run(self, launch: Callable[[], None]) -> None:
        self.launched.append(launch)
        launch()

    def replay(self) -> None:
        """All launches again, in order, with the same arguments."""
        for launch in list(self.launched):
            launch()

    def set_words(self, first: int, values: Sequence[int]) -> None:
        """See the base class."""
        self.state[first : first + len(values)] = torch.tensor([_signed(value) for value in values])

    def synchronize(self) -> None:
        """Everything has ended."""

    def close(self) -> None:
        """Nothing is held."""


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


@contextmanager
def doorbell_client(
    mailbox: Mailbox, geometry: MoeGeometry, *, deadline_ms: int = 5000, watch_ms: int = 0, **launcher: int
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
