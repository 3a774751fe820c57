"""Guards which experts a placement that follows traffic wants in a GPU's slots, and when an exchange pays."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu_service.experts.adaptive.counts import Observation
from gpu_service.experts.adaptive.forecast import HALF_LIVES, RoutingForecast, top_counts
from gpu_service.experts.adaptive.policy import worthwhile

EXPERTS, TOP_K, SLOTS = 64, 4, 8
# Of a copy, in choices.
PRICE = 4.0


def zipf(rng: np.random.Generator, exponent: float = 1.2) -> NDArray[np.float64]:
    """Probabilities of experts, in an order of their own."""
    weights = 1.0 / np.arange(1, EXPERTS + 1) ** exponent
    return rng.permutation(weights / weights.sum())


def counts_of(rng: np.random.Generator, chances: NDArray[np.float64], tokens: int) -> NDArray[np.int64]:
    """What so many tokens choose, each TOP_K different experts."""
    keys = np.log(chances)[None] + rng.gumbel(size=(tokens, EXPERTS))
    chosen = np.argsort(-keys, axis=1)[:, :TOP_K]
    return np.bincount(chosen.ravel(), minlength=EXPERTS)[None]


def observed(decode: NDArray[np.int64] | None, prefill: NDArray[np.int64] | None = None) -> Observation:
    """Of one layer."""
    nothing = np.zeros((1, EXPERTS), np.int64)
    return Observation(nothing if decode is None else decode, nothing if prefill is None else prefill)


def hits(forecast: RoutingForecast, counts: NDArray[np.int64]) -> float:
    """Of the experts that the forecast would put into the slots."""
    return float(top_counts(forecast.rates, counts, np.array([SLOTS]))[0] / counts.sum())


def test_frequent_experts_are_found() -> None:
    """With a fixed skew the slots get nearly what a statistics file of the same traffic would give them."""
    rng = np.random.default_rng(1)
    chances, forecast = zipf(rng), RoutingForecast([SLOTS], EXPERTS, TOP_K)
    for _ in range(300):
        forecast.observe(observed(counts_of(rng, chances, 4)))
    later = counts_of(rng, chances, 4000)
    best = np.sort(later[0])[-SLOTS:].sum() / later.sum()
    assert hits(forecast, later) > 0.97 * best
    assert forecast.half_lives[0] >= 128


def test_a_new_topic_is_followed() -> None:
    """After the skew has changed, experts of the old one are left within some hundred tokens."""
    rng = np.random.default_rng(2)
    old, new, forecast = zipf(rng), zipf(rng), RoutingForecast([SLOTS], EXPERTS, TOP_K)
    for chances, steps in ((old, 400), (new, 400)):
        for _ in range(steps):
            forecast.observe(observed(counts_of(rng, chances, 1)))
    later = counts_of(rng, new, 4000)
    best = np.sort(later[0])[-SLOTS:].sum() / later.sum()
    assert hits(forecast, later) > 0.9 * best


def test_tokens_that_repeat_their_neighbours_experts_are_forecast_by_recency() -> None:
    """Where each token keeps most of the last one's experts and topics are short, a short half-life wins."""
    rng = np.random.default_rng(3)
    forecast = RoutingForecast([SLOTS], EXPERTS, TOP_K)
    chosen = rng.choice(EXPERTS, TOP_K, replace=False)
    for _ in range(3000):
        if rng.random() < 0.2:
            others = np.setdiff1d(np.arange(EXPERTS), chosen)
            chosen[rng.integers(TOP_K)] = rng.choice(others)
        forecast.observe(observed(np.bincount(chosen, minlength=EXPERTS)[None]))
    assert forecast.half_lives[0] <= 32


def test_recorded_counts_are_known_at_once_and_given_up_for_what_is_seen() -> None:
    """A file of another topic decides the first tokens and not the later ones; a record of it reads back."""
    rng = np.random.default_rng(4)
    recorded, real = zipf(rng), zipf(rng)
    known = counts_of(rng, recorded, 5000)
    forecast = RoutingForecast([SLOTS], EXPERTS, TOP_K, known)
    assert set(np.argsort(-forecast.rates[0])[:4]) <= set(np.argsort(-known[0])[:6])
    for _ in range(500):
        forecast.observe(observed(counts_of(rng, real, 4)))
    later = counts_of(rng, real, 4000)
    assert hits(forecast, later) > 0.9 * np.sort(later[0])[-SLOTS:].sum() / later.sum()
    again = RoutingForecast([SLOTS], EXPERTS, TOP_K, forecast.to_record())
    assert hits(again, later) > 0.9 * np.sort(later[0])[-SLOTS:].sum() / later.sum()


def test_a_prompt_is_heard_and_does_not_drown_all_else() -> None:
    """A prompt of thousands of tokens weighs as some dozen decoded ones."""
    rng = np.random.default_rng(5)
    usual, prompt = zipf(rng), zipf(rng)
    forecast = RoutingForecast([SLOTS], EXPERTS, TOP_K)
    for _ in range(2000):
        forecast.observe(observed(counts_of(rng, usual, 1)))
    long_ago = forecast._tokens[-1, 0]
    forecast.observe(observed(None, counts_of(rng, prompt, 8000)))
    assert forecast._tokens[-1, 0] < long_ago + 65
    assert forecast._sums[0, 0].argmax() == prompt.argmax()


def exchanges(better: float, worse: float, half_life: float, tokens: float = 1e9) -> int:
    """How many there are where one absent expert has one rate and all present ones another."""
    rates = np.full((1, EXPERTS), worse)
    rates[0, 40:] = 0.0
    rates[0, 40] = better
    resident = np.zeros((1, EXPERTS), np.bool_)
    resident[0, :SLOTS] = True
    return len(worthwhile(rates, np.array([tokens]), np.array([half_life]), resident, 10, PRICE))


def test_an_exchange_has_to_earn_its_copy() -> None:
    """What is chosen more often by less than the copy's reads within the half-life stays where it is."""
    gain = PRICE / (1.4427 * 32)
    assert exchanges(0.1 + 0.9 * gain, 0.1, 32) == 0
    assert exchanges(0.1 + 1.1 * gain, 0.1, 32) == 1
    assert exchanges(0.1 + 0.9 * gain, 0.1, 64) == 1


def test_chance_is_not_believed() -> None:
    """The same difference counts after many tokens, not after few."""
    assert exchanges(0.13, 0.1, 8192, tokens=20) == 0
    assert exchanges(0.13, 0.1, 8192, tokens=5000) == 1


@pytest.mark.parametrize("seed", range(20))
def test_exchanges_are_possible(seed: int) -> None:
    """Newcomers are absent and leavers present, each in one exchange; gains descend; no more than asked
    for.
    """
    rng = np.random.default_rng(seed)
    rates = rng.random((5, EXPERTS))
    resident = rng.random(rates.shape) < rng.choice([0.0, 0.2, 0.9, 1.0])
    most = int(rng.integers(1, 30))
    found = worthwhile(rates, np.full(5, 1e9), rng.choice(HALF_LIVES, 5), resident, most, PRICE)
    assert len(found) <= most
    assert [each.gain for each in found] == sorted((each.gain for each in found), reverse=True)
    for name in ("newcomer", "leaver"):
        pairs = [(each.row, getattr(each, name)) for each in found]
        assert len(set(pairs)) == len(pairs)
        assert all(resident[pair] == (name == "leaver") for pair in pairs)
