"""Measures of how far results are from a reference; all in float64, on whatever device they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; both of the same shape, any floating type.

    0 when both are zero, infinite when only what is wanted is, or where anything is NaN.
    """
    difference = float((found.double() - wanted.double()).norm())
    size = float(wanted.double().norm())
    if not math.isfinite(difference) or not math.isfinite(size):
        return math.inf
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / size


@dataclass(frozen=True)
class TokenScores:
    """Next-token distributions of some rows, ours against a reference's; filled by `score`."""

    kl: torch.Tensor  # float64 [L], nats
    same_top: torch.Tensor  # bool [L], whether both have the same most probable token
    # float64 [L], -log probability of the token that follows; NaN where none does.
    reference_loss: torch.Tensor
    loss: torch.Tensor

    @staticmethod
    def join(parts: list[TokenScores]) -> TokenScores:
        """Rows of several calls."""
        fields = ("kl", "same_top", "reference_loss", "loss")
        return TokenScores(*(torch.cat([getattr(part, name) for part in parts]) for name in fields))


def score(logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> TokenScores:
    """Float32 logits `[L, V]` of both; targets int64 `[L]`, -1 where no token follows.

    KL(P || Q) = sum over tokens of P (log P - log Q), P the reference's distribution and Q ours: what is lost
    when ours is taken for the reference's.
    """
    ours = logits.double().log_softmax(-1)
    theirs = reference.double().log_softmax(-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1).clamp(min=0.0)
    same = ours.argmax(-1) == theirs.argmax(-1)
    follows = targets >= 0
    index = targets.clamp(min=0).unsqueeze(1)
    losses = [
        torch.where(follows, -logs.gather(1, index).squeeze(1), torch.full_like(kl, math.nan))
        for logs in (theirs, ours)
    ]
    return TokenScores(kl.cpu(), same.cpu(), losses[0].cpu(), losses[1].cpu())


def perplexity(loss: torch.Tensor) -> float:
    """exp of the mean over tokens that follow another; infinite when it is too large for a float."""
    mean = float(loss[~loss.isnan()].mean())
    return math.exp(mean) if mean < 700 else math.inf
