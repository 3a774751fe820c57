"""FlashInfer's cache write. It knows pages of requests, so slots are told to it as pages of one token."""

from __future__ import annotations

import torch
from flashinfer import page


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
    """See `ops.kv.append_kv`: one request, whose t-th page of one token is the t-th slot."""
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
        # [0, tokens] and [1], without a copy from the host: those can not be captured in a graph.
        kv_indptr=torch.arange(2, dtype=torch.int32, device=device) * tokens,
        kv_last_page_len=torch.ones(1, dtype=torch.int32, device=device),
        kv_layout="NHD",
    )
