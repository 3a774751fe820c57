"""Queues the doorbell kernels on torch's current CUDA stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Literal

import structlog
import torch

from gpu_service.device import TORCH_DTYPES
from gpu_service.device import cuda_driver as driver
from gpu_service.device.cuda_program import compiled
from gpu_service.experts.doorbell.client import DoorbellLauncher
from gpu_service.experts.doorbell.crossover import Crossover, crossing
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
from moebius.mailbox import DTYPE_CODES, Mailbox, field_offsets, row_begin

U32, POINTER = ctypes.c_uint32, ctypes.c_uint64
_CODES = {TORCH_DTYPES[name]: code for name, code in DTYPE_CODES.items()}
BLOCK = 512
# Bytes that one block moves well: fewer blocks leave PCIe's latency uncovered, more only queue up.
BLOCK_BYTES = 8192
MAX_BLOCKS = 32
# What is timed: hand-offs from this size on, in a graph of this many, this often.
SMALLEST_BYTES = 64 * 1024
RUNS = 8
REPEATS = 5

_log = structlog.get_logger(__name__)

# torch leaves these untyped.
_cuda: Any = torch.cuda


class CudaLauncher(DoorbellLauncher):
    """Zero copy below a measured size, the copy engine from there on.

    Everything a step will use is loaded and launched once here: nothing is loaded while a kernel waits.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        device: torch.device,
        deadline_ms: int,
        signal: Literal["doorbell", "memops"],
        copy_bytes: int | None,
    ) -> None:
        """`copy_bytes`: from how many bytes of rows on the copy engine moves them; None: measured now.

        Raises UserError when CUDA refuses the mailbox's memory, or NVRTC is missing.
        """
        self._device = device
        self._mailbox = mailbox
        self._is_memops = signal == "memops"
        self._sizes = field_offsets()
        _cuda.set_device(device)
        self.state = torch.zeros(State.END, dtype=torch.int64, device=device)
        major, minor = _cuda.get_device_capability(device)
        module = driver.Module(compiled(program(), "doorbell", f"sm_{major}{minor}"))
        rows = (*(U32,) * 6,)
        self._pack = module.kernel("pack_and_ring", Box, POINTER, POINTER, POINTER, *rows, U32)
        self._add = module.kernel("wait_and_add", Box, POINTER, POINTER, *rows[:5])
        self._memory = driver.RegisteredMemory(
            mailbox.kernel.address, mailbox.nbytes, f"mailbox '{mailbox.name}'"
        )
        self.box = make_box(mailbox, self._memory.device_address, self.state.data_ptr(), deadline_ms)
        geometry = mailbox.geometry
        self.dtype = TORCH_DTYPES[geometry.dtype]
        self._width = self.dtype.itemsize
        most = row_begin(geometry.max_rows + geometry.num_clients - 1, 1, geometry.num_clients)
        self._staged = torch.zeros(
            (geometry.num_servers, most, geometry.hidden_size), dtype=torch.float32, device=device
        )
        self.crossover = Crossover(None, None)
        self._touch_everything()
        if copy_bytes is not None:
            self.crossover = Crossover(copy_bytes, copy_bytes)
        else:
            self.crossover = measured_crossover(self, most)

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
        parts = PACK_RING | (PACK_CLEAR if self._is_memops else 0)
        nbytes = hidden_states.numel() * self._width
        if self.crossover.copies_request(nbytes) and hidden_states.dtype == self.dtype:
            self.copy_request(slot, begin, hidden_states)
            nbytes = 0
        else:
            parts |= PACK_HIDDEN
        self.launch_pack(slot, layer, rows, begin, hidden_states, topk_ids, topk_weights, parts, nbytes)

    def launch_pack(
        self,
        slot: int,
        layer: int,
        rows: int,
        begin: int,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        parts: int,
        nbytes: int,
    ) -> None:
        """Launches `pack_and_ring` to do `parts`, in as many blocks as `nbytes` of rows are worth."""
        pointers = (hidden_states.data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr())
        code = _CODES[hidden_states.dtype]
        numbers = (code, slot, layer, rows, begin, hidden_states.shape[0], parts)
        self._pack.launch(self._stream, _blocks(nbytes), BLOCK, self.box, *pointers, *numbers)

    def copy_request(self, slot: int, begin: int, hidden_states: torch.Tensor) -> None:
        """The hidden states by the copy engine; they have the mailbox's type."""
        if hidden_states.numel() == 0:
            return
        row_bytes = self.box.hidden_size * self._width
        place = self.box.requests + slot * self.box.request_stride + self._sizes["RequestHeader"]
        target = self.box.base + place + begin * row_bytes
        driver.copy(target, hidden_states.data_ptr(), hidden_states.shape[0] * row_bytes, self._stream)

    def add(self, slot: int, layer: int, begin: int, partial: torch.Tensor) -> None:
        if self._is_memops:
            self._wait_for_flags(slot)
        if partial.numel() == 0 or not self.crossover.copies_response(partial.nbytes):
            self.launch_add(slot, layer, begin, partial, WAIT_ANSWERS | WAIT_ADD, 0)
            return
        self.launch_add(slot, layer, begin, partial, WAIT_ANSWERS, 0)
        self.copy_response(slot, begin, partial)
        self.launch_add(slot, layer, begin, partial, WAIT_ADD, self._staged.data_ptr())

    def launch_add(
        self, slot: int, layer: int, begin: int, partial: torch.Tensor, parts: int, staged: int
    ) -> None:
        """Launches `wait_and_add` to do `parts`; `staged`: address of copied answers, 0: in the mailbox."""
        blocks = _blocks(partial.nbytes) if parts & WAIT_ADD else 1
        numbers = (slot, layer, begin, partial.shape[0], parts)
        self._add.launch(self._stream, blocks, BLOCK, self.box, partial.data_ptr(), staged, *numbers)

    def copy_response(self, slot: int, begin: int, partial: torch.Tensor) -> None:
        """Own rows of all servers' answers, by the copy engine, one after another into GPU memory."""
        nbytes = partial.nbytes
        first = (
            self.box.base
            + self.box.responses
            + self._sizes["ResponseHeader"]
            + begin * self.box.hidden_size * 4
        )
        for server in range(self.box.num_servers):
            answer = first + (slot * self.box.num_servers + server) * self.box.response_stride
            driver.copy(self._staged.data_ptr() + server * nbytes, answer, nbytes, self._stream)

    def _wait_for_flags(self, slot: int) -> None:
        flags = self.box.base + self.box.done_lines + self._sizes["DoneLine.answered"] + 4 * self.box.client
        for server in range(self.box.num_servers):
            line = (slot * self.box.num_servers + server) * self._sizes["DoneLine"]
            driver.wait_until_equal(flags + line, 1, self._stream)

    def set_words(self, first: int, values: Sequence[int]) -> None:
        """Sets words of `State` on the current stream, without waiting for it."""
        words = [value - 2**64 if value >= 2**63 else value for value in values]
        self.state[first : first + len(words)].copy_(
            torch.tensor(words, dtype=torch.int64), non_blocking=True
        )

    def synchronize(self) -> None:
        """Returns when the work of the current stream has ended: steps that ask expert servers run there.

        Those of the prefill lane ask none, and are not waited for.
        """
        _cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        _cuda.synchronize(self._device)
        self._memory.close()

    @property
    def scratch(self) -> torch.Tensor:
        """float32 `[servers, rows, H]` that a step uses and measuring may."""
        return self._staged

    @property
    def _stream(self) -> int:
        return int(_cuda.current_stream(self._device).cuda_stream)

    def _touch_everything(self) -> None:
        """Launches each kernel with the error flag set, which makes it return at once."""
        self.set_words(State.ERROR, [1])
        rows = self._staged[0, :1]
        routing = torch.zeros((1, self.box.top_k), dtype=torch.int32, device=self._device)
        self.launch_pack(0, 0, 1, 0, rows, routing, routing, PACK_HIDDEN | PACK_RING, rows.nbytes)
        self.launch_add(0, 0, 0, rows, WAIT_ANSWERS | WAIT_ADD, 0)
        self.synchronize()
        self.set_words(State.ERROR, [0])


