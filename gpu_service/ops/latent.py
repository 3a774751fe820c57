"""The way of queries into the space of latents and of what they attend to back, head by head.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2. With c the latent of a token, W_k and W_v a head's
projections: q · (W_k c) = (W_k^T q) · c, and sum(p W_v c) = W_v sum(p c). So both projections can be applied
to one query instead of to every key ("absorbed").
"""

from __future__ import annotations

import torch

from gpu_service.ops.linear import widened
from gpu_service.ops.registry import Op


@Op
def absorb_query(query_nope: torch.Tensor, key_weight: torch.Tensor) -> torch.Tensor:
    """Returns `[T, H, nope_dim]` through `[H, nope_dim, latent_dim]`: `[T, H, latent_dim]`."""
    query, weight = widened(query_nope, key_weight)
    return torch.bmm(query.transpose(0, 1), weight).transpose(0, 1).to(query_nope.dtype)


@Op
def project_values(attended: torch.Tensor, value_weight: torch.Tensor) -> torch.Tensor:
    """Returns `[T, H, latent_dim]` through `[H, value_dim, latent_dim]`: `[T, H, value_dim]`."""
    latents, weight = widened(attended, value_weight)
    return torch.bmm(latents.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).to(attended.dtype)
