"""Guards that a device drafter whose drafts are not chosen takes time in few steps only."""

from __future__ import annotations

from gpu_service.speculation.rest import DrafterRest


def run(rest: DrafterRest, steps: int, every: int = 0) -> int:
    """Returns how often it ran in that number of steps, every `every`-th of which had drafts; 0: none."""
    ran = 0
    for step in range(steps):
        if rest.counts_down():
            continue
        ran += 1
        rest.planned(bool(every) and step % every == 0)
    return ran


def test_it_rests_longer_each_time_that_it_is_tried_in_vain() -> None:
    """The drafter runs in a share of many steps that vanishes."""
    rest = DrafterRest()
    first = run(rest, 1 << 10)
    assert first == 64 + 16 + 16
    assert run(rest, 1 << 18) / (1 << 18) < 0.002


def test_a_trial_after_a_rest_is_short_and_one_step_with_drafts_ends_it() -> None:
    """A drafter that is tried again needs a sixteenth of its steps with drafts, as one that has run does."""
    rest = DrafterRest()
    run(rest, 64 + 256)
    assert not rest.is_on
    for step in range(16):
        assert not rest.counts_down()
        rest.planned(step == 15)
    assert not rest.is_on
    assert run(rest, 64) == 64


def test_it_does_not_rest_where_drafts_are_chosen() -> None:
    """And after a time of drafts its next rest is a short one."""
    rest = DrafterRest()
    run(rest, 1 << 14)
    while rest.is_on:
        rest.counts_down()
    assert run(rest, 1 << 12, every=4) == 1 << 12
    in_vain = 0
    while not rest.is_on:
        in_vain += run(rest, 1)
    assert in_vain <= 2 * 64
    before = sum(rest.counts_down() for _ in range(1 << 14))
    assert before == 256


def test_it_does_not_rest_where_usual_drafts_pay_and_ends_where_they_do_again() -> None:
    """Requests whose drafts happen not to be chosen are no reason to rest; a rest that is ended is over."""
    rest = DrafterRest()
    for _ in range(1000):
        assert not rest.counts_down()
        rest.planned(has_drafts=False, pays=lambda: True)
    run(rest, 64)
    assert rest.is_on
    rest.ends()
    assert not rest.is_on
    assert not rest.counts_down()
