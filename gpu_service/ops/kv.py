"""Writing into the paged KV cache."""

from __future__ import annotations

import torch

from gpu_service.ops.registry import Op


@Op
def append_kv(
    kv_slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store one row of keys and values per new token.

    kv_slots `[num_slots, 2 * num_kv_heads, head_dim]` is written in place; key and value
    `[T, num_kv_heads, head_dim]`; slot_mapping int64 `[T]`. Rows of padding go to slots of the dummy
    page, which may be hit more than once; all other slots are distinct.
    """
    # Joining the two first is cheaper than two writes into a strided half of each slot.
    kv_slots.index_copy_(0, slot_mapping, torch.cat((key, value), dim=1))
