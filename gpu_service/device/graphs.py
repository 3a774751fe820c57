"""Work recorded once and launched again as one: the interface, and its implementation by CUDA graphs.

Work of which a part differs from run to run may be recorded in pieces, between which the host launches that
part: `GraphBackend.capture_pieces`.
"""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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


# Steps of fewer tokens than this are padded to it, where no graph of decode steps takes them.
_SMALLEST_PROMPT_STEP = 256


def prompt_graph_sizes(max_tokens: int) -> list[int]:
    """Returns the numbers of tokens that steps with prompts have graphs of: 256, four for each doubling from
    there on, and the limit itself; none for 0.

    Each takes memory and time at start. Of a step at most a fifth is padding, a tenth on average, and padding
    chooses no experts.
    """
    sizes, size = [], _SMALLEST_PROMPT_STEP
    while size < max_tokens:
        sizes.append(size)
        size += 1 << (size.bit_length() - 3)
    return [*sizes, max_tokens] if max_tokens else []


class CapturedGraph(ABC):
    """Recorded work. The memory it reads and writes keeps its place for the graph's life."""

    @abstractmethod
    def replay(self) -> None:
        """Launches it on the current stream."""

    @abstractmethod
    def close(self) -> None:
        """Gives up the graph; it must not be running."""


# Ends a piece: in every replay the host calls the second argument, with the memory of the first, before the
# next piece is launched.
Cut = Callable[[Sequence[torch.Tensor], Callable[..., None]], None]


class GraphBackend(ABC):
    """Records work without running it. One thread at a time."""

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        """Records what `work` launches; its Python code runs once, now.

        Everything `work` calls must have run before: nothing may be compiled, loaded or allocated by a
        library while recording. Capture the largest first, the others then fit into its memory.
        """

    def capture_pieces(self, work: Callable[[Cut], None]) -> CapturedGraph:
        """Records work that calls what it is given wherever the host is to launch something in every replay.

        What the host is to launch is not called now. It gets tensors of the recorded work as they are at that
        point of a replay: it must not keep them, and may write only to memory that is not the graph's.
        Raises NotImplementedError where nothing but whole graphs can be recorded.
        """
        raise NotImplementedError(f"{type(self).__name__} records no pieces")


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


class _Pieces(CapturedGraph):
    """Graphs in turn with calls of the host: one more graph than calls."""

    def __init__(self, graphs: Sequence[CapturedGraph], launches: Sequence[Callable[[], None]]) -> None:
        self._graphs, self._launches = graphs, launches

    def replay(self) -> None:
        first, *others = self._graphs
        first.replay()
        for launch, graph in zip(self._launches, others, strict=True):
            launch()
            graph.replay()

    def close(self) -> None:
        for graph in self._graphs:
            graph.close()


class _Place:
    """Memory of a device as `torch.as_tensor` takes it; owns nothing."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2
        }  # fmt: skip


def _place_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same elements without keeping their memory: a graph's later work may be recorded there.

    The memory stays as long as the graph.
    """
    last = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    place = _Place(tensor.data_ptr(), (last + 1) * tensor.element_size())
    memory = torch.as_tensor(place, device=tensor.device)
    assert memory.data_ptr() == tensor.data_ptr(), "torch copied what it was to refer to"
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class CudaGraphs(GraphBackend):
    """Graphs that share one memory pool: no two of them may run at the same time."""

    def __init__(self, stream: CudaDeviceStream) -> None:
        self._stream = stream
        self._pool: Any = None
        self._open = 0

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        (graph,), _ = self._recorded(lambda cut: work())
        return graph

    def capture_pieces(self, work: Callable[[Cut], None]) -> CapturedGraph:
        return _Pieces(*self._recorded(work))

    def _recorded(
        self, work: Callable[[Cut], None]
    ) -> tuple[Sequence[CapturedGraph], Sequence[Callable[[], None]]]:
        if self._open == 0:
            # With its last graph, or its first one's failure, the allocator forgets a pool.
            self._pool = torch.cuda.graph_pool_handle()
            gc.collect()
        # Not torch's context manager: it gives the allocator's free blocks back to the device, and those are
        # what later steps were promised. It also looks for garbage each time, which takes tenths of a second
        # with all that a process has imported.
        self._stream.synchronize()
        pieces: list[torch.cuda.CUDAGraph] = []
        launches: list[Callable[[], None]] = []

        def cut(tensors: Sequence[torch.Tensor], launch: Callable[..., None]) -> None:
            pieces[-1].capture_end()
            launches.append(partial(launch, *map(_place_of, tensors)))
            self._begin(pieces)

        with self._stream.active(), _without_collections():
            self._begin(pieces)
            try:
                work(cut)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what made the work fail is the reason for this, too
                    pieces[-1].capture_end()
                raise
            pieces[-1].capture_end()
        self._open += len(pieces)
        return [_CudaGraph(piece, self._closed) for piece in pieces], launches

    def _begin(self, pieces: list[torch.cuda.CUDAGraph]) -> None:
        """The stream's work becomes part of one more piece, whose memory is shared with all others."""
        pieces.append(torch.cuda.CUDAGraph())
        # Threads that only watch the device (those of NCCL) may go on doing so: thread_local.
        pieces[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _closed(self) -> None:
        self._open -= 1


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Garbage is not looked for: what frees memory of the device must not be found while capturing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_capturing(device: torch.device) -> bool:
    """Returns whether what the thread launches on a device now becomes part of a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
