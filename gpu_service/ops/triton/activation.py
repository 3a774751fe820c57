"""Gated activations: one reading of gate and up, one writing of their product."""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.triton.jit import jit

_BLOCK = 1024


@jit
def _silu(x: tl.tensor) -> tl.tensor:
    return x * tl.sigmoid(x)


@jit
def _gelu(x: tl.tensor) -> tl.tensor:
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@jit
def _gelu_tanh(x: tl.tensor) -> tl.tensor:
    # tanh(z) = 2 sigmoid(2z) - 1, so that 0.5 x (1 + tanh(z)) = x sigmoid(2z).
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@jit
def gated_kernel(
    gate_up_ptr: tl.tensor,
    output_ptr: tl.tensor,
    size: int,
    row_stride: int,
    alpha: float,
    limit: float,
    CLAMPED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (t, b) makes block b of row t of the contiguous `[T, size]` output.

    CLAMPED: gpt-oss' SwiGLU with `alpha` and `limit`, whatever ACTIVATION says.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    start = gate_up_ptr + row * row_stride + column
    gate = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + size, mask=mask, other=0.0).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        product = gate * tl.sigmoid(alpha * gate) * up
    else:
        product = ACTIVATION(gate) * up
    tl.store(output_ptr + row * size + column, product.to(output_ptr.dtype.element_ty), mask=mask)


def _gated(
    gate_up: torch.Tensor, activation: object, clamp: tuple[float, float] | None = None
) -> torch.Tensor:
    """`clamp`: alpha and limit of gpt-oss' SwiGLU."""
    alpha, limit = clamp or (1.0, 0.0)
    width = gate_up.shape[-1]
    size = width // 2
    rows = gate_up.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    output = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    if output.numel():
        grid = (rows.shape[0], -(-size // _BLOCK))
        gated_kernel[grid](
            rows, output, size, rows.stride(0), float(alpha), float(limit), CLAMPED=clamp is not None,
            ACTIVATION=activation, BLOCK=_BLOCK,
        )  # fmt: skip
    return output


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _gated(gate_up, _silu)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _gated(gate_up, _gelu)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _gated(gate_up, _gelu_tanh)


def clamped_swiglu_and_mul(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return _gated(gate_up, _silu, (alpha, limit))
