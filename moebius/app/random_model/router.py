"""Routers whose experts are chosen as unequally as asked.

A router scores expert e with `gate[e] . x`. The models written here keep element 0 of the residual stream
constant: every embedding has the same value there and no layer writes to it. So `gate[e][0]` acts as a bias
that no token changes, while the other elements, drawn from a normal distribution, make the choice depend on
the token. The biases are fitted on simulated scores until the share of tokens that choose the expert of
rank r follows `r ** -exponent` (an expert that would have to be chosen by more than all tokens is chosen by
all, and the rest of its share goes to the next ones). Which expert has which rank is drawn per layer.

Scores inside a model are correlated between tokens and not quite normal, so the law holds approximately;
`moebius bench engine` prints how many different experts were really touched.
"""

from __future__ import annotations

import functools
import re

import numpy as np
from numpy.typing import NDArray

from moebius.app.random_model.draws import generator
from moebius.errors import UserError

# Deviation of the part of the scores that depends on the token; trained routers have 1 to 2.
SCORE_STD = 1.5
_SAMPLES = 4096
_ROUNDS = 40
_STEP = 0.7


def parse_skew(text: str) -> float:
    """ "none" is 0, "zipf:1.2" the exponent. Raises UserError."""
    if text == "none":
        return 0.0
    found = re.fullmatch(r"zipf:(\d+(?:\.\d+)?)", text)
    if found is None or not 0 < float(found[1]) <= 4:
        raise UserError(f"--skew: {text!r} is not allowed; allowed: none, or zipf:S with S above 0, up to 4")
    return float(found[1])


def wanted_shares(num_experts: int, top_k: int, exponent: float) -> NDArray[np.float64]:
    """Share of tokens that choose the expert of each rank, `[num_experts]`, summing to `top_k`, at most 1."""
    law = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    shares = np.zeros(num_experts)
    full = 0
    while True:
        shares[:full] = 1.0
        shares[full:] = law[full:] * (top_k - full) / law[full:].sum()
        if full >= top_k or shares[full] <= 1.0:
            return np.minimum(shares, 1.0)
        full += 1


@functools.cache
def fitted_biases(num_experts: int, top_k: int, exponent: float) -> NDArray[np.float64]:
    """Biases by rank, `[num_experts]`, mean 0, for scores of deviation SCORE_STD."""
    if exponent == 0.0 or top_k == num_experts:
        return np.zeros(num_experts)
    # Nobody can be fitted to always or (in so many samples) never; both ends are held a little inside.
    wanted = wanted_shares(num_experts, top_k, exponent).clip(1 / _SAMPLES, 0.98)
    noise = generator(0, num_experts, top_k).standard_normal((_SAMPLES, num_experts)) * SCORE_STD
    biases = SCORE_STD * 0.78 * np.log(wanted)
    for _ in range(_ROUNDS):
        chosen = np.argpartition(noise + biases, -top_k, axis=1)[:, -top_k:]
        found = np.bincount(chosen.ravel(), minlength=num_experts) / _SAMPLES
        found = found.clip(0.5 / _SAMPLES, 1 - 0.5 / _SAMPLES)
        error = np.log(wanted / (1 - wanted)) - np.log(found / (1 - found))
        biases += _STEP * error
    fitted: NDArray[np.float64] = biases - biases.mean()
    return fitted


def layer_biases(num_experts: int, top_k: int, exponent: float, layer: int, seed: int) -> NDArray[np.float64]:
    """Biases by expert of one layer, `[num_experts]`: the fitted ones in an order of its own."""
    ranks = generator(seed, 1, layer).permutation(num_experts)
    return fitted_biases(num_experts, top_k, exponent)[ranks]
