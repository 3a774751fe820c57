"""Guards acceptance rates: by place for all requests, by a factor for one, and forgotten."""

from __future__ import annotations

import pytest

from gpu_service.speculation.acceptance import DraftSource, PlaceRates, RequestRates


def test_rates_are_those_of_each_place() -> None:
    """Draft tokens that were verified at a place count there, those after the first wrong one nowhere."""
    rates = PlaceRates(3)
    assert rates.rates(DraftSource.LAYERS) == [1.0, 1.0, 1.0], "what is not known is tried"
    for number in range(900):
        # Of ten steps 8 accept the first, of these 4 the second, of these one the third.
        accepted = (0, 0, 1, 1, 1, 1, 2, 2, 2, 3)[number % 10]
        rates.add(DraftSource.LAYERS, min(3, accepted + 1), accepted, 1)
    assert rates.rates(DraftSource.LAYERS) == pytest.approx([0.8, 0.5, 0.25], abs=0.02)
    assert rates.rates(DraftSource.TEXT) == [1.0, 1.0, 1.0]


def test_what_is_old_is_forgotten() -> None:
    """After many tokens without draft tokens they are tried again, later places as often as those before."""
    rates = PlaceRates(2)
    for _ in range(100):
        rates.add(DraftSource.LAYERS, 1, 0, 1)
    low = rates.rates(DraftSource.LAYERS)
    assert low[0] < 0.05
    rates.add(DraftSource.LAYERS, 0, 0, 4000)
    assert rates.rates(DraftSource.LAYERS)[0] > 0.9


@pytest.mark.parametrize("source", DraftSource)
def test_a_request_differs_by_a_factor(source: DraftSource) -> None:
    """One whose draft tokens are accepted half as often as those of all has half of their rates at every
    place, one that is not known has theirs, and none is above 1."""
    usual = [0.8, 0.6]
    known, better, unknown = RequestRates(), RequestRates(), RequestRates()
    for number in range(400):
        known.add(source, 1, int(number % 5 < 2), 1, usual)
        better.add(source, 2, 2, 1, usual)
    assert known.rates(source, usual) == pytest.approx([0.4, 0.3], rel=0.25)
    assert unknown.rates(source, usual) == pytest.approx(usual)
    assert usual < better.rates(source, usual) < [1.0, 1.0]
    known.add(source, 0, 0, 2000, usual)
    assert known.rates(source, usual) == pytest.approx(usual, rel=0.01)
