"""Whether a figure of a long output grows with the position: by windows, and as a straight line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import torch

from lab.verify.repetition import seq_rep

# Tokens of a window, where an output has many.
WINDOW = 1024
# Windows of a shorter output.
FEWEST_WINDOWS = 8
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of an output; filled by `windows_of`. KL in nats per token."""

    begin: int  # of the output's tokens
    end: int
    mean_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float  # share of tokens whose most probable token is the reference's
    seq_rep: float  # seq-rep-4 of the window


@dataclass(frozen=True)
class Trend:
    """The straight line through windows' mean KL; filled by `trend_of`."""

    # Nats per token and 1000 tokens of position, with the bounds of its 95 % interval.
    slope: float
    low: float
    high: float
    # Mean KL of the first and the last quarter of the windows.
    first_quarter: float
    last_quarter: float


def window_size(tokens: int) -> int:
    """Returns the tokens of a window: `WINDOW`, or less where an output has fewer than eight of them."""
    return max(1, min(WINDOW, tokens // FEWEST_WINDOWS))


def windows_of(
    kl: torch.Tensor, same_top: torch.Tensor, token_ids: Sequence[int], size: int
) -> tuple[Window, ...]:
    """Returns windows of `size` tokens of N; the last one may be longer. `kl` and `same_top` are `[N]`."""
    begins = range(0, len(token_ids) - size + 1, size)
    ends = [*begins[1:], len(token_ids)]
    return tuple(
        Window(
            begin,
            end,
            *spread(kl[begin:end]),
            float(same_top[begin:end].double().mean()),
            seq_rep(token_ids[begin:end]),
        )
        for begin, end in zip(begins, ends, strict=True)
    )


def spread(divergence: torch.Tensor) -> tuple[float, float, float]:
    """Mean, 99th percentile and maximum of `[L]`; NaN counts as infinite."""
    kl = divergence.nan_to_num(nan=torch.inf)
    return float(kl.mean()), float(kl.quantile(0.99, interpolation="higher")), float(kl.max())


def trend_of(windows: Sequence[Window]) -> Trend:
    """Least squares over windows' middles, with Student's t for the interval; needs three windows or more.

    Means of a thousand tokens scatter about the line much like independent normal values, which the tokens
    themselves, correlated and with long tails, do not.
    """
    places = [(window.begin + window.end) / 2000 for window in windows]
    values = [window.mean_kl for window in windows]
    place, value = fmean(places), fmean(values)
    spread_of_places = sum((x - place) ** 2 for x in places)
    slope = sum((x - place) * (y - value) for x, y in zip(places, values, strict=True)) / spread_of_places
    left = [y - value - slope * (x - place) for x, y in zip(places, values, strict=True)]
    freedom = len(windows) - 2
    error = math.sqrt(sum(r * r for r in left) / freedom / spread_of_places)
    reach = student_t((1 + _CONFIDENCE) / 2, freedom) * error
    quarter = max(1, len(windows) // 4)
    return Trend(slope, slope - reach, slope + reach, fmean(values[:quarter]), fmean(values[-quarter:]))


def student_t(probability: float, freedom: int) -> float:
    """Returns the quantile of Student's t, by its expansion (Abramowitz and Stegun 1964, 26.7.5).

    Within 1 % for 97.5 % and 5 degrees of freedom or more.
    """
    x, n = NormalDist().inv_cdf(probability), freedom
    return (
        x
        + (x**3 + x) / (4 * n)
        + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * n**2)
        + (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / (384 * n**3)
    )
