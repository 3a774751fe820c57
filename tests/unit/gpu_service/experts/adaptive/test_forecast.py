"""Guards which experts a placement that follows traffic wants in a GPU's slots, and when an exchange pays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu_service.experts.adaptive.counts import Observation
from gpu_service.experts.adaptive.forecast import HALF_LIVES, RoutingForecast
from gpu_service.experts.adaptive.policy import price_beside_fetching, worthwhile

EXPERTS, TOP_K, SLOTS, PRICE = 64, 4, 8, 4.0


def forecast_of(known: NDArray[np.int64] | None = None) -> RoutingForecast:
    """Returns a forecast of one layer, whose first experts are in its slots."""
    return RoutingForecast(np.arange(EXPERTS)[None] < SLOTS, TOP_K, known)


def zipf(rng: np.random.Generator, exponent: float = 1.2) -> NDArray[np.float64]:
    """Returns the probabilities of experts, in an order of their own."""
    weights = 1.0 / np.arange(1, EXPERTS + 1) ** exponent
    return rng.permutation(weights / weights.sum())


def counts_of(rng: np.random.Generator, chances: NDArray[np.float64], tokens: int) -> NDArray[np.int64]:
    """Returns what a number of tokens choose, each TOP_K different experts."""
    keys = np.log(chances)[None] + rng.gumbel(size=(tokens, EXPERTS))
    chosen = np.argsort(-keys, axis=1)[:, :TOP_K]
    return np.bincount(chosen.ravel(), minlength=EXPERTS)[None]


def observed(decode: NDArray[np.int64] | None, prefill: NDArray[np.int64] | None = None) -> Observation:
    """Returns an observation of one layer."""
    nothing = np.zeros((1, EXPERTS), np.int64)
    return Observation(nothing if decode is None else decode, nothing if prefill is None else prefill)


def hits(forecast: RoutingForecast, counts: NDArray[np.int64]) -> float:
    """Returns the hits of the experts that the forecast would put into the slots."""
    return float(counts[0, np.argsort(-forecast.expected[0])[:SLOTS]].sum() / counts.sum())


def test_frequent_experts_are_found() -> None:
    """With a fixed skew the slots get nearly what a statistics file of the same traffic would give them."""
    rng = np.random.default_rng(1)
    chances, forecast = zipf(rng), forecast_of()
    for _ in range(300):
        forecast.observe(observed(counts_of(rng, chances, 4)), PRICE)
    later = counts_of(rng, chances, 4000)
    best = np.sort(later[0])[-SLOTS:].sum() / later.sum()
    assert hits(forecast, later) > 0.97 * best
    assert forecast.half_lives[0] >= 128


def test_a_new_topic_is_followed() -> None:
    """After the skew has changed, experts of the old one are left within some hundred tokens."""
    rng = np.random.default_rng(2)
    old, new, forecast = zipf(rng), zipf(rng), forecast_of()
    for chances, steps in ((old, 400), (new, 400)):
        for _ in range(steps):
            forecast.observe(observed(counts_of(rng, chances, 1)), PRICE)
    later = counts_of(rng, new, 4000)
    best = np.sort(later[0])[-SLOTS:].sum() / later.sum()
    assert hits(forecast, later) > 0.9 * best


def test_tokens_that_repeat_their_neighbours_experts_are_forecast_by_recency() -> None:
    """Where each token keeps most of the last one's experts and topics are short, a short half-life wins."""
    rng = np.random.default_rng(3)
    forecast = forecast_of()
    chosen = rng.choice(EXPERTS, TOP_K, replace=False)
    for _ in range(3000):
        if rng.random() < 0.2:
            others = np.setdiff1d(np.arange(EXPERTS), chosen)
            chosen[rng.integers(TOP_K)] = rng.choice(others)
        forecast.observe(observed(np.bincount(chosen, minlength=EXPERTS)[None]), PRICE)
    assert forecast.half_lives[0] <= 32


def test_recorded_counts_are_known_at_once_and_given_up_for_what_is_seen() -> None:
    """A file of another topic decides the first tokens and not the later ones; a record of it reads back."""
    rng = np.random.default_rng(4)
    recorded, real = zipf(rng), zipf(rng)
    known = counts_of(rng, recorded, 5000)
    forecast = forecast_of(known)
    assert set(np.argsort(-forecast.expected[0])[:4]) <= set(np.argsort(-known[0])[:6])
    for _ in range(500):
        forecast.observe(observed(counts_of(rng, real, 4)), PRICE)
    later = counts_of(rng, real, 4000)
    assert hits(forecast, later) > 0.9 * np.sort(later[0])[-SLOTS:].sum() / later.sum()
    again = forecast_of(forecast.to_record())
    assert hits(again, later) > 0.9 * np.sort(later[0])[-SLOTS:].sum() / later.sum()


