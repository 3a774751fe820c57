"""Rotary position embedding, as layers have it."""

from __future__ import annotations

from dataclasses import dataclass

# Positions of a token with mRoPE: time, height, width.
NUM_AXES = 3


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding; filled by `rope.read_rope`."""

    theta: float
    rotary_dim: int  # Leading elements of each head that are rotated; the rest pass through.
    interleaved: bool = False  # False: element j pairs with j + rotary_dim/2. True: pairs are (2j, 2j+1).
    # A key of `rope.ROPE_SCALINGS`, and the numbers that kind needs.
    scaling_kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    # LongRoPE: what each pair's frequency is divided by where no sequence is longer than the original length,
    # and where some may be; empty: nothing.
    pair_factors: tuple[tuple[float, ...], ...] = ()
    # Cosines and sines are multiplied by it (YaRN, LongRoPE), and so every score by its square.
    attention_factor: float = 1.0
    # mRoPE: how many pairs turn by the time, the height and the width of a token; empty: all by one position.
    mrope_sections: tuple[int, ...] = ()
    # False: sections follow one another. True: pairs alternate between the three, the rest is time.
    mrope_interleaved: bool = False
    # Pairs of height and width alternate first, those of time follow.
    mrope_time_last: bool = False
    # Whether pairs' frequencies are multiplied by exponentials of learned numbers.
    learned: bool = False
    # Queries at position p are multiplied by `1 + query_growth * ln(1 + floor(p / query_growth_length))`.
    query_growth: float = 0.0
    query_growth_length: float = 1.0
