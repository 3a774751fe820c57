"""What FlashInfer offers, and within which limits (16-bit types, aligned rows, some head sizes).

Its functions are compiled for the device at first use, which takes a CUDA compiler and up to minutes; so
`prepare` is called, and each function once, before the service is ready. GELU is left to Triton, because no
family has it and it would be compiled for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Thread, get_native_id
from typing import Any

import structlog
import torch
from flashinfer import activation, norm, page, sampling
from flashinfer import rope as flashinfer_rope
from flashinfer.jit.activation import gen_act_and_mul_module
from flashinfer.jit.norm import gen_norm_module
from flashinfer.jit.sampling import gen_sampling_module

from gpu_service.ops import rope
from gpu_service.ops.registry import Implementation
from gpu_service.ops.rope import RopeTable
from moebius.errors import brief
from moebius.process.progress import counted

_log = structlog.get_logger(__name__)

# A core that a compiler and a kernel's thread share belongs to the thread for 97 % of the time.
COMPILER_NICENESS = 15


def can_append_kv(
    kv_slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> bool:
    """It copies and does not convert; slots are counted in 32 bits."""
    return (
        kv_slots.dtype == key.dtype == value.dtype
        and key.dtype in (torch.float16, torch.bfloat16)
        and key.shape[0] > 0
        and key.shape[2] in (64, 128, 256)
        and key.stride(2) == value.stride(2) == 1
        and kv_slots.shape[0] < 2**31
    )


def append_kv(
    kv_slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Computes `ops.kv.append_kv`; one request, whose t-th page of one token is the t-th slot."""
    tokens, num_heads, _ = key.shape
    device = key.device
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    pages = kv_slots.unsqueeze(1)
    page.append_paged_kv_cache(
        append_key=key,
        append_value=value,
        batch_indices=torch.zeros_like(positions),
        positions=positions,
        paged_kv_cache=(pages[:, :, :num_heads], pages[:, :, num_heads:]),
        kv_indices=slot_mapping.int(),
        # [0, tokens] and [1], without a copy from the host: those cannot be captured in a graph.
        kv_indptr=torch.arange(2, dtype=torch.int32, device=device) * tokens,
        kv_last_page_len=torch.ones(1, dtype=torch.int32, device=device),
        kv_layout="NHD",
    )


_HEAD_DIMS = (64, 128, 256, 512)
# Pairs that one thread rotates must all be rotated ones.
_PAIRS = 8


def rope_table(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    dtype: torch.dtype,
    interleaved: bool,
    attention_factor: float = 1.0,
) -> RopeTable:
    """Computes `ops.rope.rope_table`; with the float32 table that FlashInfer reads next to the usual one."""
    table = rope.rope_table.reference(positions, frequencies, dtype, interleaved, attention_factor)
    angles = rope.pair_positions(positions).float() * frequencies
    rows = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
    return table._replace(cos_sin=cos_sin, rows=rows)


def can_apply_rope(heads: torch.Tensor, table: RopeTable) -> bool:
    """Returns whether there are at least two heads: FlashInfer wants queries and keys, and neither may be
    empty.
    """
    return (
        table.cos_sin is not None
        and heads.dtype in (torch.float16, torch.bfloat16)
        and heads.shape[0] > 0
        and heads.shape[1] >= 2
        and heads.shape[2] in _HEAD_DIMS
        and heads.stride(2) == 1
        and heads.stride(0) % _PAIRS == 0
        and heads.stride(1) % _PAIRS == 0
        and table.cos_sin.shape[1] % (2 * _PAIRS) == 0
    )


