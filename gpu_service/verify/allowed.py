"""How far experts may be from the checkpoint's weights in float32: the one table of these tolerances.

All are relative errors of an expert's output as `errors.relative_error` measures them. What is loaded wrongly
(another expert, another slice, a scale of the wrong group) has an error near or above 1; docs/verify.md says
where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from moebius.checkpoint.expert_checkpoint import ExpertMatrices
from moebius.expert_dtype import REQUANTISED, ExpertDtype
from moebius.weight_formats import weight_format

RowsDtype = Literal["float32", "bfloat16"]

# Exact weights, rows of that type: sums in another order; neurons rounded to bfloat16 once or twice.
ROWS: Mapping[RowsDtype, float] = {"float32": 1e-4, "bfloat16": 1e-2}
# Formats whose kernels bring rows and neurons to 8 bits.
QUANTISED_ROWS = 6e-2
# Weights rounded to so many bits; three matrices are, and their errors add up as squares.
WEIGHTS: Mapping[int, float] = {32: 0.0, 16: 8e-3, 8: 0.1, 4: 0.4}
# Mean KL divergence, nats per token, of a model whose weights (or rows, where weights are exact) have so many
# bits, from the reference.
MEAN_KL: Mapping[int, float] = {32: 1e-3, 16: 3e-2, 8: 5e-2, 4: 1.5e-1}
# What is accepted of a matrix (`max_requantise_error`) makes up to so many times the error in the output.
_OUTPUT_PER_WEIGHT = 2.0


def coarsest_bits(formats: Sequence[str]) -> int:
    """Bits of a weight in the coarsest of these packed formats."""
    return min(weight_format(name).bits for name in formats)


def allowed_rows(rows: RowsDtype, formats: Sequence[str]) -> float:
    """Of experts in these packed formats (gate and up, down) against just these weights in float32."""
    if any(weight_format(name).quantised_rows for name in formats):
        return QUANTISED_ROWS
    return ROWS[rows]


def allowed_error(
    rows: RowsDtype,
    expert_dtype: ExpertDtype,
    formats: Sequence[str],
    max_requantise_error: float,
) -> float:
    """Of loaded experts against the checkpoint's own weights in float32.

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
    """What these experts' weights are rounded to; "keep": nothing is rounded."""
    # Kept weights that none of our formats holds exactly become bfloat16.
    is_rounded = expert_dtype == "keep" and any(expert.is_rounded for expert in stored)
    return "bfloat16" if is_rounded else expert_dtype


def allowed_against_other(rows: RowsDtype, formats: Sequence[str]) -> float:
    """Of experts in these packed formats against another checkpoint's, of which they are a rounding."""
    return allowed_rows(rows, formats) + WEIGHTS[coarsest_bits(formats)]
