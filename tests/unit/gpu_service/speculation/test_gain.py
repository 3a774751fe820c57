"""Guards what adaptive drafts are for: on a simulated device, outputs are hardly ever slower with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.simulated_engine import SimulatedEngine, in_memory, resident


@pytest.mark.parametrize(
    ("seconds_of", "streams", "changed", "least"),
    [
        (resident, 1, 0.0, 1.8),
        (resident, 1, 0.1, 1.15),
        (resident, 4, 0.0, 1.15),
        (resident, 4, 0.1, 0.975),
        (resident, 16, 0.1, 1.3),
        (resident, 4, 0.3, 0.98),
        (resident, 4, 0.9, 0.98),
        (in_memory, 1, 0.0, 1.2),
        (in_memory, 1, 0.3, 0.97),
        (in_memory, 4, 0.1, 1.04),
        (in_memory, 16, 0.3, 0.99),
    ],
)
def test_drafts_are_worth_it_or_left_out(
    seconds_of: Callable[[int], float], streams: int, changed: float, least: float
) -> None:
    """Times the speed without drafts, after all drafts were accepted, which is the worst that the policy
    can have learned from: what drafts cost is known, and what they give is found out soon enough."""
    plain = SimulatedEngine(seconds_of, speculates=False).decode(streams, changed)
    engine = SimulatedEngine(seconds_of, speculates=True)
    for _ in range(2):
        engine.decode(streams, 0.0)
    speeds = [engine.decode(streams, changed, 512) for _ in range(3)]
    assert sum(speeds) / len(speeds) > least * plain
    assert engine.policy is not None
    assert engine.policy.num_accepted > 0


@pytest.mark.parametrize(
    ("seconds_of", "streams", "right", "least"),
    [
        # Where the layer ran in every step: 0.93 of the speed for one stream, 0.95 for four.
        (resident, 1, 0.5, 0.98),
        (resident, 1, 0.8, 0.98),
        (resident, 1, 0.95, 1.2),
        (resident, 4, 0.5, 0.98),
        (resident, 4, 0.8, 0.98),
        (resident, 4, 0.95, 0.98),
        (resident, 16, 0.8, 1.6),
        (in_memory, 1, 0.5, 0.98),
        (in_memory, 1, 0.8, 0.98),
        (in_memory, 1, 0.95, 0.98),
        (in_memory, 4, 0.5, 0.98),
        (in_memory, 4, 0.95, 1.25),
        (in_memory, 16, 0.8, 1.75),
    ],
)
def test_the_models_own_drafts_are_worth_it_or_left_out(
    seconds_of: Callable[[int], float], streams: int, right: float, least: float
) -> None:
    """The policy decides from the second text on: what the first steps took, which were slow, is not believed
    for long.
    """
    plain = SimulatedEngine(seconds_of, speculates=False).decode(streams, 0.0)
    engine = SimulatedEngine(seconds_of, speculates=True, right=right)
    speeds = [engine.decode(streams, 0.0) for _ in range(3)]
    assert sum(speeds[1:]) / 2 > least * plain


@pytest.mark.parametrize("seconds_of", [resident, in_memory])
@pytest.mark.parametrize("changed", [0.0, 0.9])
def test_two_drafters_are_worth_what_the_better_one_is(
    seconds_of: Callable[[int], float], changed: float
) -> None:
    """With n-grams and the model's layers, texts that repeat themselves and those that do not come as fast as
    with the drafter that suits them."""
    alone = []
    for right in (None, 0.9):
        engine = SimulatedEngine(seconds_of, speculates=True, right=right)
        alone.append(sum(engine.decode(16, changed) for _ in range(3)))
    engine = SimulatedEngine(seconds_of, speculates=True, right=0.9, text=True)
    assert sum(engine.decode(16, changed) for _ in range(3)) > 0.95 * max(alone)
