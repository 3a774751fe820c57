"""The product of one gather, with or without sinks, by torch's fused kernels where there are any."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`softmax(scale * query key^T + mask) value`; a sink adds its exponential to the softmax's sum.

    query `[B, N, L, head_dim]`; key, value `[B, N, S, head_dim]`; mask of query's dtype, 0 or -inf,
    broadcastable to `[B, N, L, S]`, or None: causal from the first key on; sinks broadcastable to
    `[B, N, L]`, any float type. Returns `[B, N, L, head_dim]`.
    """
    if query.device.type == "cuda":
        # Of strided keys torch 2.11's memory-efficient kernel gives the last of 64 n + 1 rows wrongly.
        key, value = key.contiguous(), value.contiguous()
    if sinks is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale
        )
    fused = attend_with_lse if query.device.type == "cpu" else attend_with_lse_unfused
    output, lse = fused(query, key, value, mask, scale)
    # Of exp(lse) + exp(sink) the keys hold this share, and the sink's value is nothing.
    return output * torch.sigmoid(lse - sinks.float()).unsqueeze(-1).to(output.dtype)


def attend_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attend` computes without sinks, and float32 `[B, N, L]`: the scores' log-sum-exp. CPU only."""
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return output, lse


def attend_with_lse_unfused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on any device, with all scores in memory."""
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if mask is None:
        length, num_keys = scores.shape[-2:]
        mask = torch.full((length, num_keys), float("-inf"), device=query.device).triu_(1)
    scores = scores + mask
    return scores.softmax(-1).to(value.dtype) @ value, scores.logsumexp(-1)
