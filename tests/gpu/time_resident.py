"""Times resident experts of one layer on the GPU that is here: `python -m tests.gpu.time_resident [--sweep]`.

Not a test. At the sizes of Qwen3-30B-A3B (128 experts, 8 chosen, 2048 x 768), all resident. Per format and
number of rows it prints microseconds per call in a replayed graph of calls with different experts each, for
the row kernels and for the tiles, GB/s of the distinct experts' bytes (compare with the device's memory
bandwidth) and TFLOP/s; with `--gguf` of the formats of GGUF's types. `--sweep` also varies lines per program
and tiles; `--dense` only looks at many rows, with weights unpacked once by tiles of several sizes, and as
they are stored.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gpu_service.experts.resident.experts import LayerSlots
from gpu_service.experts.resident.triton_kernels import launch
from gpu_service.experts.resident.triton_kernels.backend import TritonResidentKernels
from gpu_service.ops.triton import panel_sizes
from tests.helpers.resident_layers import Shape, resident_layer, routed

SHAPE = Shape(hidden=2048, intermediate=768, experts=128, top_k=8)
FORMATS = ("int4_g32", "int4_g128_zeros", "mxfp4", "bfloat16", "fp8_block")
# Of GGUF's Q4_K, Q5_K, Q6_K, IQ4_XS, IQ4_NL, IQ3_XXS, IQ3_S, Q2_K, IQ2_XXS, IQ2_S, IQ2_XS, IQ1_M, IQ1_S,
# Q3_K:
# with `--gguf`.
GGUF_FORMATS = (
    "int4_g32_mins_products",
    "int5_g32_mins_products",
    "int6_g16_products",
    "iq4_g32_products",
    "iq4_g32_f16",
    "iq3_xxs_grid_products",
    "iq3_s_grid_products",
    "int2_g16_mins_products",
    "iq2_xxs_grid_products",
    "iq2_s_grid_products",
    "iq2_xs_grid_products",
    "iq1_m_grid_products",
    "iq1_s_grid_products",
    "tq1_products",
    "int3_g16_products",
)
FEW, MANY = (1, 2, 4, 8, 16, 32), (4, 8, 16, 32, 64, 256, 1024, 4096)
CALLS, ROUNDS = 16, 9
ALWAYS, NEVER = 1 << 30, 0
# torch leaves its streams and events untyped.
_cuda: Any = torch.cuda


def graph_us(calls: Sequence[Callable[[], torch.Tensor]]) -> float:
    """Returns median microseconds of a call."""
    stream = _cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times: list[float] = []
        for _ in range(ROUNDS):
            begin, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def measure(slots: LayerSlots, rows: int, few_rows: int, count: int = CALLS) -> str:
    """Returns one cell: microseconds, GB/s and TFLOP/s."""
    kernels = TritonResidentKernels(SHAPE.geometry, few_rows)
    inputs = [routed(SHAPE, rows, seed=n, device="cuda", dtype=torch.bfloat16) for n in range(count)]
    calls = [partial(kernels.forward, slots, *given, None) for given in inputs]
    taken = graph_us(calls)
    distinct = statistics.mean(len(set(given[1].flatten().tolist()) - {-1}) for given in inputs)
    pairs = statistics.mean(int((given[1] >= 0).sum()) for given in inputs)
    gigabytes = distinct * slots.kind.expert_bytes / taken / 1e3
    teraflops = pairs * 6 * SHAPE.hidden * SHAPE.intermediate / taken / 1e6
    return f"{taken:8.1f} us {gigabytes:6.0f} GB/s {teraflops:6.1f} TFLOP/s"


def dense(slots: LayerSlots, weight_format: str) -> None:
    """Many rows."""
    tiles, least = launch.dense_tiles, launch.UNPACK_FROM  # type: ignore[attr-defined]
    for rows in (1024, 2048, 4096, 16384):
        launch.UNPACK_FROM = ALWAYS  # type: ignore[attr-defined]
        print(f"{weight_format:10s} {rows:5d} rows, packed: {measure(slots, rows, NEVER, 2)}", flush=True)
        launch.UNPACK_FROM = least  # type: ignore[attr-defined]
        for height, columns, chunk, warps, stages in (
            (64, 128, 64, 4, 3),
            (64, 256, 64, 4, 3),
            (128, 128, 64, 4, 3),
            (128, 128, 64, 4, 4),
            (128, 128, 64, 8, 4),
            (128, 256, 64, 8, 3),
            (128, 256, 64, 8, 4),
            (128, 256, 32, 8, 4),
            (256, 128, 64, 8, 3),
        ):
            chosen = launch.DenseTile(height, columns, chunk, warps, stages)
            launch.dense_tiles = partial(_only, chosen)
            print(
                f"{weight_format:10s} {rows:5d} rows, {chosen}: {measure(slots, rows, NEVER, 2)}", flush=True
            )
        launch.dense_tiles = tiles


def _only(chosen: launch.DenseTile, pairs: int, num_experts: int) -> tuple[launch.DenseTile, ...]:
    return (chosen,)


def main() -> None:
    """Prints the table, and with --sweep what other sizes of programs give."""
    print(torch.cuda.get_device_name())
    for weight_format in GGUF_FORMATS if "--gguf" in sys.argv else FORMATS:
        slots = resident_layer(SHAPE, weight_format, tuple(range(SHAPE.experts)), "cuda")
        if "--dense" in sys.argv:
            dense(slots, weight_format)
            continue
        for rows in FEW:
            print(f"{weight_format:10s} {rows:5d} rows, by rows:  {measure(slots, rows, ALWAYS)}", flush=True)
        for rows in MANY:
            print(f"{weight_format:10s} {rows:5d} rows, by tiles: {measure(slots, rows, NEVER)}", flush=True)
        if "--sweep" in sys.argv:
            sweep(slots, weight_format)


def sweep(slots: LayerSlots, weight_format: str) -> None:
    """Lines per program at one row; tiles at few, some and many rows."""
    lines, tile = panel_sizes.MAX_LINES, launch.tile
    for count in (32, 64, 256):
        panel_sizes.MAX_LINES = count
        print(f"{weight_format:10s} {count:4d} lines, 1 row: {measure(slots, 1, ALWAYS)}", flush=True)
    panel_sizes.MAX_LINES = lines
    for rows, height in ((16, 16), (512, 32), (512, 64), (4096, 64), (4096, 128)):
        for columns, warps in ((32, 1), (32, 2), (64, 1), (64, 2), (64, 4), (128, 4), (128, 8)):
            chosen = launch.Tile(height, columns, warps)
            launch.tile = partial(_always, chosen)
            print(f"{weight_format:10s} {rows:5d} rows, {chosen}: {measure(slots, rows, NEVER)}", flush=True)
    launch.tile = tile


def _always(chosen: launch.Tile, pairs: int, num_experts: int, by_parts: bool) -> launch.Tile:
    return chosen


if __name__ == "__main__":
    main()
