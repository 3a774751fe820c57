"""Times dense layers in packed panels: `python -m tests.gpu.time_panels [FORMAT ...]`.

Not a test. At the sizes of Qwen3-30B-A3B, in a replayed graph of calls with different weights that no cache
holds all of: for each format and number of rows, microseconds of a call, GB/s of the packed bytes and their
part of what a copy within the device's memory reaches in the same run (its reads and writes), TFLOP/s, and
the time of torch's product with bfloat16 weights over ours (above 1: packed weights are faster).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpu_service.ops.packed_weight import PackedPart, packed_bytes
from gpu_service.ops.panel_linear import PanelPart, panel_parts
from gpu_service.ops.triton.panel_linear import panel_linear
from tests.gpu.time_resident import graph_us

# Features and columns.
PRODUCTS = {"queries, keys, values": (5120, 2048), "output": (2048, 4096), "head": (151936, 2048)}
ROWS = (1, 2, 4, 8, 16, 64, 256, 512, 1024, 4096)
# Of Q4_K, Q5_K, Q6_K, Q8_0, IQ4_XS, IQ3_S, Q2_K; AWQ, fp8 by blocks and by rows, MXFP4, NVFP4.
FORMATS = (
    "int4_g32_mins_products",
    "int5_g32_mins_products",
    "int6_g16_products",
    "int8_g32_f16",
    "iq4_g32_products",
    "iq3_s_grid_products",
    "int2_g16_mins_products",
    "int4_g128_zeros_f16",
    "fp8_block",
    "fp8_channel",
    "mxfp4",
    "nvfp4",
)
WEIGHT_BYTES = 400 << 20


def bandwidth() -> float:
    """Returns GB/s of a copy of 2 GiB, read and written."""
    source = torch.zeros(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_us([partial(target.copy_, source)] * 4) / 1e3


def packed(features: int, columns: int, name: str) -> tuple[list[torch.Tensor], tuple[PanelPart, ...]]:
    """Returns weights of zeros, which take as long as any others, and their one part."""
    form = (PackedPart(name, features),)
    size = packed_bytes(columns, form)
    kind: dict[str, Any] = {"dtype": torch.uint8, "device": "cuda"}
    count = max(2, min(32, WEIGHT_BYTES // size))
    memories = (torch.zeros(size, **kind) for _ in range(count))
    return [nn.Parameter(memory, requires_grad=False) for memory in memories], panel_parts(columns, form)


def times(name: str, features: int, columns: int, rows: int, copied: float) -> str:
    """Returns one line."""
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    memories, parts = packed(features, columns, name)
    ours: list[Callable[[], Any]] = [partial(panel_linear, x, memory, parts, None) for memory in memories]
    taken = graph_us(ours)
    count = max(2, min(len(memories), WEIGHT_BYTES // (2 * features * columns)))
    plain = [torch.randn(features, columns, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    whole = graph_us([partial(functional.linear, x, weight) for weight in plain])
    rate = memories[0].nbytes / taken / 1e3
    teraflops = 2e-6 * rows * features * columns / taken
    return (
        f"{taken:9.1f} us {rate:6.0f} GB/s {rate / copied:5.2f} {teraflops:7.1f} TFLOP/s {whole / taken:6.2f}"
    )


def main() -> None:
    """Prints the table."""
    copied = bandwidth()
    print(f"{torch.cuda.get_device_name()}: copies at {copied:.0f} GB/s")
    for name in sys.argv[1:] or FORMATS:
        for product, (features, columns) in PRODUCTS.items():
            for rows in ROWS:
                line = times(name, features, columns, rows, copied)
                print(f"{name:24s} {product:22s} {rows:5d} rows {line}", flush=True)


if __name__ == "__main__":
    main()
