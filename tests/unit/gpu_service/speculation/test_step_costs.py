"""Guards the model of a step's time: what experts cost is found, followed, and known to all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_service.speculation.overlap import ExpertOverlap, PlaceOverlap
from gpu_service.speculation.step_costs import (
    MeasuredStep,
    StepCosts,
    StepModel,
    bucket,
    features,
    fit,
)

_FIXED, _LOST, _RESIDENT, _SERVED = 3e-3, 2e-3, 0.05e-3, 1e-3
_TRUE = (_FIXED, _LOST, _RESIDENT, 0.0, _SERVED)


def overlap(resident: float, new: float = 0.6) -> ExpertOverlap:
    """Returns that of rows of 8 experts, of which a share is resident."""
    places = (8 * resident, 0.0, 8 * (1 - resident))
    return ExpertOverlap(tuple(PlaceOverlap(per_row, 1 / 16, new) for per_row in places))


def measured(resident: float, *steps: tuple[int, int]) -> list[MeasuredStep]:
    """Returns exact times of steps of (requests, drafts)."""
    done = [features(overlap(resident), *step) for step in steps]
    return [MeasuredStep(own, float(np.dot(_TRUE, own)), 1.0) for own in done]


def test_what_experts_cost_is_found_at_each_place() -> None:
    """From steps with and without drafts at two placements the coefficients are those of the machine, and
    one wild time among them changes little."""
    steps = [(1, 0), (4, 0), (1, 1), (1, 3), (4, 2), (4, 12)]
    known = [*measured(0.0, *steps), *measured(0.6, *steps), *measured(1.0, *steps)]
    for outliers in ([], [known[3]._replace(seconds=5 * known[3].seconds)]):
        found = fit([*known, *outliers])
        assert found is not None
        model = StepModel(found)
        for resident in (0.0, 0.3, 1.0):
            for own in measured(resident, (2, 0), (2, 2), (8, 8), (16, 48)):
                assert model.seconds(own.done) == pytest.approx(own.seconds, rel=0.06)
        assert found[4] > 10 * found[2]


def test_no_model_of_too_few_kinds_of_steps() -> None:
    """Without any step with drafts, or with two kinds only, nothing is said."""
    assert fit(measured(0.0, (1, 0), (1, 1))) is None
    assert fit(measured(0.0, (1, 0), (2, 0), (4, 0))) is None
    assert fit([]) is None


def test_all_times_follow_where_experts_move() -> None:
    """Factors stand for what the model does not know; the rest follows placement and overlap at once."""
    costs = StepCosts()
    plain, verifying = {4: 1.1}, {8: 0.9}
    costs.update(plain, verifying, StepModel(_TRUE, overlap(0.0).places))
    before = costs.plain(4), costs.verifying(4, 4), costs.verifying(4, 2)
    costs.update(plain, verifying, StepModel(_TRUE, overlap(1.0).places))
    after = costs.plain(4), costs.verifying(4, 4), costs.verifying(4, 2)
    for now, then, factor, drafts in zip(after, before, (1.1, 0.9, 1.0), (0, 4, 2), strict=True):
        for seconds, resident in ((then, 0.0), (now, 1.0)):
            assert seconds == pytest.approx(factor * measured(resident, (4, drafts))[0].seconds)


def test_drafts_of_one_request_are_cheaper_than_rows_of_others() -> None:
    """Equally many rows cost less where they share experts, by which one stream's drafts are chosen."""
    costs = StepCosts()
    costs.update({1: 1.0}, {4: 1.0}, StepModel(_TRUE, overlap(0.0, new=0.5).places))
    assert costs.verifying(1, 3) < 0.8 * costs.verifying(3, 1)


def test_every_rank_reads_what_the_first_one_knows() -> None:
    """Costs are the same numbers on the other side, with a model and without."""
    for model in (None, StepModel(_TRUE, overlap(0.4).places), StepModel(_TRUE)):
        costs, other = StepCosts(), StepCosts()
        costs.update({1: 0.1, 4: 1 / 3}, {6: 0.7}, model)
        other.read(costs.to_message())
        assert other.plain(1) == costs.plain(1)
        assert other.plain(2) is None
        for requests in (1, 3, 4):
            for drafts in (1, 2, 9):
                assert other.verifying(requests, drafts) == costs.verifying(requests, drafts)


def test_without_a_model_costs_between_known_rows_are_linear_and_those_beyond_are_as_the_last() -> None:
    """Optimistic where nothing was tried, so that it is tried; many rows are measured together."""
    costs = StepCosts()
    costs.update({1: 1.0, 8: 3.0}, {4: 2.5})
    assert [costs.verifying(1, drafts) for drafts in (1, 3, 5, 7, 29)] == [1.5, 2.5, 2.75, 3.0, 3.0]
    assert costs.most_rows(1) == 16
    assert [bucket(rows) for rows in (1, 9, 64, 65, 73)] == [1, 9, 64, 72, 80]
