"""Invariant: copies of experts lengthen steps by two percent at most, by what steps are measured to take."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from gpu_service.experts.adaptive.budget import MOST_SLOWDOWN, TransferBudget

LINK = 50e9


@dataclass
class Link:
    """Steps beside which copies run one after another; each second of them lengthens a step by `slope`."""

    slope: float
    seed: int = 0
    step_s: float = 0.005
    nbytes: int = 2_500_000
    growth: float = 0.0  # Of a step, each, as KV grows.

    def __post_init__(self) -> None:
        self.rng, self.budget = random.Random(self.seed), TransferBudget()
        self.left = self.copied_s = (
            0.0  # Seconds of copies that have not run; that have, of the latest steps.
        )
        self.taken = self.alone = 0.0  # Seconds of the latest steps, with copies and without.

    def run(self, steps: int, rows: int = 8) -> None:
        """There is always something to copy."""
        self.taken = self.alone = self.copied_s = 0.0
        for _ in range(steps):
            had = self.left > 0
            count = self.budget.allowed(self.step_s, LINK, self.nbytes)
            self.left += count * self.nbytes / LINK
            copying = min(self.left, self.step_s)
            self.left -= copying
            self.step_s *= 1 + self.growth
            noise = self.rng.gauss(1.0, 0.03)
            seconds = self.step_s * noise + self.slope * copying
            self.budget.observe(rows, seconds, True if count else None if had else False)
            self.taken, self.alone = self.taken + seconds, self.alone + self.step_s * noise
            self.copied_s += copying


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slope", [0.3, 1.0, 3.0])
def test_steps_bear_their_copies(slope: float, seed: int) -> None:
    """However much a copy costs: after some seconds of steps all of them together take two percent more at
    most, and copies go on.
    """
    link = Link(slope, seed)
    link.run(4000)
    link.run(4000)
    assert link.taken / link.alone - 1 < 1.25 * MOST_SLOWDOWN
    assert link.copied_s > 0
    assert link.budget.slowdown is not None


def test_copies_that_cost_nothing_get_more_of_the_link() -> None:
    """Such copies get up to a quarter of the time of steps."""
    link = Link(0.0, nbytes=10_000_000)
    link.run(4000)
    link.run(4000)
    first = TransferBudget().share
    assert link.copied_s > 2 * first * link.alone
    assert link.copied_s < 0.3 * link.alone


def test_steps_that_grow_are_not_taken_for_slower_ones() -> None:
    """Twice the time after 4 000 steps, as KV grows: copies that cost nothing are not held back for it."""
    link = Link(0.0, growth=0.00017)
    link.run(4000)
    assert link.budget.share > TransferBudget().share


def test_a_copy_longer_than_a_step_may_take_waits_until_steps_have_saved_for_it() -> None:
    """An expert of 100 MB beside steps of 1 ms: one copy for many steps, and none of them a reference."""
    link = Link(1.0, step_s=0.001, nbytes=100_000_000)
    begun = sum(link.budget.allowed(link.step_s, LINK, link.nbytes) for _ in range(1000))
    assert 0 < begun * link.nbytes / LINK <= 1.1 * 1000 * link.step_s * link.budget.share


def test_experts_for_empty_slots_have_more_of_the_link() -> None:
    """They bring more than an exchange does: nothing leaves for them."""
    plain, refills = TransferBudget(), TransferBudget()
    counts = [
        sum(budget.allowed(0.005, LINK, 2_500_000, flag) for _ in range(800))
        for budget, flag in ((plain, False), (refills, True))
    ]
    assert counts[1] == pytest.approx(4 * counts[0], rel=0.1)


def test_batches_of_other_sizes_are_no_references() -> None:
    """More rows take longer without any copy."""
    budget = TransferBudget()
    for _ in range(100):
        budget.observe(1, 0.001, False)
    for _ in range(400):
        budget.observe(8, 0.004, True)
    assert budget.slowdown is None
