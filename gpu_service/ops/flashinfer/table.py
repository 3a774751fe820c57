"""What FlashInfer offers, and within which limits (16-bit types, aligned rows, some head sizes).

Its functions are compiled for the device at first use, which takes a CUDA compiler and up to minutes; so
`prepare` is called, and each function once, before the service is ready. GELU is left to Triton, because no
family has it and it would be compiled for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from flashinfer import activation, norm
from flashinfer.jit.activation import gen_act_and_mul_module
from flashinfer.jit.norm import gen_norm_module
from flashinfer.jit.sampling import gen_sampling_module

from gpu_service.ops.flashinfer.kv import append_kv, can_append_kv
from gpu_service.ops.flashinfer.rope import apply_rope, can_apply_rope, rope_table
from gpu_service.ops.flashinfer.sampling import can_truncate, truncate_probabilities
from gpu_service.ops.implementation import Implementation

_HALVES = (torch.float16, torch.bfloat16)
# Elements of 16 bits in one aligned access.
_VECTOR = 8


def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.norm.rms_norm`; rounded once, after the weight."""
    # `out` is given because FlashInfer's own keeps the input's gaps between rows.
    output = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    norm.rmsnorm(hidden_states, weight, eps, out=output)
    return output


def can_rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    """Rows, or heads in rows."""
    return (
        hidden_states.dtype in _HALVES
        and weight.dtype == hidden_states.dtype
        and hidden_states.dim() in (2, 3)
        and hidden_states.numel() > 0
        and hidden_states.stride(-1) == 1
        and all(stride % _VECTOR == 0 for stride in hidden_states.stride()[:-1])
        and hidden_states.shape[-1] % _VECTOR == 0
    )


def fused_add_rms_norm(
    update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `ops.norm.fused_add_rms_norm`; the norm is taken of the sum before it is rounded."""
    norm.fused_add_rmsnorm(update, residual, weight, eps)
    return update


def can_fused_add_rms_norm(
    update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> bool:
    """Both as for the norm alone, and of one dtype."""
    return (
        update.dtype == residual.dtype
        and update.dim() == 2
        and can_rms_norm(update, weight, eps)
        and can_rms_norm(residual, weight, eps)
    )


def can_gated(gate_up: torch.Tensor) -> bool:
    """Dense rows whose halves are both aligned."""
    return (
        gate_up.dtype in _HALVES
        and gate_up.numel() > 0
        and gate_up.is_contiguous()
        and gate_up.shape[-1] % (2 * _VECTOR) == 0
    )


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.activation.silu_and_mul`."""
    output: torch.Tensor = activation.silu_and_mul(gate_up)
    return output


def prepare() -> None:
    """Compiles side by side what the chosen ops need; one after the other would take the sum of the times.

    What was compiled before is only checked. Raises what FlashInfer raises without a CUDA compiler.
    """
    specs = [gen_act_and_mul_module("silu"), gen_sampling_module()]
    # With its Python compiler installed the norms come from there, each in a second.
    if getattr(norm, "_USE_CUDA_NORM", True):
        specs.append(gen_norm_module())
    compile_modules(specs)


def compile_modules(specs: Sequence[Any]) -> None:
    """Builds FlashInfer's modules (`JitSpec`s) side by side, each in its own directory, as loading it does.

    FlashInfer's joint build (`build_jit_specs`) keeps a ninja log of its own: either build then finds the
    other's outputs stale, and every start compiles everything twice.
    """
    with ThreadPoolExecutor(len(specs), "flashinfer-jit") as pool:
        for built in [pool.submit(spec.build, verbose=False) for spec in specs]:
            built.result()


IMPLEMENTATIONS = {
    "rms_norm": Implementation(rms_norm, can_rms_norm),
    "fused_add_rms_norm": Implementation(fused_add_rms_norm, can_fused_add_rms_norm),
    "rope_table": Implementation(rope_table),
    "apply_rope": Implementation(apply_rope, can_apply_rope),
    "silu_and_mul": Implementation(silu_and_mul, can_gated),
    "append_kv": Implementation(append_kv, can_append_kv),
    "truncate_probabilities": Implementation(truncate_probabilities, can_truncate),
}
