"""FlashInfer's top-k and top-p by radix search for the threshold, instead of a sort of the vocabulary."""

from __future__ import annotations

import torch
from flashinfer import sampling


def can_truncate(probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> bool:
    """Dense float32 rows."""
    return (
        probabilities.dtype == torch.float32 and probabilities.is_contiguous() and probabilities.numel() > 0
    )


def truncate_probabilities(
    probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """See `ops.sampling.truncate_probabilities`; all of equal probabilities at the threshold are kept.

    Only which tokens survive is taken from FlashInfer: its rescaled values depend on the order in which
    sums were taken, and a draw must not.
    """
    limit = torch.where(top_k > 0, top_k, probabilities.shape[1])
    survives = sampling.top_k_renorm_probs(probabilities, limit.int()) > 0.0
    kept = torch.where(survives, probabilities, 0.0)
    # A row of zeros (its logits were NaN) stays one.
    shares = kept / kept.sum(dim=-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
    survives = sampling.top_p_renorm_probs(shares, top_p.float(), is_deterministic=True) > 0.0
    survives |= (top_p.unsqueeze(1) >= 1.0) | (kept == kept.amax(dim=-1, keepdim=True))
    return torch.where(survives, kept, 0.0)
