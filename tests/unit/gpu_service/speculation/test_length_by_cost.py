"""Guards that the chosen number of drafts is the best one, wherever experts are and whatever rows share.

On a simulated machine whose steps take a fixed time and one for each distinct expert by its place, with the
engine's own scheduler, policy and clock's books in virtual time. No time is measured: every run gives the
same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.helpers.simulated_engine import SimulatedEngine
from tests.helpers.simulated_routing import PlaceCosts, RoutedMachine

_MOST_DRAFTS = 3
# Lengths of outputs: of a fixed number of drafts, and of each that a policy is measured by.
_FIXED_LENGTH, _LENGTH = 300, 400
FALLING = (0.9, 0.5, 0.2)
Rate = float | Sequence[float]


def fixed_speeds(
    overlap: float, resident: float, streams: int, rate: Rate, costs: PlaceCosts | None = None
) -> list[float]:
    """Returns tokens per second with 0, 1, ... drafts in every step."""
    return [
        SimulatedEngine(
            RoutedMachine(overlap, resident, costs),
            speculates=count > 0,
            right=rate if count else None,
            num_drafts=max(1, count),
            adaptive=False,
        ).decode(streams, 0.0, _FIXED_LENGTH)
        for count in range(_MOST_DRAFTS + 1)
    ]


def mean_speed(engine: SimulatedEngine, streams: int, times: int, length: int = _LENGTH) -> float:
    """Returns tokens over seconds of outputs that follow each other."""
    speeds = [engine.decode(streams, 0.0, length) for _ in range(times)]
    return times / sum(1 / speed for speed in speeds)


@pytest.mark.covering(2)
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.45])
@pytest.mark.parametrize(
    ("resident", "graph_row"),
    [(0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.0, 0.4e-3)],
    ids=["in RAM", "half", "resident", "graphs"],
)
@pytest.mark.parametrize("streams", [1, 4, 16])
@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9, FALLING], ids=["0.5", "0.7", "0.9", "falling"])
def test_the_chosen_length_is_the_best(
    rate: Rate, streams: int, resident: float, graph_row: float, overlap: float
) -> None:
    """Once two outputs have been seen, at least 0.95 of the best fixed number of drafts, trials included,
    and never less than 0.98 of none; also where captured graphs make stairs of what rows cost."""
    costs = PlaceCosts(graph_row=graph_row)
    speeds = fixed_speeds(overlap, resident, streams, rate, costs)
    engine = SimulatedEngine(RoutedMachine(overlap, resident, costs), speculates=True, right=rate)
    mean_speed(engine, streams, 2)
    speed = mean_speed(engine, streams, 3)
    assert speed >= 0.95 * max(speeds)
    assert speed >= 0.98 * speeds[0]


@pytest.mark.parametrize("rate", [0.9, FALLING], ids=["0.9", "falling"])
def test_the_length_follows_load_placement_and_overlap(rate: Rate) -> None:
    """After every change, and within one output of 100 tokens, the next outputs come as fast as with the
    best number for what is then true; so does a drafter that rested because it did not pay before."""
    phases = [(4, 0.25, 0.0), (4, 0.25, 1.0), (16, 0.25, 1.0), (1, 0.0, 0.0), (16, 0.45, 0.0), (4, 0.45, 0.5)]
    machine = RoutedMachine(0.25, 0.0)
    engine = SimulatedEngine(machine, speculates=True, right=rate)
    for streams, overlap, resident in phases:
        machine.overlap, machine.resident_share = overlap, resident
        engine.decode(streams, 0.0, 100)
        speeds = fixed_speeds(overlap, resident, streams, rate)
        speed = mean_speed(engine, streams, 3)
        assert speed >= 0.95 * max(speeds)
        assert speed >= 0.98 * speeds[0]


@pytest.mark.parametrize("rate", [0.5, 0.9])
@pytest.mark.parametrize("resident", [0.0, 1.0], ids=["in RAM", "resident"])
def test_a_load_that_always_changes_is_no_loss(rate: float, resident: float) -> None:
    """Short outputs of ever other numbers of streams: each has to be measured, and all costs are shared."""
    loads = [3, 11, 5, 4, 11, 14, 10, 13, 4, 10, 9, 7, 6, 3, 12, 8]

    def speed(engine: SimulatedEngine) -> float:
        seconds = sum(streams / engine.decode(streams, 0.0, 40) for streams in loads)
        return sum(loads) / seconds

    engines = [
        SimulatedEngine(
            RoutedMachine(0.25, resident),
            speculates=count > 0,
            right=rate if count else None,
            num_drafts=max(1, count),
            adaptive=False,
        )
        for count in range(_MOST_DRAFTS + 1)
    ]
    fixed = [speed(engine) for engine in engines]
    engine = SimulatedEngine(RoutedMachine(0.25, resident), speculates=True, right=rate)
    for _ in range(3):
        speed(engine)
    last = speed(engine)
    assert last >= 0.95 * max(fixed)
    assert last >= 0.98 * fixed[0]
