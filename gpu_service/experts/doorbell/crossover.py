"""From what size on the copy engine moves rows faster than a kernel does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
import torch

from gpu_service.experts.doorbell.program import PACK_HIDDEN, WAIT_ADD

if TYPE_CHECKING:
    from gpu_service.experts.doorbell.cuda_launcher import CudaLauncher

_log = structlog.get_logger(__name__)
SMALLEST_BYTES = 64 * 1024
RUNS = 8
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Crossover:
    """Bytes of rows from which on the copy engine is used; None: never. By the configuration or measured."""

    request_bytes: int | None
    response_bytes: int | None

    def copies_request(self, nbytes: int) -> bool:
        """Whether so many bytes of hidden states are copied by the engine."""
        return self.request_bytes is not None and nbytes >= self.request_bytes

    def copies_response(self, nbytes: int) -> bool:
        """Whether so many bytes of one server's answer are copied by the engine."""
        return self.response_bytes is not None and nbytes >= self.response_bytes


def crossing(sizes: Sequence[int], direct: Sequence[float], copied: Sequence[float]) -> int | None:
    """The smallest size from which on every larger one is faster copied; None: not even the largest."""
    found: int | None = None
    for size, direct_us, copied_us in sorted(zip(sizes, direct, copied, strict=True), reverse=True):
        if copied_us >= direct_us:
            break
        found = size
    return found


def measured_crossover(launcher: CudaLauncher, most_rows: int) -> Crossover:
    """Times both ways in slot 0's memory, which nobody uses yet. The GPU should be idle."""
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
    """Powers of two from the smallest size that may be worth it to all rows."""
    counts = [most_rows]
    while counts[-1] > 1 and counts[-1] * row_bytes > SMALLEST_BYTES:
        counts.append(counts[-1] // 2)
    return counts[::-1]


def _timed(launch: Callable[[], None]) -> float:
    """Microseconds of one run in a graph, where launching costs the host nothing; the fastest of some."""
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
