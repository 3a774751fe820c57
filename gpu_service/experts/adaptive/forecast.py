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
from gpu_service.experts.adaptive.policy import worthwhile

# In decoded tokens.
HALF_LIVES = (8.0, 32.0, 128.0, 512.0, 2048.0, 8192.0)
# A prompt says what its output will be about; its thousands of tokens are not as many reasons to forget
# others.
_PREFILL_TOKENS = 64.0
# Half-life of what half-lives are compared by, tokens.
_JUDGED_OVER = 2048.0
# Weight of recorded counts, in tokens that are taken to have been seen.
_KNOWN_TOKENS = 512.0
# Before they have seen as many tokens, forecasts lean on the next more general one: those of short half-lives
# on the longest, the longest on an even choice. At most a half-life's length.
_PRIOR_TOKENS = 32.0

Choices = NDArray[np.float64]
"""float64 `[layers, experts]`, or with half-lives before them."""


class RoutingForecast:
    """Forecasts the choices of some layers with slots. Not thread safe."""

    def __init__(
        self, resident: NDArray[np.bool_], top_k: int, known: NDArray[np.int64] | None = None
    ) -> None:
        """`resident` bool `[layers, experts]`: in slots now. `known`: recorded counts int64 of the same
        shape, to begin with.
        """
        num_layers, self._num_experts = resident.shape
        self._top_k = top_k
        self._half_lives = np.asarray(HALF_LIVES)
        self._resident = np.repeat(resident[None], len(HALF_LIVES), axis=0)
        # Decayed sums of choices, and of tokens: [half-lives, layers, experts] and [half-lives, layers].
        self._sums = np.zeros(self._resident.shape)
        self._tokens = np.zeros((len(HALF_LIVES), num_layers))
        # Choices that each half-life's slots saved, less those that its copies cost: [half-lives, layers].
        self._saved = np.zeros((len(HALF_LIVES), num_layers))
        if known is not None:
            self._begin_with(known)

    def _begin_with(self, known: NDArray[np.int64]) -> None:
        tokens = known.sum(axis=1) / self._top_k
        rates = known / np.maximum(1.0, tokens)[:, None]
        weights = np.minimum(np.minimum(self._half_lives, _KNOWN_TOKENS)[:, None], tokens[None, :])
        self._sums += rates[None] * weights[:, :, None]
        self._tokens += weights

    def observe(self, observation: Observation, copy_price: float) -> None:
        """Tokens that came after everything that was observed before; copies cost as many choices."""
        tokens = observation.prefill.sum(axis=1) / self._top_k
        scale = np.minimum(1.0, _PREFILL_TOKENS / np.maximum(tokens, 1e-9))
        self._add(observation.prefill * scale[:, None], tokens * scale)
        tokens = observation.decode.sum(axis=1) / self._top_k
        self._saved *= 0.5 ** (tokens / _JUDGED_OVER)
        self._saved += np.where(self._resident, observation.decode[None], 0).sum(axis=2)
        self._add(observation.decode, tokens)
        self._exchange(copy_price)

    def _add(self, counts: NDArray[np.int64] | Choices, tokens: NDArray[np.float64]) -> None:
        if tokens.any():
            kept = 0.5 ** (tokens[None, :] / self._half_lives[:, None])
            self._sums = self._sums * kept[:, :, None] + counts[None]
            self._tokens = self._tokens * kept + tokens[None, :]

    def _exchange(self, copy_price: float) -> None:
        rows = self._resident.reshape(-1, self._num_experts)
        found = worthwhile(self._expected().reshape(rows.shape), rows, copy_price)
        rows[found.rows, found.newcomers] = True
        rows[found.rows, found.leavers] = False
        copies = np.bincount(found.rows, minlength=len(rows)).reshape(self._saved.shape)
        self._saved -= copy_price * copies

    def _expected(self) -> Choices:
        """Returns the choices expected by every half-life, within as many tokens as it remembers."""
        return self._rates() * self._tokens[:, :, None]

    def _rates(self) -> Choices:
        """Returns the choices by a token, of every half-life."""
        even = self._top_k / self._num_experts
        usual = (self._sums[-1] + _PRIOR_TOKENS * even) / (self._tokens[-1, :, None] + _PRIOR_TOKENS)
        prior = np.minimum(self._half_lives, _PRIOR_TOKENS)[:, None, None]
        found: Choices = (self._sums + prior * usual) / (self._tokens[:, :, None] + prior)
        return found

    @property
    def _best(self) -> NDArray[np.int64]:
        """int64 `[layers]`: the half-life that saved most; of equals the longest."""
        found: NDArray[np.int64] = len(HALF_LIVES) - 1 - self._saved[::-1].argmax(axis=0)
        return found

    @property
    def half_lives(self) -> NDArray[np.float64]:
        """float64 `[layers]`: what each layer follows, in tokens."""
        found: NDArray[np.float64] = self._half_lives[self._best]
        return found

    @property
    def expected(self) -> Choices:
        """Choices of each expert within as many tokens as the layer's half-life remembers."""
        found: Choices = self._expected()[self._best, np.arange(self._saved.shape[1])]
        return found

    @property
    def rates(self) -> Choices:
        """Choices of each expert by a token, as the layer's half-life has them: comparable between layers."""
        found: Choices = self._rates()[self._best, np.arange(self._saved.shape[1])]
        return found

    def to_record(self) -> NDArray[np.int64]:
        """Returns the counts of the longest half-life, for a file that a later start begins with."""
        found: NDArray[np.int64] = np.rint(self._sums[-1]).astype(np.int64)
        return found
