"""From heads to latents and back. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2.

With c the latent of a token, W_k and W_v a head's projections: q · (W_k c) = (W_k^T q) · c, and
sum(p W_v c) = W_v sum(p c). So both projections can be applied to one query instead of to every key.
"""

from __future__ import annotations

import torch


def absorb_query(query_nope: torch.Tensor, key_weight: torch.Tensor) -> torch.Tensor:
    """`[T, H, nope_dim]` through `[H, nope_dim, latent_dim]`: `[T, H, latent_dim]`."""
    return torch.bmm(query_nope.transpose(0, 1), key_weight).transpose(0, 1)


def project_values(attended: torch.Tensor, value_weight: torch.Tensor) -> torch.Tensor:
    """`[T, H, latent_dim]` through `[H, value_dim, latent_dim]`: `[T, H, value_dim]`."""
    return torch.bmm(attended.transpose(0, 1), value_weight.transpose(1, 2)).transpose(0, 1)


def expand(
    latent: torch.Tensor, key_rope: torch.Tensor, weight: torch.Tensor, nope_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents `[T, latent_dim]` and rotated parts `[T, rope_dim]` written out for every head.

    weight `[H, nope_dim + value_dim, latent_dim]`, contiguous: each head's key rows, then its value rows.
    Returns keys `[T, H, nope_dim + rope_dim]` and values `[T, H, value_dim]`, both contiguous.
    """
    num_heads, rows, _ = weight.shape
    heads = (latent @ weight.flatten(0, 1).T).view(-1, num_heads, rows)
    shared = key_rope[:, None].expand(-1, num_heads, -1)
    return torch.cat((heads[..., :nope_dim], shared), dim=-1), heads[..., nope_dim:].contiguous()
