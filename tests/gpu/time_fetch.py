"""Times fetching on the GPU that is here: `python -m tests.gpu.time_fetch`.

Not a test. At the sizes of Qwen3-30B-A3B (128 experts, 8 chosen, 2048 x 768, int4_g32): GB/s of the kernel
that copies experts from page-locked memory, by programs and words each has on the way, alone and while
threads of the host read the same memory, next to the copy engine; and microseconds a layer of what fetching
adds where nothing is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gpu_service.experts.fetching import triton_kernels
from gpu_service.experts.fetching.slots import FetchLayer, make_state
from gpu_service.experts.fetching.step import FetchedExperts
from gpu_service.experts.fetching.triton_kernels import TritonFetchKernels
from gpu_service.experts.resident.make import make_kernels
from gpu_service.experts.resident.panels import layer_format
from tests.gpu.time_resident import SHAPE, graph_us
from tests.helpers.resident_layers import routed

COPIES, LAUNCHES, READERS = 3, 40, 12
PROGRAMS, WORDS = (4, 8, 16, 32, 64), (2048, 4096, 8192)
# torch leaves its streams and events untyped.
_cuda: Any = torch.cuda


def copies(layer: FetchLayer, programs: int) -> float:
    """GB/s of launches that copy a few experts each, as steps do, other ones in each launch."""
    kernels = TritonFetchKernels(torch.device("cuda"), programs)
    each, coming = layer.groups[0].kind.expert_bytes, layer.coming.clone()

    def launch(first: int) -> torch.Tensor:
        layer.coming.copy_(held[first])
        kernels.copy(layer)
        kernels.join()
        return layer.coming

    held = []
    for first in range(LAUNCHES):
        pairs = [number for n in range(COPIES) for number in ((COPIES * first + n) % SHAPE.experts, n)]
        held.append(coming.clone())
        held[-1][: 1 + len(pairs)] = torch.tensor([COPIES, *pairs], dtype=torch.int32)
    return COPIES * each / graph_us([partial(launch, n) for n in range(LAUNCHES)]) / 1e3


def copy_engine(host: torch.Tensor, layer: FetchLayer) -> float:
    """GB/s of copies of one expert each by the copy engine."""
    target, each = layer.groups[0].weights, layer.groups[0].kind.expert_bytes
    begin, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    begin.record()
    for number in range(LAUNCHES * COPIES):
        first = number % SHAPE.experts * each
        target[number % COPIES].copy_(host[first : first + each], non_blocking=True)
    end.record()
    end.synchronize()
    return float(LAUNCHES * COPIES * each / begin.elapsed_time(end) / 1e6)


@contextmanager
def readers(host: torch.Tensor, rates: list[float]) -> Iterator[None]:
    """Threads that read the memory meanwhile; `rates` gets their GB/s together."""
    ended, words = threading.Event(), host.view(torch.int64)
    counts = [0] * READERS

    def read(number: int) -> None:
        part = words[number * len(words) // READERS : (number + 1) * len(words) // READERS]
        while not ended.is_set():
            part.sum()
            counts[number] += part.nbytes

    torch.set_num_threads(1)
    threads = [threading.Thread(target=read, args=(number,)) for number in range(READERS)]
    begin, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    begin.record()
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.record()
        end.synchronize()
        ended.set()
        for thread in threads:
            thread.join()
        rates.append(sum(counts) / begin.elapsed_time(end) / 1e6)


def main() -> None:
    """Prints everything."""
    device = torch.device("cuda", torch.cuda.current_device())
    kind = layer_format("int4_g32", "int4_g32", SHAPE.hidden, SHAPE.intermediate, False)
    host = torch.ones(SHAPE.experts * kind.expert_bytes, dtype=torch.uint8).pin_memory()
    state = make_state({0: [kind]}, 16, SHAPE.experts, {0: SHAPE.limit}, device)
    layer = state.layers[0]
    addresses = [host.data_ptr() + expert * kind.expert_bytes for expert in range(SHAPE.experts)]
    state.addresses.copy_(torch.tensor([[addresses]], dtype=torch.int64))
    print(f"copy engine {copy_engine(host, layer):.1f} GB/s")
    for words in WORDS:
        triton_kernels.COPY_WORDS = words
        alone = [copies(layer, programs) for programs in PROGRAMS]
        rates: list[float] = []
        with readers(host, rates):
            beside = [copies(layer, programs) for programs in PROGRAMS]
        for programs, one, other in zip(PROGRAMS, alone, beside, strict=True):
            print(f"{programs:3d} programs of {words} words: {one:5.1f} GB/s, beside readers {other:5.1f}")
        print(f"readers had {rates[0]:.0f} GB/s")
    state.forget()
    kernels, products = TritonFetchKernels(device), make_kernels(SHAPE.geometry, device)
    side = FetchedExperts(state.layers, kernels, products)
    for rows in (1, 8, 64):
        inputs = [routed(SHAPE, rows, seed=n, device="cuda", dtype=torch.bfloat16) for n in range(16)]

        def whole(given: tuple[torch.Tensor, ...]) -> torch.Tensor:
            hidden_states, ids, weights = given
            side.cpu_ids(0, ids)
            return side.forward(0, hidden_states, [ids], weights, [None])[0]

        def choose(given: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return kernels.choose(layer, given[1])[0]

        times = [graph_us([partial(call, given) for given in inputs]) for call in (choose, whole)]
        print(f"{rows:2d} rows: choosing {times[0]:.1f} us, all that a layer adds {times[1]:.1f} us")


if __name__ == "__main__":
    main()
