"""Times the fused kernels of a decode step and what they replace: `python -m tests.gpu.time_fused [--sweep]`.

Not a test. Microseconds per call in a replayed graph of calls with different weights, at the sizes of
Qwen3-30B-A3B: a product of few rows by torch and by Triton, and a layer's seam with the product after it as
separate ops and as one kernel. `--sweep` also varies the tiles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpu_service.ops.triton import gemv, norm
from tests.gpu.time_resident import graph_us

# Features and columns.
PRODUCTS = {
    "queries, keys, values": (5120, 2048),
    "output": (2048, 4096),
    "router": (128, 2048),
    "dense gate and up": (12288, 2048),
    "head": (151936, 2048),
}
ROWS = (1, 2, 4, 8)
# Weights that no cache holds all of.
WEIGHT_BYTES = 400 << 20


def _weights(features: int, columns: int) -> list[torch.Tensor]:
    count = max(2, min(64, WEIGHT_BYTES // (2 * features * columns)))
    # As a model's: kernels may read parameters before the kernel before them ends.
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    weights = (torch.randn(features, columns, **kind) for _ in range(count))
    return [nn.Parameter(weight, requires_grad=False) for weight in weights]


def _separate(residual: torch.Tensor, update: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> Any:
    return functional.linear(norm.fused_add_rms_norm(update, residual, scale, 1e-6), weight)


def times(rows: int, features: int, columns: int) -> str:
    """Returns one line: torch, Triton; the seam apart, the seam as one."""
    weights = _weights(features, columns)
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    update, scale = torch.randn(rows, columns, device="cuda"), torch.ones_like(x[0])
    calls: list[list[Callable[[], Any]]] = [
        [partial(functional.linear, x, weight) for weight in weights],
        [partial(gemv.linear, x, weight, None) for weight in weights],
        [partial(_separate, x, update, scale, weight) for weight in weights],
        [partial(gemv.add_norm_linear, x, update, scale, 1e-6, weight, None) for weight in weights],
    ]
    found = [graph_us(kind) for kind in calls]
    bandwidth = 2e-6 * features * columns / found[1]
    return "  ".join(f"{time:7.1f}" for time in found) + f"   {bandwidth:.2f} TB/s"


def sweep(features: int, columns: int) -> None:
    """Microseconds of one row by features of a program and warps."""
    weights = _weights(features, columns)
    x = torch.randn(1, columns, device="cuda", dtype=torch.bfloat16)
    update, scale = torch.randn(1, columns, device="cuda"), torch.ones_like(x[0])
    saved = gemv.features_per_program, gemv.warps
    for count in (1, 2, 4, 8, 16):
        cells = []
        for warps in (2, 4, 8, 16):
            gemv.features_per_program = lambda *_, count=count: count  # type: ignore[assignment]
            gemv.warps = lambda _, warps=warps: warps  # type: ignore[assignment]
            calls = [partial(gemv.add_norm_linear, x, update, scale, 1e-6, w, None) for w in weights]
            cells.append(f"{graph_us(calls):6.1f}")
        print(f"    {count:2d} features, warps 2 4 8 16: {' '.join(cells)}", flush=True)
    gemv.features_per_program, gemv.warps = saved


def main() -> None:
    for name, (features, columns) in PRODUCTS.items():
        print(f"{name} ({features} x {columns}): torch, Triton; seam apart, as one", flush=True)
        for rows in ROWS:
            print(f"  {rows} rows  {times(rows, features, columns)}", flush=True)
        if "--sweep" in sys.argv and features < 1 << 16:
            sweep(features, columns)


if __name__ == "__main__":
    main()