def test_a_prompt_is_heard_and_does_not_drown_all_else() -> None:
    """A prompt of thousands of tokens weighs as some dozen decoded ones."""
    rng = np.random.default_rng(5)
    usual, prompt = zipf(rng), zipf(rng)
    forecast = forecast_of()
    for _ in range(2000):
        forecast.observe(observed(counts_of(rng, usual, 1)), PRICE)
    long_ago = forecast._tokens[-1, 0]
    forecast.observe(observed(None, counts_of(rng, prompt, 8000)), PRICE)
    assert forecast._tokens[-1, 0] < long_ago + 65
    assert forecast._sums[0, 0].argmax() == prompt.argmax()


def test_copies_that_bring_nothing_are_not_made() -> None:
    """Where each token's experts differ from the last one's by chance alone, hardly anything is exchanged."""
    rng, forecast = np.random.default_rng(6), forecast_of()
    resident, exchanged = np.arange(EXPERTS)[None] < SLOTS, 0
    for _ in range(3000):
        forecast.observe(observed(counts_of(rng, np.full(EXPERTS, 1 / EXPERTS), 1)), PRICE)
        found = worthwhile(forecast.expected, resident, PRICE)
        resident[0, found.newcomers], resident[0, found.leavers] = True, False
        exchanged += len(found)
    assert exchanged < 40, exchanged


class Reference:
    """The rules of `kernels/placement/forecast.h`, in numpy and one half-life after the other."""

    def __init__(self, resident: NDArray[np.bool_], top_k: int) -> None:
        self.top_k = top_k
        self.resident = [resident.copy() for _ in HALF_LIVES]
        self.sums = [np.zeros(resident.shape) for _ in HALF_LIVES]
        self.tokens = [np.zeros(len(resident)) for _ in HALF_LIVES]
        self.saved = [np.zeros(len(resident)) for _ in HALF_LIVES]

    def observe(self, seen: Observation, price: float) -> None:
        """Adds a prompt's choices, of 64 tokens at most, judges the slots, adds decode's, exchanges."""
        prompted = seen.prefill.sum(axis=1) / self.top_k
        scale = np.minimum(1.0, 64.0 / np.maximum(prompted, 1e-9))
        decoded = seen.decode.sum(axis=1) / self.top_k
        for n, half_life in enumerate(HALF_LIVES):
            self.add(n, half_life, seen.prefill * scale[:, None], prompted * scale)
            hits = (seen.decode * self.resident[n]).sum(axis=1)
            self.saved[n] = self.saved[n] * 0.5 ** (decoded / 2048.0) + hits
            self.add(n, half_life, seen.decode, decoded)
        for n in range(len(HALF_LIVES)):
            expected = self.rates(n) * self.tokens[n][:, None]
            for row in range(len(expected)):
                self.exchange(n, row, expected[row], price)

    def add(self, n: int, half_life: float, choices: NDArray[Any], tokens: NDArray[np.float64]) -> None:
        """Forgets what is older than these tokens, and adds what they chose."""
        kept = 0.5 ** (tokens / half_life)
        self.sums[n] = self.sums[n] * kept[:, None] + choices
        self.tokens[n] = self.tokens[n] * kept + tokens

    def rates(self, n: int) -> NDArray[np.float64]:
        """Returns the choices by a token, which lean on the longest half-life's, and these on even ones."""
        even = self.top_k / self.sums[n].shape[1]
        usual = (self.sums[-1] + 32.0 * even) / (self.tokens[-1] + 32.0)[:, None]
        prior = min(HALF_LIVES[n], 32.0)
        found: NDArray[np.float64] = (self.sums[n] + prior * usual) / (self.tokens[n] + prior)[:, None]
        return found

    def exchange(self, n: int, row: int, expected: NDArray[np.float64], price: float) -> None:
        """Takes the best absent one for the worst present one, as long as that pays."""
        resident = self.resident[n][row]
        moved = np.zeros(len(resident), bool)
        while True:
            absent, present = (np.flatnonzero(~moved & (resident == there)) for there in (False, True))
            if not absent.size or not present.size:
                return
            newcomer, leaver = absent[expected[absent].argmax()], present[expected[present].argmin()]
            if not expected[newcomer] - expected[leaver] > price:
                return
            resident[newcomer], resident[leaver] = True, False
            moved[[newcomer, leaver]] = True
            self.saved[n][row] -= price