def apply_rope(heads: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """Computes `ops.rope.apply_rope`; factors in float32."""
    flashinfer_rope.apply_rope_with_cos_sin_cache_inplace(
        positions=table.rows,
        query=heads[:, :-1],
        key=heads[:, -1:],
        head_size=heads.shape[2],
        cos_sin_cache=table.cos_sin,
        is_neox=not table.interleaved,
    )
    return heads


def can_truncate(probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> bool:
    """Returns whether the rows are dense float32."""
    return (
        probabilities.dtype == torch.float32 and probabilities.is_contiguous() and probabilities.numel() > 0
    )


def truncate_probabilities(
    probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Computes `ops.sampling.truncate_probabilities`; all of equal probabilities at the threshold are kept.

    Only which tokens survive is taken from FlashInfer: its rescaled values depend on the order in which
    sums were taken, and a draw must not.
    """
    limit = torch.where(top_k > 0, top_k, probabilities.shape[1])
    survives = sampling.top_k_renorm_probs(probabilities, limit.int()) > 0.0
    kept = torch.where(survives, probabilities, 0.0)
    # A row of zeros (its logits were NaN) stays one.
    shares = kept / kept.sum(dim=-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
    survives = sampling.top_p_renorm_probs(shares, top_p.float(), is_deterministic=True) > 0.0
    survives |= (top_p.unsqueeze(1) >= 1.0) | (kept == kept.amax(dim=-1, keepdim=True))
    return torch.where(survives, kept, 0.0)


_HALVES = (torch.float16, torch.bfloat16)
# Elements of 16 bits in one aligned access.
_VECTOR = 8


def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes `ops.norm.rms_norm`; rounded once, after the weight."""
    # `out` is given because FlashInfer's own keeps the input's gaps between rows.
    output = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    norm.rmsnorm(hidden_states, weight, eps, out=output)
    return output


def can_rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    """Returns whether rows, or heads in rows, are of 16 bits and aligned to vectors."""
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
    """Computes `ops.norm.fused_add_rms_norm`; the norm is taken of the sum before it is rounded."""
    norm.fused_add_rmsnorm(update, residual, weight, eps)
    return update


def can_fused_add_rms_norm(
    update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> bool:
    """Whether `rms_norm` could take both, and they have one dtype."""
    return (
        update.dtype == residual.dtype
        and update.dim() == 2
        and can_rms_norm(update, weight, eps)
        and can_rms_norm(residual, weight, eps)
    )


def can_gated(gate_up: torch.Tensor) -> bool:
    """Returns whether rows are dense and both their halves aligned to vectors."""
    return (
        gate_up.dtype in _HALVES
        and gate_up.numel() > 0
        and gate_up.is_contiguous()
        and gate_up.shape[-1] % (2 * _VECTOR) == 0
    )


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = activation.silu_and_mul(gate_up)
    return output


def prepare(attention: Sequence[Any] = ()) -> None:
    """Compiles side by side what the chosen ops need; one after the other would take the sum of the times.

    Modules of `attention` are compiled meanwhile and go on in the background, while weights are loaded: who
    needs one before it is there waits for it in FlashInfer's own lock. What was compiled before is only
    checked. Raises what FlashInfer raises without a CUDA compiler.
    """
    if attention:
        Thread(target=_compile_ahead, args=(attention,), name="flashinfer-attention", daemon=True).start()
    specs = [gen_act_and_mul_module("silu"), gen_sampling_module()]
    # With its Python compiler installed the norms come from there, each in a second.
    if getattr(norm, "_USE_CUDA_NORM", True):
        specs.append(gen_norm_module())
    compile_modules(specs)


def _compile_ahead(specs: Sequence[Any]) -> None:
    try:
        compile_modules(specs, "compiling attention kernels")
    # What a compiler raises is raised again, where attention is tried out, and decides there.
    except Exception as error:
        _log.warning("attention kernels could not be compiled ahead", error=brief(error))


def compile_modules(specs: Sequence[Any], what: str = "compiling FlashInfer modules") -> None:
    """Builds FlashInfer's modules (`JitSpec`s) side by side, each in its own directory, as loading it does.

    FlashInfer's joint build (`build_jit_specs`) keeps a ninja log of its own: either build then finds the
    other's outputs stale, and every start compiles everything twice. A module that is installed as built (the
    package flashinfer-jit-cache) is left out.

    Compilers run at a low priority: expert servers choose their kernels by measuring them meanwhile.
    """
    missing = [spec for spec in specs if not spec.is_aot]
    if not missing:
        return
    with ThreadPoolExecutor(len(missing), "flashinfer-jit", initializer=_lower_priority) as pool:
        building = [pool.submit(spec.build, verbose=False) for spec in missing]
        for built in counted(as_completed(building), what, len(missing)):
            built.result()


def _lower_priority() -> None:
    """Lowers the priority of this thread alone, as Linux has it, and of the processes that it starts from now
    on.
    """
    thread = get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(COMPILER_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


IMPLEMENTATIONS = {
    "rms_norm": Implementation(rms_norm, can_rms_norm),
    "fused_add_rms_norm": Implementation(fused_add_rms_norm, can_fused_add_rms_norm),
    "rope_table": Implementation(rope_table),
    "apply_rope": Implementation(apply_rope, can_apply_rope),
    "silu_and_mul": Implementation(silu_and_mul, can_gated),
    "append_kv": Implementation(append_kv, can_append_kv),
    "truncate_probabilities": Implementation(truncate_probabilities, can_truncate),
}
