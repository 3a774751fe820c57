"""What families' ways of stretching a context do to the rotary frequencies: one formula per kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


def _default(theta: float, dim: int, scaling: Mapping[str, float]) -> torch.Tensor:
    """`theta^(-2i/dim)`."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))


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


ROPE_SCALINGS: Mapping[str, RopeScaling] = {
    "default": RopeScaling(_default),
    "linear": RopeScaling(_linear, ("factor",)),
    # Changes frequencies beyond `max_position_embeddings` only, and no sequence here is longer than that.
    "dynamic": RopeScaling(_default, ("factor",)),
    "llama3": RopeScaling(_llama3, ("factor", "low_freq_factor", "high_freq_factor"), original_length=True),
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
    ),
}


def inverse_frequencies(
    theta: float, rotary_dim: int, kind: str, scaling: Mapping[str, float]
) -> torch.Tensor:
    """Radians per token of each pair, float32 `[rotary_dim / 2]` on the CPU."""
    return ROPE_SCALINGS[kind].frequencies(theta, rotary_dim, scaling)