@pytest.mark.parametrize("seed", range(5))
def test_the_kernel_forecasts_as_the_rules_say(seed: int) -> None:
    """Prompts and decode steps of any size, layers that saw nothing: rates, half-lives and slots agree."""
    rng = np.random.default_rng(seed)
    resident = rng.random((3, EXPERTS)) < 0.2
    forecast, reference = RoutingForecast(resident, TOP_K), Reference(resident, TOP_K)
    chances = [zipf(rng) for _ in resident]
    for _ in range(120):
        tokens = rng.integers(0, [8, 200], size=(3, 2)) * (rng.random((3, 2)) < [0.9, 0.1])
        decode, prefill = (
            np.concatenate([counts_of(rng, chances[row], int(tokens[row, kind])) for row in range(3)])
            for kind in range(2)
        )
        price = float(rng.choice([1.0, 4.0]))
        forecast.observe(Observation(decode, prefill), price)
        reference.observe(Observation(decode, prefill), price)
    saved = np.array(reference.saved)
    best = len(HALF_LIVES) - 1 - saved[::-1].argmax(axis=0)
    assert forecast.half_lives.tolist() == [HALF_LIVES[n] for n in best]
    rates = np.stack([reference.rates(n)[row] for row, n in enumerate(best)])
    assert forecast.rates == pytest.approx(rates, rel=1e-9)
    remembered = np.array([reference.tokens[n][row] for row, n in enumerate(best)])
    assert forecast.expected == pytest.approx(rates * remembered[:, None], rel=1e-9)


@pytest.mark.parametrize(
    ("decode", "named"),
    [
        (np.zeros((1, 3), np.int64), "decode has shape"),
        (np.zeros((1, EXPERTS), np.int32), "decode has dtype"),
    ],
)
def test_counts_of_another_shape_or_type_are_refused(decode: NDArray[Any], named: str) -> None:
    """An observation of other layers, or of another type, is an error that says what was wrong."""
    with pytest.raises(ValueError, match=named):
        forecast_of().observe(Observation(decode, np.zeros((1, EXPERTS), np.int64)), PRICE)


def exchanges(better: float, price: float = PRICE) -> int:
    """Returns how many there are where one absent expert is expected as often, and all present ones
    10 times.
    """
    expected = np.zeros((1, EXPERTS))
    expected[0, :SLOTS], expected[0, 40] = 10.0, better
    return len(worthwhile(expected, expected == 10.0, price))


def test_an_exchange_has_to_earn_its_copy() -> None:
    """What is expected more often by less than the copy's reads stays where it is."""
    assert exchanges(10.0 + 0.9 * PRICE) == 0
    assert exchanges(10.0 + 1.1 * PRICE) == 1
    assert exchanges(10.0 + 1.1 * PRICE, price=2 * PRICE) == 0


def test_choices_that_fetch_slots_hold_save_nothing() -> None:
    """A copy costs more choices the more of them are fetched anyhow, and never endlessly many."""
    assert price_beside_fetching(PRICE, 0.0) == PRICE
    assert price_beside_fetching(PRICE, 0.5) == 4 * PRICE
    assert price_beside_fetching(PRICE, 1.0) == pytest.approx(100 * PRICE)


@pytest.mark.parametrize("seed", range(20))
def test_exchanges_are_possible(seed: int) -> None:
    """Newcomers are absent and leavers present, each in one exchange; gains descend; no more than asked
    for.
    """
    rng = np.random.default_rng(seed)
    expected = rng.random((5, EXPERTS)) * 20
    resident = rng.random(expected.shape) < rng.choice([0.0, 0.2, 0.9, 1.0])
    most = int(rng.integers(1, 30))
    found = worthwhile(expected, resident, PRICE).best(most)
    assert len(found) <= most
    assert found.gains.tolist() == sorted(found.gains.tolist(), reverse=True)
    gains = expected[found.rows, found.newcomers] - expected[found.rows, found.leavers] - PRICE
    assert gains == pytest.approx(found.gains)
    for experts, are_leavers in ((found.newcomers, False), (found.leavers, True)):
        pairs = list(zip(found.rows.tolist(), experts.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
        assert all(resident[pair] == are_leavers for pair in pairs)
