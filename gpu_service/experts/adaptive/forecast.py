"""How likely each expert is to be chosen by one of the next tokens, from what earlier ones chose.

Recency and frequency are ends of one scale: how fast what was seen is forgotten. Several half-lives are
kept at once, and each layer follows the one whose experts, had they been in its slots, would have been hit
most by the tokens that came next. Least recently used is the short end, a recorded statistics file the long
one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu_service.experts.adaptive.counts import Observation

# In decoded tokens.
HALF_LIVES = (8.0, 32.0, 128.0, 512.0, 2048.0, 8192.0)
# A prompt says what its output will be about; its thousands of tokens are not as many reasons to forget
# others.
_PREFILL_TOKENS = 64.0
# Half-life of the hits that half-lives are compared by, tokens.
_JUDGED_OVER = 1024.0
# How much better another half-life has to be, in hits of all, to be followed instead.
_BETTER = 0.005
# Weight of recorded counts, in tokens that are taken to have been seen.
_KNOWN_TOKENS = 512.0

Rates = NDArray[np.float64]
"""float64 `[layers, experts]`: choices per token."""


class RoutingForecast:
    """Of some layers, of which each has a number of slots. Not thread safe."""

    def __init__(
        self, slots: Sequence[int], num_experts: int, top_k: int, known: NDArray[np.int64] | None = None
    ) -> None:
        """`slots`: by layer. `known`: recorded counts int64 `[layers, num_experts]`, to begin with."""
        self._top_k = top_k
        self._slots = np.asarray(slots)
        shape = (len(HALF_LIVES), len(slots), num_experts)
        self._decays = np.asarray(HALF_LIVES)
        # Decayed sums of choices, and of tokens: [half-lives, layers, experts] and [half-lives, layers].
        self._sums = np.zeros(shape)
        self._tokens = np.zeros(shape[:2])
        self._hits = np.zeros(shape[:2])
        self._best = np.full(len(slots), len(HALF_LIVES) - 2)
        if known is not None:
            self._begin_with(known)

    def _begin_with(self, known: NDArray[np.int64]) -> None:
        tokens = known.sum(axis=1) / self._top_k
        rates = known / np.maximum(1.0, tokens)[:, None]
        weights = np.minimum(np.minimum(self._decays, _KNOWN_TOKENS)[:, None], tokens[None, :])
        self._sums += rates[None] * weights[:, :, None]
        self._tokens += weights

    def observe(self, observation: Observation) -> None:
        """Tokens that came after everything that was observed before."""
        for counts, most in ((observation.prefill, _PREFILL_TOKENS), (observation.decode, np.inf)):
            tokens = counts.sum(axis=1) / self._top_k
            if tokens.any():
                self._judge(counts)
                scale = np.minimum(1.0, most / np.maximum(tokens, 1e-9))
                self._add(counts * scale[:, None], tokens * scale)

    def _judge(self, counts: NDArray[np.int64]) -> None:
        """By what each half-life would have had in the slots."""
        chosen = counts.sum(axis=1)
        for index in range(len(HALF_LIVES)):
            found = top_counts(self._sums[index], counts, self._slots)
            share = found / np.maximum(1, chosen)
            kept = 0.5 ** (chosen / self._top_k / _JUDGED_OVER)
            self._hits[index] = np.where(
                chosen > 0, self._hits[index] * kept + share * (1 - kept), self._hits[index]
            )
        best = self._hits.argmax(axis=0)
        layers = np.arange(len(best))
        is_better = self._hits[best, layers] > self._hits[self._best, layers] + _BETTER
        self._best = np.where(is_better, best, self._best)

    def _add(self, counts: Rates, tokens: NDArray[np.float64]) -> None:
        kept = 0.5 ** (tokens[None, :] / self._decays[:, None])
        self._sums = self._sums * kept[:, :, None] + counts[None]
        self._tokens = self._tokens * kept + tokens[None, :]

    @property
    def half_lives(self) -> NDArray[np.float64]:
        """float64 `[layers]`: what each layer follows, in tokens."""
        found: NDArray[np.float64] = self._decays[self._best]
        return found

    @property
    def tokens(self) -> NDArray[np.float64]:
        """float64 `[layers]`: of how many tokens the rates are means, by weight."""
        found: NDArray[np.float64] = self._tokens[self._best, np.arange(len(self._best))]
        return found

    @property
    def rates(self) -> Rates:
        """Choices per token of each expert, as each layer's half-life has them."""
        layers = np.arange(len(self._best))
        found: Rates = self._sums[self._best, layers] / np.maximum(1e-9, self.tokens)[:, None]
        return found

    def to_record(self) -> NDArray[np.int64]:
        """Counts of the longest half-life, for a file that a later start begins with."""
        found: NDArray[np.int64] = np.rint(self._sums[-1]).astype(np.int64)
        return found


def top_counts(scores: Rates, counts: NDArray[np.int64], slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 `[layers]`: what `counts` has of the `slots[layer]` experts with the highest scores."""
    order = np.argsort(-scores, axis=1, kind="stable")
    sums = np.take_along_axis(counts, order, axis=1).cumsum(axis=1)
    padded = np.concatenate([np.zeros((len(sums), 1), sums.dtype), sums], axis=1)
    taken: NDArray[np.int64] = np.take_along_axis(padded, slots[:, None], axis=1)[:, 0]
    return taken
