"""Rotary position embedding (Su et al. 2021): tables for one step, rotation.

mRoPE gives each pair one of a token's three positions (time, height, width). Sources: Qwen2-VL
(arXiv:2409.12191) for sections that follow one another, Qwen3-VL for alternating ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpu_service.ops.norm import rms_norm
from gpu_service.ops.registry import Op
from moebius.models.layers.rope import NUM_AXES


class RopeTable(NamedTuple):
    """Factors for the rows of one step, shared by all layers; made by `rope_table`."""

    cos: torch.Tensor  # [T, 1, rotary_dim], each angle at both elements of its pair
    sin: torch.Tensor  # [T, 1, rotary_dim], negative at the first element of each pair
    interleaved: bool
    # Only where FlashInfer rotates: float32 [T, rotary_dim], cosines of all pairs, then their sines; and
    # int32 [T], the row of each token in it.
    cos_sin: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    # [T, 1, 1], what queries are multiplied by, rotated or not; None: nothing.
    query_scale: torch.Tensor | None = None


def pair_positions(positions: torch.Tensor) -> torch.Tensor:
    """Returns a view `[T, num_pairs or 1]` of positions as `rope_table` takes them."""
    return positions[:, None] if positions.dim() == 1 else positions


@Op
def rope_table(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    dtype: torch.dtype,
    interleaved: bool,
    attention_factor: float = 1.0,
) -> RopeTable:
    """Returns the table for int64 positions; angles in float32, stored in the activations' dtype.

    positions `[T]`, or `[T, num_pairs]` (any strides) where a token's pairs differ in theirs (mRoPE).
    `attention_factor` multiplies cosines and sines, and with them rotated queries and keys (YaRN).
    """
    angles = pair_positions(positions)[:, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    if interleaved:
        cos = cos.repeat_interleave(2, dim=-1)
        sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
    else:
        cos = torch.cat((cos, cos), dim=-1)
        sin = torch.cat((-sin, sin), dim=-1)
    return RopeTable(cos.to(dtype), sin.to(dtype), interleaved)


def query_scales(positions: torch.Tensor, growth: float, length: float, dtype: torch.dtype) -> torch.Tensor:
    """Computes `1 + growth * ln(1 + floor(p / length))` of int64 positions `[T]`, `[T, 1, 1]` in `dtype`.

    Scalable softmax in steps, as Llama 4 has it (Nakanishi 2025, arXiv:2501.19399): attention over more
    tokens stays as sharp.
    """
    steps = (positions.float() / length).floor_()
    return (1.0 + growth * steps.log1p_())[:, None, None].to(dtype)


def learned_query_scales(
    positions: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`scale * ln(p + 1) + bias` of int64 positions `[T]` and learned `[H]`: `[T, H, 1]` in `dtype`.

    Scalable softmax (Nakanishi 2025, arXiv:2501.19399), by head.
    """
    grown = (positions + 1).float().log_()
    return torch.addcmul(bias.float(), grown[:, None], scale.float())[..., None].to(dtype)


@Op
def apply_rope(heads: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """Rotate the first `rotary_dim` elements of every head in place.

    heads `[T, num_heads, head_dim]` (any strides). Returns the same tensor. With (a, b) the elements of
    a pair: a' = a cos - b sin, b' = b cos + a sin; the table's signs turn that into two multiplications.
    """
    cos, sin, interleaved = table.cos, table.sin, table.interleaved
    rotary_dim = cos.shape[-1]
    rotated = heads if rotary_dim == heads.shape[-1] else heads[..., :rotary_dim]
    if interleaved:
        partner = rotated.reshape(*rotated.shape[:-1], rotary_dim // 2, 2).flip(-1).flatten(-2)
    else:
        partner = rotated.roll(rotary_dim // 2, dims=-1)
    rotated.mul_(cos).addcmul_(partner, sin)
    return heads


@Op
def qk_norm_rope(
    heads: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    num_heads: int,
    table: RopeTable,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `apply_rope(rms_norm(...))` of the queries and the keys that one GEMM made side by side.

    heads `[T, num_heads + num_kv_heads, head_dim]` (any strides over the first two), queries first; it
    may be overwritten. q_weight, k_weight `[head_dim]`. Returns queries `[T, num_heads, head_dim]` and
    keys `[T, num_kv_heads, head_dim]`.
    """
    query = apply_rope.reference(rms_norm.reference(heads[:, :num_heads], q_weight, eps), table)
    key = apply_rope.reference(rms_norm.reference(heads[:, num_heads:], k_weight, eps), table)
    return query, key


class Unrotated(NamedTuple):
    """Queries and keys of one layer before norm and rotation; the first arguments of `qk_norm_rope`."""

    heads: torch.Tensor  # [T, num_heads + num_kv_heads, head_dim]
    q_weight: torch.Tensor | None  # [head_dim]; None: there is no norm.
    k_weight: torch.Tensor | None
    eps: float
    num_heads: int
    table: RopeTable


def half_split(table: RopeTable) -> RopeTable:
    """Returns the same angles with element j paired with j + rotary_dim / 2; a table of such pairs comes back
    as is.

    No copy of FlashInfer's factors: those are by pair, wherever its elements lie.
    """
    if not table.interleaved:
        return table
    cos, sin = table.cos[..., ::2], table.sin[..., 1::2]
    return table._replace(
        cos=torch.cat((cos, cos), dim=-1), sin=torch.cat((-sin, sin), dim=-1), interleaved=False
    )


# Time, height, width.


def section_axes(sections: tuple[int, ...], interleaved: bool, time_last: bool = False) -> torch.Tensor:
    """The axis of each pair, int64 `[num_pairs]` on the CPU; `sections` are the axes' numbers of pairs.

    Interleaved, pair j turns by axis j % 3 while that axis still has pairs (one in three), then by time.
    `time_last`: pairs of height and width, as many of either, alternate, then come those of time.
    Raises ValueError unless there are three sections.
    """
    if len(sections) != NUM_AXES:
        raise ValueError(f"{len(sections)} sections {sections}; mRoPE has {NUM_AXES}")
    axes = torch.arange(NUM_AXES, device="cpu")
    sizes = torch.tensor(sections, device="cpu")
    if time_last:
        time, height, _ = sections
        return torch.tensor([1, 2] * height + [0] * time, device="cpu")
    if not interleaved:
        return axes.repeat_interleave(sizes)
    pairs = torch.arange(sum(sections), device="cpu")
    turn = pairs % NUM_AXES
    return torch.where(pairs < NUM_AXES * sizes[turn], turn, 0)
