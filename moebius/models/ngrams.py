"""How n-grams of tokens are hashed: numbers that follow from a `NGramConfig`. No torch."""

from __future__ import annotations

import math

from moebius.models.layers.residual import NGramConfig

_MASK64 = 2**64 - 1
# Of the splitmix64 generator (Steele, Lea, Flood 2014).
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Seeds of layers are so far apart.
_LAYER_STEP = 10007


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK64
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK64
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK64
    return value ^ (value >> 31)


def _is_prime(value: int) -> bool:
    if value < 4:
        return value > 1
    return value % 2 == 1 and all(value % divisor for divisor in range(3, math.isqrt(value) + 1, 2))


def hash_factors(sizes: NGramConfig, place: int, vocab_size: int) -> list[int]:
    """Returns the factors of a token and of those before it, in the `place`-th layer that embeds n-grams;
    odd.

    No product of a token and a factor exceeds 63 bits.
    """
    half = max(1, (2**63 - 1) // max(vocab_size, 1) // 2)
    seed = sizes.seed + _LAYER_STEP * place
    return [2 * (_splitmix64((seed + _GAMMA * (i + 1)) & _MASK64) % half) + 1 for i in range(sizes.size)]


def hash_primes(sizes: NGramConfig, place: int) -> list[int]:
    """Returns the rows of each hash of that layer: the next primes after those of the layers before."""
    found: list[int] = []
    candidate = sizes.vocab_base
    while len(found) < (place + 1) * sizes.num_hashes:
        if _is_prime(candidate):
            found.append(candidate)
        candidate += 1
    return found[place * sizes.num_hashes :]
