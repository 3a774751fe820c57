"""How far results are from a reference, and how far experts may be: the one table of these tolerances.

Errors are computed in float64, on whatever device the results are. Tolerances are relative errors of an
expert's output as `relative_error` measures them. What is loaded wrongly (another expert, another slice, a
scale of the wrong group) has an error near or above 1; docs/verify.md says where the numbers come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch

from gpu_service.device import dtype_name
from moebius.experts.slices import REQUANTISED, ExpertDtype
from moebius.kernels.weight_formats import split_gate_up, weight_format
from moebius.models.expert_checkpoint import ExpertMatrices


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns norm of the difference over the norm of what is wanted; both of the same shape, any floating
    type.

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
        """One record of the rows of several calls of `score`."""
        fields = ("kl", "same_top", "reference_loss", "loss")
        return TokenScores(*(torch.cat([getattr(part, name) for part in parts]) for name in fields))


def score(logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> TokenScores:
    """Returns float32 logits `[L, V]` of both; targets int64 `[L]`, -1 where no token follows.

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
    """Returns exp of the mean over tokens that follow another; infinite when it is too large for a float."""
    mean = float(loss[~loss.isnan()].mean())
    return math.exp(mean) if mean < 700 else math.inf


RowsDtype = Literal["float32", "bfloat16", "float16"]

# Exact weights, rows of that type: sums in another order; intermediates rounded to 16 bits once or twice.
ROWS: Mapping[RowsDtype, float] = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}
# Formats whose kernels bring rows and intermediate activations to 8 bits.
QUANTISED_ROWS = 6e-2
# Weights rounded to that number of bits; three matrices are, and their errors add up as squares.
WEIGHTS: Mapping[int, float] = {32: 0.0, 16: 8e-3, 8: 0.1, 4: 0.4}
# Mean KL divergence, nats per token, of a model whose weights (or rows, where weights are exact) have that
# many bits, from the reference.
MEAN_KL: Mapping[int, float] = {32: 1e-3, 16: 3e-2, 8: 5e-2, 4: 1.5e-1}
# What is accepted of a matrix (`max_requantise_error`) makes up to this many times the error in the output.
_OUTPUT_PER_WEIGHT = 2.0


def rows_dtype(dtype: torch.dtype) -> RowsDtype:
    """Returns the dtype by its name."""
    return cast(RowsDtype, dtype_name(dtype))


def coarsest_bits(formats: Sequence[str]) -> int:
    """Returns the number of bits of a weight in the coarsest of these packed formats."""
    return min(weight_format(name).bits for both in formats for name in split_gate_up(both))


def allowed_rows(rows: RowsDtype, formats: Sequence[str]) -> float:
    """Returns the error allowed of experts in these packed formats (gate and up, down) against just these
    weights in float32.
    """
    if any(weight_format(name).quantised_rows for both in formats for name in split_gate_up(both)):
        return QUANTISED_ROWS
    return ROWS[rows]


def allowed_error(
    rows: RowsDtype,
    expert_dtype: ExpertDtype,
    formats: Sequence[str],
    max_requantise_error: float,
) -> float:
    """Returns the error allowed of loaded experts against the checkpoint's own weights in float32.

    `formats` are the checkpoint's, `expert_dtype` what they were requantised to while loading, accepted up to
    `max_requantise_error`.
    """
    if expert_dtype == "keep":
        # A device keeps no float32 experts for bfloat16 rows.
        rounds = rows == "bfloat16" and coarsest_bits(formats) == 32
        return allowed_rows(rows, formats) + (WEIGHTS[16] if rounds else 0.0)
    target = REQUANTISED[expert_dtype]
    rounding = WEIGHTS[coarsest_bits([target])]
    if target.startswith("int"):
        rounding = max(rounding, _OUTPUT_PER_WEIGHT * max_requantise_error)
    return allowed_rows(rows, [target]) + rounding


def rounded_to(expert_dtype: ExpertDtype, stored: Iterable[ExpertMatrices]) -> ExpertDtype:
    """Returns what these experts' weights are rounded to; "keep": nothing is rounded."""
    # Kept weights that none of our formats holds exactly become bfloat16.
    is_rounded = expert_dtype == "keep" and any(expert.is_rounded for expert in stored)
    return "bfloat16" if is_rounded else expert_dtype


def allowed_against_other(rows: RowsDtype, formats: Sequence[str]) -> float:
    """Returns the error allowed of experts in these packed formats against another checkpoint's, of which
    they are a rounding.
    """
    return allowed_rows(rows, formats) + WEIGHTS[coarsest_bits(formats)]
