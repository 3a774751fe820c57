"""Writing into the paged KV cache."""

from __future__ import annotations

import torch

from gpu_service.ops.norm import rms_norm
from gpu_service.ops.registry import Op
from gpu_service.ops.rope import RopeTable, apply_rope, qk_norm_rope

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@Op
def append_kv(
    kv_slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Store one row of keys and values per new token.

    kv_slots `[num_slots, 2 * num_kv_heads, head_dim]` is written in place; key and value
    `[T, num_kv_heads, head_dim]`; slot_mapping int64 `[T]`. Rows of padding go to slots of the dummy
    page, which may be hit more than once; all other slots are distinct.

    Slots of another dtype (float8_e4m3fn) hold `key / key_scale` and `value / value_scale`, clipped to
    what the dtype can hold, infinite ones as NaN: an overflow stays to be seen. Slots of the rows' own dtype
    take them as they are.
    """
    # Joining the two first is cheaper than two writes into a strided half of each slot.
    if kv_slots.dtype == key.dtype:
        kv_slots.index_copy_(0, slot_mapping, torch.cat((key, value), dim=1))
        return
    rows = torch.cat((key.float() / key_scale, value.float() / value_scale), dim=1)
    rows = rows.masked_fill_(rows.isinf(), torch.nan).clamp_(-FP8_MAX, FP8_MAX).to(kv_slots.dtype)
    # Torch moves bytes of these types, but has no indexed copy of them.
    kv_slots.view(torch.uint8).index_copy_(0, slot_mapping, rows.view(torch.uint8))


@Op
def rotate_and_append(
    heads: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    num_heads: int,
    table: RopeTable,
    value: torch.Tensor,
    kv_slots: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `qk_norm_rope`, or `apply_rope` where there are no weights, then `append_kv` of the keys and
    `value`.

    Shapes as there. heads may be overwritten. Returns queries and keys.
    """
    if q_weight is None or k_weight is None:
        rotated = apply_rope(heads, table)
        query, key = rotated[:, :num_heads], rotated[:, num_heads:]
    else:
        query, key = qk_norm_rope(heads, q_weight, k_weight, eps, num_heads, table)
    append_kv(kv_slots, key, value, slot_mapping, key_scale, value_scale)
    return query, key


@Op
def pool_index_keys(
    slots: torch.Tensor,
    offsets: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    page_size: int,
) -> None:
    """Where a new token is the last of its pool, its key becomes the pool's, in place.

    slots `[num_slots, 2 * D]`: of each token a key, then the logits of its weight in a pool, one for each
    element; those of the new tokens are stored already. offsets float32 `[pool, D]`, added to the logits by
    a token's place. The key of a pool is the sum of its tokens' keys, weighed by the softmax of the logits
    over the tokens. A key that was replaced is read by no other pool, so that a step may be run again.
    positions, slot_mapping int64 `[T]`,
    block_table int32 `[R, pages]`, query_starts int32 `[R + 1]` as in `ForwardInputs`.
    """
    pool, size = offsets.shape
    rows = torch.nonzero((positions + 1) % pool == 0)[:, 0]
    requests = torch.searchsorted(query_starts[1:], rows.to(query_starts.dtype), right=True)
    tokens = positions[rows, None] - torch.arange(pool - 1, -1, -1, device=positions.device)
    pages = block_table[requests].gather(1, tokens // page_size).long()
    gathered = slots[pages * page_size + tokens % page_size].float()
    weights = (gathered[..., size:] + offsets).softmax(1)
    slots[slot_mapping[rows], :size] = (weights * gathered[..., :size]).sum(1).to(slots.dtype)


@Op
def mean_index_keys(
    slots: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    pool: int,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    page_size: int,
) -> None:
    """Where a new token is the last of its pool, its key becomes the pool's, in place.

    slots `[num_slots, D + R]`: of each token a key as it was projected, then the cosines of the R / 2 pairs
    that it would be rotated by, then their sines; those of the new tokens are stored already. The key of a
    pool is the mean of its tokens' keys, then its RMS norm with weight `[D]`, then that rotated as the
    pool's first token is (element j pairs with j + R / 2). A key that was replaced is read by no other pool,
    so that a step may be run again. The rest as in `pool_index_keys`; nothing is asked of the host.
    """
    size = weight.shape[0]
    pairs = (slots.shape[1] - size) // 2
    rows = torch.arange(positions.shape[0], device=positions.device)
    requests = torch.searchsorted(query_starts[1:], rows.to(query_starts.dtype), right=True)
    tokens = (positions[:, None] - torch.arange(pool - 1, -1, -1, device=positions.device)).clamp_(min=0)
    # Rows that only pad belong to no request.
    tables = block_table[requests.clamp_(max=block_table.shape[0] - 1)]
    gathered = slots[tables.gather(1, tokens // page_size).long() * page_size + tokens % page_size]
    mean = gathered[..., :size].float().mean(1).to(slots.dtype)
    key = rms_norm.reference(mean, weight, eps)
    cos, sin = gathered[:, 0, size : size + pairs], gathered[:, 0, size + pairs :]
    first, second, rest = key[:, :pairs], key[:, pairs : 2 * pairs], key[:, 2 * pairs :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    is_last = (positions + 1) % pool == 0
    slots[slot_mapping, :size] = torch.where(is_last[:, None], rotated, slots[slot_mapping, :size])
