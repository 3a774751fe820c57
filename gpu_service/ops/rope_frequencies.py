"""What families' ways of stretching a context do to the rotary frequencies: one formula per kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch


def _wavelengths(theta: float, dim: int) -> torch.Tensor:
    """Returns the tokens per radian, `theta^(2i/dim)`."""
    wavelengths: torch.Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    return wavelengths


def _default(theta: float, dim: int, scaling: Mapping[str, float]) -> torch.Tensor:
    """Computes `theta^(-2i/dim)`."""
    return 1.0 / _wavelengths(theta, dim)


def _linear(theta: float, dim: int, scaling: Mapping[str, float]) -> torch.Tensor:
    """Computes position interpolation (Chen et al. 2023): all frequencies divided by `factor`."""
    return _default(theta, dim, scaling) / scaling["factor"]


def _llama3(theta: float, dim: int, scaling: Mapping[str, float]) -> torch.Tensor:
    """Computes the frequencies of Llama 3.1: long waves divided by `factor`, short ones kept, a linear blend
    between.
    """
    frequencies = _default(theta, dim, scaling)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling["factor"]


def _yarn(theta: float, dim: int, scaling: Mapping[str, float]) -> torch.Tensor:
    """Computes the frequencies of YaRN (Peng et al. 2023), "NTK by parts".

    Pairs that turn more than `beta_fast` times within the original context keep their frequency, those
    below `beta_slow` turns are divided by `factor`; between, a blend that is linear in the pair's index.
    """
    frequencies = _default(theta, dim, scaling)

    def pair_with(turns: float) -> float:
        """Returns the index of the pair that turns so often within the original context."""
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(scaling["beta_fast"]), pair_with(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step instead of a division by zero
    pairs = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((pairs - first) / (last - first)).clamp(0.0, 1.0)
    return frequencies / scaling["factor"] * (1 - keep) + frequencies * keep


def _proportional(theta: float, dim: int, scaling: Mapping[str, float]) -> torch.Tensor:
    """Returns Gemma 4: the first pairs turn as those of a whole head do, all others stay."""
    pairs = torch.arange(dim // 2, device="cpu")
    frequencies = _default(theta, dim, scaling) / scaling.get("factor", 1.0)
    return frequencies * (pairs < scaling["rotated_pairs"])


# By the kinds of `moebius.models.rope.ROPE_SCALINGS`: float32 [dim / 2], radians per token, of (theta, dim,
# numbers).
FREQUENCIES: Mapping[str, Callable[[float, int, Mapping[str, float]], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    # Changes frequencies beyond `max_position_embeddings` only, and no sequence here is longer than that.
    "dynamic": _default,
    "llama3": _llama3,
    # LongRoPE (Ding et al. 2024, arXiv:2402.13753) has a factor for each pair besides.
    "longrope": _default,
    "yarn": _yarn,
    "proportional": _proportional,
}


def inverse_frequencies(
    theta: float, rotary_dim: int, kind: str, scaling: Mapping[str, float], pair_factors: Sequence[float] = ()
) -> torch.Tensor:
    """Returns the radians per token of each pair, float32 `[rotary_dim / 2]` on the CPU.

    `pair_factors`: what the frequency of each pair is divided by, of kinds that have such lists.
    """
    if pair_factors:
        return 1.0 / (torch.tensor(pair_factors, device="cpu") * _wavelengths(theta, rotary_dim))
    return FREQUENCIES[kind](theta, rotary_dim, scaling)
