"""What families' ways of stretching a context do to the rotary frequencies: one formula per kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


def _wavelengths(theta: float, dim: int) -> torch.Tensor:
    """Tokens per radian, `theta^(2i/dim)`."""
    wavelengths: torch.Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    return wavelengths


def _default(theta: float, dim: int, scaling: Mapping[str, float]) -> torch.Tensor:
    """`theta^(-2i/dim)`."""
    return 1.0 / _wavelengths(theta, dim)


def _linear(theta: float, dim: int, scaling: Mapping[str, float]) -> torch.Tensor:
    """Position interpolation (Chen et al. 2023): all frequencies divided by `factor`."""
    return _default(theta, dim, scaling) / scaling["factor"]


def _llama3(theta: float, dim: int, scaling: Mapping[str, float]) -> torch.Tensor:
    """Llama 3.1: long waves divided by `factor`, short ones kept, a linear blend between."""
    frequencies = _default(theta, dim, scaling)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling["factor"]


def _yarn(theta: float, dim: int, scaling: Mapping[str, float]) -> torch.Tensor:
    """YaRN (Peng et al. 2023), "NTK by parts".

    Pairs that turn more than `beta_fast` times within the original context keep their frequency, those
    below `beta_slow` turns are divided by `factor`; between, a blend that is linear in the pair's index.
    """
    frequencies = _default(theta, dim, scaling)

    def pair_with(turns: float) -> float:
        """Index of the pair that turns so often within the original context."""
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


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature of attention, `0.1 mscale ln(factor) + 1`; 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _no_factor(scaling: Mapping[str, float]) -> float:
    return 1.0


def _yarn_factor(scaling: Mapping[str, float]) -> float:
    """The checkpoint's own, or DeepSeek's ratio of two temperatures, or the paper's."""
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    factor = scaling["factor"]
    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return yarn_mscale(factor, scaling["mscale"]) / yarn_mscale(factor, scaling["mscale_all_dim"])
    return yarn_mscale(factor)


def _longrope_factor(scaling: Mapping[str, float]) -> float:
    """The checkpoint's own, or the paper's: `sqrt(1 + ln(factor) / ln(original length))`."""
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    factor, length = scaling["factor"], scaling["original_max_position_embeddings"]
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """One kind of scaling, and the keys of config.json it has."""

    # float32 [dim / 2], radians per token, of (theta, dim, numbers).
    frequencies: Callable[[float, int, Mapping[str, float]], torch.Tensor]
    required: tuple[str, ...] = ()
    # Name -> value where the checkpoint has none; None: left out.
    optional: tuple[tuple[str, float | None], ...] = ()
    # Booleans and what they are by default; among the numbers they are 0 and 1.
    flags: tuple[tuple[str, bool], ...] = ()
    # Whether `original_max_position_embeddings` counts, by default the longest context.
    original_length: bool = False
    # What cosines and sines are multiplied by.
    attention_factor: Callable[[Mapping[str, float]], float] = _no_factor
    # Whether `factor` is, where it is null (or, unless required, absent), the longest context divided by the
    # original one.
    factor_by_lengths: bool = False
    # Lists of a number for each pair, by which its frequency is divided: where no sequence is longer than
    # the original length, and where some may be.
    pair_factors: tuple[str, str] | None = None


ROPE_SCALINGS: Mapping[str, RopeScaling] = {
    "default": RopeScaling(_default),
    "linear": RopeScaling(_linear, ("factor",)),
    # Changes frequencies beyond `max_position_embeddings` only, and no sequence here is longer than that.
    "dynamic": RopeScaling(_default, ("factor",)),
    "llama3": RopeScaling(_llama3, ("factor", "low_freq_factor", "high_freq_factor"), original_length=True),
    # LongRoPE (Ding et al. 2024, arXiv:2402.13753).
    "longrope": RopeScaling(
        _default,
        optional=(("factor", None), ("attention_factor", None)),
        original_length=True,
        factor_by_lengths=True,
        pair_factors=("short_factor", "long_factor"),
        attention_factor=_longrope_factor,
    ),
    "yarn": RopeScaling(
        _yarn,
        ("factor",),
        (
            ("beta_fast", 32.0),
            ("beta_slow", 1.0),
            ("attention_factor", None),
            ("mscale", None),
            ("mscale_all_dim", None),
        ),
        (("truncate", True),),
        True,
        _yarn_factor,
        factor_by_lengths=True,
    ),
}


def inverse_frequencies(
    theta: float, rotary_dim: int, kind: str, scaling: Mapping[str, float], pair_factors: Sequence[float] = ()
) -> torch.Tensor:
    """Radians per token of each pair, float32 `[rotary_dim / 2]` on the CPU.

    `pair_factors`: what the frequency of each pair is divided by, of kinds that have such lists.
    """
    if pair_factors:
        return 1.0 / (torch.tensor(pair_factors, device="cpu") * _wavelengths(theta, rotary_dim))
    return ROPE_SCALINGS[kind].frequencies(theta, rotary_dim, scaling)
