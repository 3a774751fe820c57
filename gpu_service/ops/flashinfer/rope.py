"""FlashInfer's rotary embedding: it reads one float32 table of cosines and sines, by a row for each token."""

from __future__ import annotations

import torch
from flashinfer import rope as flashinfer_rope

from gpu_service.ops import rope
from gpu_service.ops.rope import RopeTable

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
    """See `ops.rope.rope_table`; with the float32 table that FlashInfer reads beside the usual one."""
    table = rope.rope_table.reference(positions, frequencies, dtype, interleaved, attention_factor)
    angles = rope.pair_positions(positions).float() * frequencies
    rows = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
    return table._replace(cos_sin=cos_sin, rows=rows)


def can_apply_rope(heads: torch.Tensor, table: RopeTable) -> bool:
    """At least two heads: FlashInfer wants queries and keys, and neither may be empty."""
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
    """See `ops.rope.apply_rope`; factors in float32."""
    flashinfer_rope.apply_rope_with_cos_sin_cache_inplace(
        positions=table.rows,
        query=heads[:, :-1],
        key=heads[:, -1:],
        head_size=heads.shape[2],
        cos_sin_cache=table.cos_sin,
        is_neox=not table.interleaved,
    )
    return heads
