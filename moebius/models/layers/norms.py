"""Norms of layers and heads, each with a learned weight as long as what it norms."""

from __future__ import annotations

from dataclasses import dataclass

from moebius.models.layers.weights import Weight, Weights


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Division by the root mean square."""

    eps: float
    one_plus_weight: bool = False  # Whether checkpoints hold the weight less 1.

    def weights(self, name: str, size: int) -> Weights:
        """Yields what a norm over `size` elements stores; next to a 1, 16 bits would lose small weights."""
        yield Weight(f"{name}.weight", (size,), "float32" if self.one_plus_weight else "activation")


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """The mean is taken off before the division."""

    eps: float
    bias: bool = False

    def weights(self, name: str, size: int) -> Weights:
        """Yields what a norm over `size` elements stores."""
        yield Weight(f"{name}.weight", (size,))
        if self.bias:
            yield Weight(f"{name}.bias", (size,))


Norm = RMSNorm | LayerNorm