def _blocks(nbytes: int) -> int:
    return min(max(-(-nbytes // BLOCK_BYTES), 1), MAX_BLOCKS)


def measured_crossover(launcher: CudaLauncher, most_rows: int) -> Crossover:
    """Times both ways in slot 0's memory, which is unused yet. The GPU should be idle."""
    box = launcher.box
    scratch = launcher.scratch
    hidden_states = torch.zeros((most_rows, box.hidden_size), dtype=launcher.dtype, device=scratch.device)
    routing = torch.zeros((most_rows, box.top_k), dtype=torch.int32, device=scratch.device)
    partial = torch.zeros((most_rows, box.hidden_size), device=scratch.device)
    times: list[tuple[float, float, float, float]] = []
    counts = _row_counts(most_rows, box.hidden_size * 4)
    for rows in counts:
        sent, got, ids = hidden_states[:rows], partial[:rows], routing[:rows]

        def pack(sent: torch.Tensor = sent, ids: torch.Tensor = ids) -> None:
            launcher.launch_pack(0, 0, sent.shape[0], 0, sent, ids, ids, PACK_HIDDEN, sent.nbytes)

        def add(got: torch.Tensor = got) -> None:
            launcher.launch_add(0, 0, 0, got, WAIT_ADD, 0)

        def copy_and_add(got: torch.Tensor = got) -> None:
            launcher.copy_response(0, 0, got)
            launcher.launch_add(0, 0, 0, got, WAIT_ADD, scratch.data_ptr())

        def copy(sent: torch.Tensor = sent) -> None:
            launcher.copy_request(0, 0, sent)

        times.append((_timed(pack), _timed(copy), _timed(add), _timed(copy_and_add)))
    packs, copies, adds, copied_adds = ([row[i] for row in times] for i in range(4))
    row_bytes = (box.hidden_size * hidden_states.element_size(), box.hidden_size * 4)
    found = Crossover(
        crossing([rows * row_bytes[0] for rows in counts], packs, copies),
        crossing([rows * row_bytes[1] for rows in counts], adds, copied_adds),
    )
    _log.info("hand-off by kernels or the copy engine", rows=counts, microseconds=times, found=found)
    return found


def _row_counts(most_rows: int, row_bytes: int) -> list[int]:
    """Returns the powers of two from the smallest size that may be worth it to all rows."""
    counts = [most_rows]
    while counts[-1] > 1 and counts[-1] * row_bytes > SMALLEST_BYTES:
        counts.append(counts[-1] // 2)
    return counts[::-1]


def _timed(launch: Callable[[], None]) -> float:
    """Returns the microseconds of one run in a graph, where launching costs the host nothing; the fastest of
    some.
    """
    # torch leaves these untyped.
    cuda: Any = torch.cuda
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        for _ in range(RUNS):
            launch()
    best = float("inf")
    for _ in range(REPEATS):
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1000 / RUNS)
    return best
