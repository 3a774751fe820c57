"""Work recorded once and launched again as one: the interface, and its implementation by CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from gpu_service.device.stream import CudaDeviceStream


def graph_sizes(max_batch_size: int) -> list[int]:
    """Returns the batch sizes that have a graph: 1, 2, 4, 8, then every 8 rows up to 64, every 16 up to 128,
    every 32, and the limit itself. Each takes memory and time at start; padding to the next one is less than
    a quarter of a batch of more than 32.
    """
    steps = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max_batch_size, 32))
    return sorted({size for size in steps if size < max_batch_size} | {max_batch_size})


class CapturedGraph(ABC):
    """Recorded work. The memory it reads and writes keeps its place for the graph's life."""

    @abstractmethod
    def replay(self) -> None:
        """Launches it on the current stream."""

    @abstractmethod
    def close(self) -> None:
        """Gives up the graph; it must not be running."""


class GraphBackend(ABC):
    """Records work without running it. One thread at a time."""

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        """Records what `work` launches; its Python code runs once, now.

        Everything `work` calls must have run before: nothing may be compiled, loaded or allocated by a
        library while recording. Capture the largest first, the others then fit into its memory.
        """


class _CudaGraph(CapturedGraph):
    def __init__(self, graph: torch.cuda.CUDAGraph, on_close: Callable[[], None]) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._on_close = on_close

    def replay(self) -> None:
        assert self._graph is not None, "the graph is closed"
        self._graph.replay()

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
            self._on_close()
        self._graph = None


class CudaGraphs(GraphBackend):
    """Graphs that share one memory pool: no two of them may run at the same time."""

    def __init__(self, stream: CudaDeviceStream) -> None:
        self._stream = stream
        self._pool: Any = None
        self._open = 0

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        if self._open == 0:
            # With its last graph, or its first one's failure, the allocator forgets a pool.
            self._pool = torch.cuda.graph_pool_handle()
        # Not torch's context manager: it gives the allocator's free blocks back to the device, and those are
        # what later steps were promised. What is garbage must not be found while capturing.
        gc.collect()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with self._stream.active():
            # Threads that only watch the device (those of NCCL) may go on doing so: thread_local.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what made the work fail is the reason for this, too
                    graph.capture_end()
                raise
            graph.capture_end()
        self._open += 1
        return _CudaGraph(graph, self._closed)

    def _closed(self) -> None:
        self._open -= 1


def is_capturing(device: torch.device) -> bool:
    """Returns whether what the thread launches on a device now becomes part of a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
