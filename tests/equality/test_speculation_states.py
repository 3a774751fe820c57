"""Guards that states go back where drafts were wrong, whatever else happens to requests.

The fake model's state is a hash of all tokens so far, and its slots hold what no text has until they are
written: a state of a wrong draft, of another request or of a step that was undone shows in all later tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_service.core.request import FinishReason, Request
from gpu_service.experts.client import ExpertUnavailable
from tests.helpers.drafters import ScatteredDrafter
from tests.helpers.engine_harness import (
    LOOPS,
    Harness,
    Knobs,
    make_request,
    num_states,
    prompt_of,
    running_engine,
)
from tests.helpers.fake_model import VOCAB, FakeStateModel, fake_answer

KNOBS = [
    Knobs(state_snapshots=16),
    Knobs(state_snapshots=2, budget=16, num_drafts=5),
    Knobs(state_snapshots=5, num_pages=34, budget=24),
    Knobs(state_snapshots=3, num_pages=26, max_num_seqs=3),
    Knobs(state_snapshots=0, num_pages=30, prefix_caching=False),
]


def scenario(seed: int) -> tuple[list[Request], dict[str, list[int]]]:
    """Requests whose prompts share beginnings, some with an earlier one's answer in it; and all answers."""
    chance = random.Random(seed)
    requests, answers, texts = [], {}, [prompt_of(seed * 5 + i, 40) for i in range(3)]
    for number in range(10):
        text = chance.choice(texts)
        prompt = text[: chance.randrange(3, len(text) + 1)] + prompt_of(number, chance.randrange(1, 6))
        count = chance.randrange(1, 24)
        request = make_request(f"r{number}", prompt, max_tokens=count)
        answers[request.request_id] = fake_answer(prompt, count)
        requests.append(request)
        if len(prompt) + count < 60:
            texts.append(prompt + answers[request.request_id])
    return requests, answers


def check(harness: Harness, seed: int) -> None:
    """All requests of a scenario, some of which are aborted on the way."""
    requests, answers = scenario(seed)
    harness.engine.scheduler.speculation._drafter._answers = answers  # type: ignore[union-attr]
    chance, gone = random.Random(seed), set[str]()
    base = harness.model.calls

    def disturb(call: int) -> None:
        if chance.random() < 0.04:
            gone.add(chance.choice(requests).request_id)
            harness.engine.abort(sorted(gone)[-1])
        if chance.random() < 0.03:
            raise ExpertUnavailable(0, "killed")

    harness.model.before_forward = disturb
    first = chance.randrange(2, len(requests))
    for group in (requests[:first], requests[first:]):
        for request in group:
            harness.engine.submit([request])
        if chance.random() < 0.5:
            harness.wait(group)
    harness.wait(requests)
    assert harness.model.calls > base
    for request in requests:
        said = harness.tokens(request)
        if request.finish_reason is FinishReason.ABORT:
            assert request.request_id in gone
            assert said == answers[request.request_id][: len(said)]
        else:
            assert said == answers[request.request_id], request.request_id
        harness.deltas.pop(request.key)


def engines(loop: dict[str, Any]) -> Iterator[tuple[Harness, ScatteredDrafter]]:
    """One of each kind, for as long as it is asked for."""
    for knobs in KNOBS:
        drafter = ScatteredDrafter({}, VOCAB)
        own = {"num_drafts": knobs.num_drafts or 3, "drafter": drafter, **loop}
        model = FakeStateModel(num_states(Knobs(**{**vars_of(knobs), **own})))
        with running_engine(knobs, model=model, **own) as harness:
            yield harness, drafter


def vars_of(knobs: Knobs) -> dict[str, Any]:
    """Its fields."""
    return {name: getattr(knobs, name) for name in knobs.__dataclass_fields__}


@LOOPS
@pytest.mark.parametrize("steps", [250, pytest.param(35_000, marks=pytest.mark.full)])
def test_states_are_those_of_the_accepted_tokens(steps: int, loop: dict[str, Any]) -> None:
    """Preemptions, aborts, lost experts and prefix hits in the middle of drafts: outputs are those of the
    texts alone."""
    total, hits, preemptions = 0, 0, 0
    for harness, drafter in engines(loop):
        seed, speculation = 0, harness.engine.scheduler.speculation
        assert speculation is not None
        while harness.model.calls < steps / len(KNOBS):
            check(harness, seed)
            seed += 1
        assert 0 < speculation.num_accepted < speculation.num_verified
        assert drafter.wrong_places >= {0, 1, 2}
        total += harness.model.calls
        hits += harness.engine.scheduler.cache.hit_tokens
        preemptions += harness.engine.scheduler.num_preemptions
    assert total >= steps
    assert hits > 0
    assert preemptions > 0


def test_a_snapshot_of_an_accepted_draft_is_a_beginning_for_others() -> None:
    """A second turn starts from the state after whole pages, though a draft's row has computed it."""
    prompt = prompt_of(1, 9)
    said = fake_answer(prompt, 30)
    second = prompt + said[:27] + [5, 6]
    knobs = Knobs(state_snapshots=8, num_drafts=3)
    drafter = ScatteredDrafter({"r": said, "again": fake_answer(second, 12)}, VOCAB)
    with running_engine(knobs, drafter=drafter, model=FakeStateModel(num_states(knobs))) as harness:
        assert harness.run([make_request("r", prompt, max_tokens=30)]) == [said]
        again = make_request("again", second)
        assert harness.run([again]) == [fake_answer(second, 12)]
    assert again.cached_len >= 32
