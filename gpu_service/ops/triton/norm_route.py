"""A layer's seam, the router's product and the choice of experts in one launch, for few rows.

Programs compute logits as `gemv.py` does. The last one to be done with its own finds all of them and chooses:
each counts itself when its logits are written, and the counter is zero again when the kernel ends.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.triton.counters import stream_counters
from gpu_service.ops.triton.gemv import can_add_norm_linear, gemv_kernel, seam_launch
from gpu_service.ops.triton.jit import jit
from gpu_service.ops.triton.router import chosen_memory, route_arguments, route_row
from moebius.models.layers.router import RouterConfig


@jit
def norm_route_kernel(
    rows_ptr: tl.tensor, update_ptr: tl.tensor, norm_weight_ptr: tl.tensor, weight_ptr: tl.tensor,
    gate_bias_ptr: tl.tensor, total_ptr: tl.tensor, normed_ptr: tl.tensor, logits_ptr: tl.tensor,
    num_features: int, num_columns: int, rows_stride: int, update_stride: int, eps: float,
    bias_ptr: tl.tensor, valid_rows_ptr: tl.tensor, weights_ptr: tl.tensor, ids_ptr: tl.tensor,
    row_stride: int, num_groups: int, group_size: int, epsilon: float, scale: float, softcap: float,
    counter_ptr: tl.tensor, ROWS: tl.constexpr, ADDS: tl.constexpr, NORMS: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr, FEATURES: tl.constexpr, COLUMNS: tl.constexpr, SCORE: tl.constexpr,
    POST: tl.constexpr, CAPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_VALID_ROWS: tl.constexpr,
    LIMITS_GROUPS: tl.constexpr, SUM_OF_TWO: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_K: tl.constexpr, LOWEST: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """`gemv_kernel` into the logits, then `route_row` of every row by the last program."""
    gemv_kernel(
        rows_ptr, update_ptr, norm_weight_ptr, weight_ptr, gate_bias_ptr, total_ptr, normed_ptr, logits_ptr,
        num_features, num_columns, rows_stride, update_stride, eps, ROWS, ADDS, NORMS, HAS_GATE_BIAS,
        FEATURES, COLUMNS, OVERLAPS,
    )  # fmt: skip
    # All threads have written their logits before one of them counts the program.
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counter_ptr, 0)
        for token in tl.static_range(ROWS):
            route_row(
                token, logits_ptr, bias_ptr, valid_rows_ptr, weights_ptr, ids_ptr, row_stride, num_groups,
                group_size, epsilon, scale, softcap, SCORE, POST, CAPS, HAS_BIAS, HAS_VALID_ROWS,
                LIMITS_GROUPS, SUM_OF_TWO, TOP_GROUPS, TOP_K, BLOCK_GROUPS, BLOCK_EXPERTS, BLOCK_K, LOWEST,
            )  # fmt: skip


def can_add_norm_route(
    residual: torch.Tensor,
    update: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    config: RouterConfig,
    valid_rows: torch.Tensor | None = None,
) -> bool:
    """Whether the product is one of few rows, the choice one of `route_row`, and there is a counter."""
    return (
        config.score != "sparse_mixer"
        and can_add_norm_linear(residual, update, norm_weight, eps, weight, bias)
        and stream_counters(residual.device) is not None
    )


def add_norm_route(
    residual: torch.Tensor,
    update: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    config: RouterConfig,
    valid_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (total, normed, logits), launch = seam_launch(residual, update, norm_weight, eps, weight, bias)
    weights, ids = chosen_memory(logits, config)
    product = dict(launch.arguments)
    # Both parts have a bias and a stride of their own.
    product["gate_bias_ptr"], product["HAS_GATE_BIAS"] = product.pop("bias_ptr"), product.pop("HAS_BIAS")
    product["rows_stride"] = product.pop("row_stride")
    del product["output_ptr"]
    choice = route_arguments(logits, correction_bias, config, valid_rows, weights, ids)
    norm_route_kernel[launch.grid](
        **product, **choice, counter_ptr=stream_counters(residual.device), **launch.options
    )
    return total, normed, weights, ids
