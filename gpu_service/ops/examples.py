"""Small arguments for every op: what a backend is tried with before it is trusted, and tests compare on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu_service.model_config import RouterConfig
from gpu_service.ops.rope import RopeTable, rope_table
from gpu_service.ops.rope_frequencies import inverse_frequencies
from gpu_service.ops.sequences import Sequences, make_sequences

_TOKENS, _QUERIES, _KEYS, _HEAD_DIM = 3, 4, 2, 64
# A model's width, because libraries compile another kernel for a narrow one.
_WIDTH = 2048


def _random(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def _frequencies(device: torch.device) -> torch.Tensor:
    return inverse_frequencies(1e4, _HEAD_DIM, "default", {}).to(device)


def _table(device: torch.device, dtype: torch.dtype) -> RopeTable:
    """Made by the op itself, because a backend may need its own kind of table."""
    return rope_table(torch.arange(_TOKENS, device=device), _frequencies(device), dtype, False)


def _norm(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    rows = _random(_TOKENS, _WIDTH, device=device, dtype=dtype)
    return rows, _random(_WIDTH, device=device, dtype=dtype), 1e-6


def _fused_add(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    rows, weight, eps = _norm(device, dtype)
    return rows, rows.flip(0).contiguous(), weight, eps


def _rope_table(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    return torch.arange(_TOKENS, device=device) * 1001, _frequencies(device), dtype, False


def _heads(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    fused = _random(_TOKENS, _QUERIES + 2 * _KEYS, _HEAD_DIM, device=device, dtype=dtype)
    return fused[:, : _QUERIES + _KEYS]


def _apply_rope(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    return _heads(device, dtype), _table(device, dtype)


def _qk_norm_rope(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    weight = _random(_HEAD_DIM, device=device, dtype=dtype)
    return _heads(device, dtype), weight, weight.flip(0).contiguous(), 1e-6, _QUERIES, _table(device, dtype)


def _gate_up(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    return (_random(_TOKENS, 256, device=device, dtype=dtype),)


def _append_kv(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    slots = torch.zeros(8, 2 * _KEYS, _HEAD_DIM, device=device, dtype=dtype)
    rows = _random(_TOKENS, 2 * _KEYS, _HEAD_DIM, device=device, dtype=dtype)
    return slots, rows[:, :_KEYS], rows[:, _KEYS:], torch.tensor([5, 0, 3], device=device)


def _slots(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Read and written by each token: the first two start from zeros."""
    return torch.tensor([0, 0, 2], device=device), torch.tensor([1, 3, 4], device=device)


def _sequences(device: torch.device) -> Sequences:
    """One token, then a chunk and a part of one, then less than a convolution remembers."""
    starts = [0, 1, 70, 72]
    return make_sequences(starts, torch.tensor(starts, dtype=torch.int32, device=device))


def _conv_update(device: torch.device, dtype: torch.dtype, tokens: int = _TOKENS) -> tuple[Any, ...]:
    rows = _random(tokens, 400, device=device, dtype=dtype)[:, :300]
    states = _random(5, 3, 300, device=device, dtype=dtype)
    return rows, states, _random(300, 4, device=device, dtype=dtype), *_slots(device)


def _conv_extend(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    sequences = _sequences(device)
    return *_conv_update(device, dtype, sequences.neighbours[-1].rows.stop), sequences


def _delta_update(device: torch.device, dtype: torch.dtype, tokens: int = _TOKENS) -> tuple[Any, ...]:
    """Two key heads and four value heads."""
    qkv = _random(tokens, 2 * 2 * 16 + 4 * _HEAD_DIM, device=device, dtype=dtype)
    a, b = _random(tokens, 8, device=device, dtype=dtype).chunk(2, dim=1)
    a_log, dt_bias = _random(2, 4, device=device, dtype=torch.float32)
    states = _random(5, 4, 16, _HEAD_DIM, device=device, dtype=torch.float32)
    return qkv, a, b, a_log, dt_bias, states, *_slots(device)


def _delta_extend(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    sequences = _sequences(device)
    return *_delta_update(device, dtype, sequences.neighbours[-1].rows.stop), sequences


def _gated_norm(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    values = _random(_TOKENS, 4, _HEAD_DIM, device=device, dtype=dtype)
    gate = _random(_TOKENS, 5 * _HEAD_DIM, device=device, dtype=dtype)[:, _HEAD_DIM:]
    return values, gate, _random(_HEAD_DIM, device=device, dtype=dtype), 1e-6


def _route(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    logits = _random(_TOKENS, 16, device=device, dtype=dtype)
    bias = _random(16, device=device, dtype=torch.float32)
    return logits, bias, RouterConfig(16, 3, "sigmoid", True, 4, 2, post="renormalize", scale=2.5)


def _fp8_linear(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """Columns that begin and end inside of groups."""
    rows = _random(_TOKENS, 200, device=device, dtype=dtype)
    weight = _random(72, 200, device=device, dtype=torch.float32).to(torch.float8_e4m3fn)
    scales = _random(72, 3, device=device, dtype=torch.float32).abs()
    return rows, weight, scales, 88, _random(72, device=device, dtype=dtype)


def _logits(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    return (_random(_TOKENS, 5000, device=device, dtype=torch.float32),)


def _truncate(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    probabilities = _random(_TOKENS, 5000, device=device, dtype=torch.float32).softmax(dim=-1)
    top_k = torch.tensor([0, 50, 7], device=device)
    top_p = torch.tensor([0.5, 1.0, 0.9], device=device, dtype=torch.float64)
    return probabilities, top_k, top_p


# Op name -> its arguments on a device, for activations of a dtype. Those of an op that writes are fresh.
EXAMPLES: dict[str, Callable[[torch.device, torch.dtype], tuple[Any, ...]]] = {
    "rms_norm": _norm,
    "fused_add_rms_norm": _fused_add,
    "rope_table": _rope_table,
    "apply_rope": _apply_rope,
    "qk_norm_rope": _qk_norm_rope,
    "silu_and_mul": _gate_up,
    "gelu_and_mul": _gate_up,
    "gelu_tanh_and_mul": _gate_up,
    "append_kv": _append_kv,
    "causal_conv_update": _conv_update,
    "causal_conv_extend": _conv_extend,
    "gated_delta_update": _delta_update,
    "gated_delta_extend": _delta_extend,
    "gated_rms_norm": _gated_norm,
    "route": _route,
    "fp8_linear": _fp8_linear,
    "argmax_and_finite": _logits,
    "truncate_probabilities": _truncate,
}
