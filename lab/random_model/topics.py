"""Routers whose choices resemble those of neighbouring tokens, as trained ones' do.

Published measurements of how many of its experts a token shares with the next one: 45 % for Qwen3-30B-A3B,
26 % for GLM-4.7-Flash; random routers share what chance gives (top_k / num_experts). Here some elements of
the residual stream are the token's *topic*: no layer writes to them, and along the chain in which a chained
head goes through the vocabulary they change slowly (an autoregressive process of order one, with unit
variance and a correlation of exp(-1 / topic_tokens) between neighbours). A router's scores are the sum of
what it makes of the topic and of what it makes of all else, which differs from token to token. The share of
the topic in the scores' variance is fitted on simulated scores until neighbours share as much as was asked
for.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.random_model.values import SCORE_STD, fitted_biases, generator
from moebius.errors import UserError

# Elements of the residual stream that hold the topic: after the constant one and the flag.
FIRST_ELEMENT, NUM_ELEMENTS = 2, 16
_TRAJECTORY, _ROUTERS = 7, 8
_SAMPLES, _BISECTIONS = 2048, 12


@dataclass(frozen=True)
class Topics:
    """How choices of neighbours resemble one another; filled by the command line."""

    # Of a token's experts, the percentage that the next token chooses as well; 0: as chance has it.
    overlap: int = 0
    topic_tokens: int = 64  # Tokens after which a topic's correlation has fallen to 1 / e.

    @property
    def correlation(self) -> float:
        """The correlation of the topics of two neighbours."""
        return math.exp(-1.0 / self.topic_tokens)

    @property
    def is_on(self) -> bool:
        """Returns whether there is any."""
        return self.overlap > 0


NO_TOPICS = Topics()


@functools.cache  # embedding and head have it both
def trajectory(length: int, topics: Topics, seed: int) -> NDArray[np.float32]:
    """Returns float32 `[length, NUM_ELEMENTS]`: the topic of each place of the chain, of unit variance."""
    rng, kept = generator(seed, _TRAJECTORY), topics.correlation
    steps = rng.standard_normal((length, NUM_ELEMENTS)) * math.sqrt(1.0 - kept**2)
    steps[0] /= math.sqrt(1.0 - kept**2)
    found = np.empty((length, NUM_ELEMENTS))
    value = np.zeros(NUM_ELEMENTS)
    for place in range(length):
        value = kept * value + steps[place]
        found[place] = value
    return found.astype(np.float32)


def router_columns(num_experts: int, layer: int, seed: int) -> NDArray[np.float32]:
    """Returns float32 `[num_experts, NUM_ELEMENTS]`: what a router makes of a topic, scores of unit
    variance.
    """
    columns = generator(seed, _ROUTERS, layer).standard_normal((num_experts, NUM_ELEMENTS), np.float32)
    return columns / np.float32(math.sqrt(NUM_ELEMENTS))


@functools.cache
def fitted_share(topics: Topics, num_experts: int, top_k: int, exponent: float) -> float:
    """Returns the share of the topic in the variance of scores, 0 to 1, with which neighbours share
    `topics.overlap`.

    Raises UserError naming what can be had when the overlap is out of reach.
    """
    if not topics.is_on:
        return 0.0
    low, high = 0.0, 1.0
    least, most = (_overlap(share, topics, num_experts, top_k, exponent) for share in (low, high))
    if not least <= topics.overlap / 100 <= most:
        raise UserError(
            f"--overlap: {topics.overlap} is not allowed; allowed here: {math.ceil(least * 100)} to "
            f"{math.floor(most * 100)}, and 0 for what chance gives"
        )
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_too_little = _overlap(middle, topics, num_experts, top_k, exponent) < topics.overlap / 100
        low, high = (middle, high) if is_too_little else (low, middle)
    return (low + high) / 2


def _overlap(share: float, topics: Topics, num_experts: int, top_k: int, exponent: float) -> float:
    """Mean share of a token's experts that a neighbour chooses, by simulated scores."""
    rng = generator(0, num_experts, top_k, topics.topic_tokens)
    own = rng.standard_normal((2, _SAMPLES, num_experts))
    first, change = rng.standard_normal((2, _SAMPLES, num_experts))
    kept = topics.correlation
    topic = np.stack([first, kept * first + math.sqrt(1 - kept**2) * change])
    scores = SCORE_STD * (math.sqrt(share) * topic + math.sqrt(1 - share) * own)
    scores += fitted_biases(num_experts, top_k, exponent)
    chosen = np.argpartition(scores, -top_k, axis=2)[:, :, -top_k:]
    masks = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(masks, chosen, True, axis=2)
    return float((masks[0] & masks[1]).sum() / (_SAMPLES * top_k))
