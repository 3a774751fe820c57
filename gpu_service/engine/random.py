"""Uniform numbers that depend on (seed, output position) and nothing else.

So a sampled token is the same in any batch, after a preemption and when a step is replayed. The mixer is
the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014),
applied twice.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """A bijection of 64-bit integers whose output bits each depend on all input bits."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 random bits (exact in float32)."""
    return (mix64(mix64(seed & _MASK) ^ mix64(position)) >> 40) / (1 << 24)


def derive_seed(seed: int, *parts: int | str) -> int:
    """A seed in [0, 2^63) for a sub-stream, e.g. one of a request's outputs."""
    state = mix64(seed & _MASK)
    for part in parts:
        for byte in str(part).encode():
            state = mix64(state ^ byte)
        state = mix64(state ^ 0x100)
    return state >> 1
