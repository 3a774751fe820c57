"""Guards what is said of distinct experts: what rows share is counted, by place, with and without drafts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gpu_service.speculation.overlap import Choices, ExpertOverlap, ExpertPlace

_LAYERS, _TOP_K, _EXPERTS = 4, 8, 128


def chain(rng: np.random.Generator, rows: int, kept: int) -> Choices:
    """Returns int32 `[layers, rows, top_k]`: each row keeps `kept` experts of the one before it."""
    found = np.empty((_LAYERS, rows, _TOP_K), dtype=np.int32)
    for layer in range(_LAYERS):
        before = rng.permutation(_EXPERTS)[:_TOP_K]
        for row in range(rows):
            others = np.setdiff1d(np.arange(_EXPERTS), before)
            if row:
                before = np.concatenate((rng.permutation(before)[:kept], rng.permutation(others)))[:_TOP_K]
            found[layer, row] = before
    return found


def sample(rng: np.random.Generator, counts: list[int], kept: int, residents: int = 0) -> Choices:
    """Returns a sampled step: experts below `residents` are in slots, others are left to servers."""
    rows = np.concatenate([chain(rng, count, kept) for count in counts], axis=1)
    left = np.where(rows < residents, -1, rows).astype(np.int32)
    return np.stack((rows, left, left))


def distinct(rows: Choices) -> float:
    """Returns the definition: distinct ids of a layer, on average."""
    return sum(len(set(layer[layer >= 0].tolist())) for layer in rows) / len(rows)


@pytest.mark.parametrize("kept", [0, 2, 4])
@pytest.mark.parametrize(("requests", "drafts"), [(1, 1), (1, 3), (4, 1), (4, 3), (16, 2)])
def test_what_was_counted_says_what_steps_read(requests: int, drafts: int, kept: int) -> None:
    """Distinct experts of steps with any number of draft rows are within a tenth of those of steps with
    one, which were counted."""
    rng = np.random.default_rng(5)
    overlap = ExpertOverlap()
    for _ in range(30):
        overlap.observe(sample(rng, [2] * requests, kept), [2] * requests)
    found = [distinct(sample(rng, [1 + drafts] * requests, kept)[0]) for _ in range(30)]
    expected = overlap.distinct(requests, requests * drafts)
    assert expected[ExpertPlace.SERVED] == pytest.approx(sum(found) / len(found), rel=0.1)
    assert expected[ExpertPlace.RESIDENT] == expected[ExpertPlace.FETCHED] == 0


def test_rows_of_one_request_count_less_than_rows_of_others() -> None:
    """A draft row of a request adds fewer experts than another request's row, by what it shares."""
    rng = np.random.default_rng(6)
    overlap = ExpertOverlap()
    for _ in range(20):
        overlap.observe(sample(rng, [2] * 4, 4), [2] * 4)
    alone, with_draft, with_other = (sum(overlap.distinct(*step)) for step in ((4, 0), (4, 1), (5, 0)))
    assert 0.4 < (with_draft - alone) / (with_other - alone) < 0.65


def test_experts_are_counted_where_they_are() -> None:
    """Half of the experts in slots: half of the choices are, and they are shared as the others are; fetched
    ones are those that are neither resident nor left."""
    rng = np.random.default_rng(7)
    overlap = ExpertOverlap()
    for _ in range(20):
        overlap.observe(sample(rng, [2] * 4, 2, residents=_EXPERTS // 2), [2] * 4)
    resident, fetched, served = overlap.distinct(4, 4)
    assert resident == pytest.approx(served, rel=0.15)
    assert fetched == 0
    rows = sample(rng, [1] * 4, 0)
    rows[2] = np.where(rows[1] % 4, -1, rows[1])
    overlap.observe(rows, [1] * 4)
    assert overlap.places is not None
    assert overlap.places[ExpertPlace.FETCHED].per_row == pytest.approx(6, abs=1.5)


def test_a_moved_placement_is_known_at_once() -> None:
    """Experts that went to the device count there from the first sample on."""
    rng = np.random.default_rng(8)
    overlap = ExpertOverlap()
    for residents in (0, _EXPERTS, 0):
        for _ in range(5):
            overlap.observe(sample(rng, [2], 2, residents), [2])
        resident, _, served = overlap.distinct(1, 1)
        assert (resident == 0, served == 0) == (residents == 0, residents > 0)


def test_nothing_sampled_says_nothing_and_odd_samples_are_bounded() -> None:
    """Rows that choose nothing, all the same or nothing twice leave finite numbers, growing with rows."""
    overlap = ExpertOverlap()
    assert overlap.distinct(3, 2) == (0, 0, 0)
    nothing = np.full((3, 1, 4, 2), -1, dtype=np.int32)
    same = np.zeros_like(nothing)
    apart = np.arange(8, dtype=np.int32).reshape(1, 1, 4, 2).repeat(3, axis=0)
    for choices in (nothing, same, apart, same, nothing):
        overlap.observe(choices, [2, 2])
        counts = [sum(overlap.distinct(2, drafts)) for drafts in range(9)]
        assert all(0 <= fewer <= more < 100 for fewer, more in itertools.pairwise(counts))
