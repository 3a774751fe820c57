"""Norms of layers and heads, each with a learned weight as long as what it norms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Division by the root mean square."""

    eps: float
    one_plus_weight: bool = False  # Whether checkpoints hold the weight less 1.


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """The mean is taken off before the division."""

    eps: float
    bias: bool = False


Norm = RMSNorm | LayerNorm
