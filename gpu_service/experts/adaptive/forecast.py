"""How often each expert will be chosen by the next tokens, from what earlier ones chose.

Recency and frequency are ends of one scale: how fast what was seen is forgotten. Several half-lives are
kept at once. Each has slots of its own, which hold no weights: they are exchanged by the rule of the real
ones, and what they would have saved is counted, the copies paid. Each layer follows the half-life that
saved most of late. So where following the latest tokens costs more than it brings, it is not done.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpu_service.experts.adaptive.counts import Observation
from moebius import _kernels

# In decoded tokens.
HALF_LIVES = (8.0, 32.0, 128.0, 512.0, 2048.0, 8192.0)
# Weight of recorded counts, in tokens that are taken to have been seen.
_KNOWN_TOKENS = 512.0


class RoutingForecast:
    """Forecasts the choices of some layers with slots. Not thread safe.

    Attributes:
        expected: choices of each expert within as many tokens as the half-life remembers that its layer
            follows, float64 `[layers, experts]`.
        rates: choices of each expert by a token, of the same shape; comparable between layers.
    """

    def __init__(
        self, resident: NDArray[np.bool_], top_k: int, known: NDArray[np.int64] | None = None
    ) -> None:
        """`resident` bool `[layers, experts]`: in slots now. `known`: recorded counts int64 of the same
        shape, to begin with.
        """
        self._half_lives = np.asarray(HALF_LIVES)
        self._forecast = _kernels.RoutingForecast(HALF_LIVES, resident, top_k)
        # Views of decayed sums: of choices [half-lives, layers, experts], of tokens [half-lives, layers].
        self._sums, self._tokens = self._forecast.sums, self._forecast.tokens
        if known is not None:
            tokens = known.sum(axis=1) / top_k
            rates = known / np.maximum(1.0, tokens)[:, None]
            weights = np.minimum(np.minimum(self._half_lives, _KNOWN_TOKENS)[:, None], tokens[None, :])
            self._sums += rates[None] * weights[:, :, None]
            self._tokens += weights
        self._best, self.expected, self.rates = self._forecast.forecast()

    def observe(self, observation: Observation, copy_price: float) -> None:
        """Tokens that came after everything that was observed before; copies cost as many choices."""
        self._forecast.observe(observation.decode, observation.prefill, copy_price)
        self._best, self.expected, self.rates = self._forecast.forecast()

    @property
    def half_lives(self) -> NDArray[np.float64]:
        """float64 `[layers]`: what each layer follows, in tokens."""
        found: NDArray[np.float64] = self._half_lives[self._best]
        return found

    def to_record(self) -> NDArray[np.int64]:
        """Returns the counts of the longest half-life, for a file that a later start begins with."""
        found: NDArray[np.int64] = np.rint(self._sums[-1]).astype(np.int64)
        return found
