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
    latent: torch.Tensor, key_rope: torch.Tensor, key_weight: torch.Tensor, value_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents `[T, latent_dim]` and rotated parts `[T, rope_dim]` written out for every head.

    Returns keys `[T, H, nope_dim + rope_dim]` and values `[T, H, value_dim]`.
    """
    num_heads, nope_dim, latent_dim = key_weight.shape
    keys = latent @ key_weight.view(-1, latent_dim).T
    values = latent @ value_weight.view(-1, latent_dim).T
    shared = key_rope[:, None].expand(-1, num_heads, -1)
    return torch.cat((keys.view(-1, num_heads, nope_dim), shared), dim=-1), values.view(
        len(latent), num_heads, -1
    )
