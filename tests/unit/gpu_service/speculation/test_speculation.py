"""Guards what speculation decides from: n-grams of a growing text, costs of steps, what drafts are worth."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_service.core.request import Request
from gpu_service.core.step import Batch
from gpu_service.speculation.acceptance import DraftSource
from gpu_service.speculation.ngram import NGramDrafter, NGramIndex
from gpu_service.speculation.pace import DraftPace
from gpu_service.speculation.policy import Speculation
from tests.helpers.drafters import FixedDrafter
from tests.helpers.engine_harness import Knobs, build_scheduler, make_request, prompt_of
from tests.unit.gpu_service.scheduler.test_scheduler import results


def searched(tokens: list[int], size: int, longest: int, count: int) -> list[int]:
    """Returns the definition: of all earlier places with the longest equal suffix the latest."""
    end, best, best_length = len(tokens), -1, size - 1
    for place in range(end - 1, size - 1, -1):
        length = 0
        while length < min(longest, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        if length > best_length:
            best, best_length = place, length
    return [tokens[best + i % (end - best)] for i in range(count)] if best >= 0 else []


@given(
    text=st.lists(st.integers(0, 3), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    size=st.integers(1, 4),
    longest=st.integers(4, 6),
)
def test_a_continuation_is_what_a_search_of_the_text_finds(
    text: list[int], cuts: list[int], size: int, longest: int
) -> None:
    """However the text grew, the index finds what looking at every place finds, among the latest places."""
    index, bounds = NGramIndex(size), sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for begin, end in itertools.pairwise(bounds):
        index.extend(text[begin:end])
    assert index.tokens == text
    found = index.continuation(5, longest)
    places = sum(text[p - size : p] == text[len(text) - size :] for p in range(size, len(text)))
    if places <= 16:
        assert found == searched(text, size, longest, 5)
    else:
        assert found


def test_a_text_that_repeats_itself_goes_on_with_its_period() -> None:
    """Drafts may reach beyond the text's end; a new n-gram has none."""
    drafter = NGramDrafter(2, 8)
    request = make_request("r", [1, 2, 3] * 4)
    assert drafter.propose(request, 7) == [1, 2, 3, 1, 2, 3, 1]
    request.output_token_ids += [1, 9]
    assert drafter.propose(request, 7) == []
    request.output_token_ids += [2, 3]
    assert drafter.propose(request, 3) == [1, 9, 2]


def test_only_the_end_of_a_very_long_text_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, and what is left of the text is found."""
    monkeypatch.setattr("gpu_service.speculation.ngram._MOST_INDEXED", 20)
    index = NGramIndex(2)
    index.extend([7, 8, 9, *range(100, 160), 7, 8])
    assert index.continuation(2, 4) == []
    index.extend([50, 51, 7, 8])
    assert index.continuation(2, 4) == [50, 51]


def speculation(num_drafts: int = 3, **tables: dict[int, float]) -> Speculation:
    """Returns the speculation of a drafter that always has drafts; without `plain` and `verifying` costs are
    unknown.
    """
    scheduler = build_scheduler(Knobs(num_drafts=num_drafts, drafter=FixedDrafter(1, 2, 3)))
    assert scheduler.speculation is not None
    if tables:
        scheduler.speculation.costs.update(tables.get("plain", {}), tables.get("verifying", {}))
    return scheduler.speculation


def gains(share: float) -> list[float]:
    """Returns what three drafts give that are accepted alike often."""
    return [share, share**2, share**3]


def expected(policy: Speculation, request: Request) -> list[int]:
    """Returns the drafts of a request alone, by what is known of it."""
    return policy._choose([policy._gains(request, DraftSource.TEXT, 3)], 1)


def chosen(policy: Speculation, *shares: float) -> list[int]:
    """Returns the drafts of requests in one step, each with three, of which the given share is accepted."""
    return policy._choose([gains(share) for share in shares], len(shares))


@pytest.mark.parametrize(
    ("share", "costs", "expected"),
    [
        (0.9, {"plain": {1: 1.0}, "verifying": {2: 1.0, 4: 1.0}}, [3]),  # rows cost nothing
        (0.9, {"plain": {1: 1.0}, "verifying": {2: 2.0, 4: 4.0}}, [0]),  # each as much as a step
        (0.9, {"plain": {1: 1.0}, "verifying": {2: 1.5, 4: 3.1}}, [1]),  # 1.9 / 1.5 is the best
        (0.4, {"plain": {1: 1.0}, "verifying": {2: 1.5, 4: 2.5}}, [0]),
        (0.9, {"plain": {}, "verifying": {2: 1.0}}, [0]),  # steps without drafts are measured first
        (0.9, {"plain": {1: 1.0}, "verifying": {}}, [1]),  # twice as many rows are tried as are known
        (0.0, {}, [3]),  # costs are not measured, nor will be
    ],
)
def test_drafts_are_as_many_as_make_the_most_tokens_per_second(
    share: float, costs: dict[str, dict[int, float]], expected: list[int]
) -> None:
    """The choice is the maximum of tokens over seconds; no drafts where nothing beats going on without."""
    policy = speculation(**costs)
    if not costs:
        share = 0.001
    assert chosen(policy, share) == expected


def test_drafts_of_a_step_go_to_those_whose_are_right() -> None:
    """Rows that pay are given out by what they give, and never more than a step may have."""
    costs = {rows: 1.0 + 0.15 * rows for rows in range(1, 9)}
    assert chosen(speculation(plain=costs, verifying=costs), 0.9, 0.1) == [3, 0]
    policy = speculation(plain=costs, verifying=costs)
    most = 4 * Knobs().max_num_seqs
    assert sum(chosen(policy, *[0.99] * 30)) <= most - 30
    assert chosen(policy, *[0.99] * most) == [0] * most


def test_a_share_follows_the_latest_drafts_and_is_forgotten() -> None:
    """Wrong drafts are given up; with tokens that had none the request is tried again."""
    policy = speculation(plain={1: 1.0}, verifying={2: 1.3, 4: 1.9})
    request = make_request("r", prompt_of(1, 5))
    assert expected(policy, request) == [3]
    for _ in range(10):
        policy.committed(request, 3, 0)
    assert expected(policy, request) == [0]
    tokens = 0
    while expected(policy, request) == [0]:
        policy.committed(request, 0, 0)
        tokens += 1
        assert tokens < 1500
    assert tokens > 50
    for _ in range(40):
        policy.committed(request, 3, 3)
    assert expected(policy, request) == [3]
    assert (policy.num_drafts, policy.num_verified, policy.num_accepted) == (50, 150, 120)


@pytest.mark.parametrize(("said", "waits"), [(1, True), (9, False)])
def test_steps_wait_for_tokens_whose_drafts_are_usually_accepted(said: int, waits: bool) -> None:
    """The token that a step in flight samples is drafted: only where those were accepted is it worth waiting
    for it, and that is known without a row being spent.
    """
    policy = speculation(plain={1: 1.0}, verifying={2: 1.4, 4: 2.2})
    request = make_request("r", prompt_of(1, 5), max_tokens=90)
    request.computed_len, request.scheduled_len = 5, 6
    for _ in range(30):
        request.inflight_tokens = 1
        answer = policy.waits([request])
        request.inflight_tokens = 0
        request.output_token_ids.append(said)
        request.computed_len, request.scheduled_len = request.scheduled_len, request.total_len
        policy.committed(request, 0, 0)
        request.drafts = ()
    assert answer == waits
    assert policy.num_verified == 0


def test_each_request_gets_the_drafts_that_are_accepted_more_often() -> None:
    """With two drafters the text's come first; where they are rejected, those of the model's layers do."""
    limits = build_scheduler(Knobs(num_drafts=3, drafter=FixedDrafter(1, 2, 3))).limits
    policy = Speculation(limits, 3, FixedDrafter(1, 2, 3), has_device_drafter=True)
    request = make_request("r", prompt_of(1, 5), max_tokens=90)
    policy.committed(request, 0, 0, [7, 8])
    assert policy._draft_tokens(request) == [1, 2, 3]
    assert request.drafts_source == DraftSource.TEXT
    for _ in range(5):
        policy.committed(request, 3, 0, [7, 8])
        assert policy._draft_tokens(request)
        request.drafts_source = DraftSource.TEXT
    policy.committed(request, 3, 0, [7, 8])
    assert policy._draft_tokens(request) == [7, 8]
    assert request.drafts_source == DraftSource.LAYERS
    for _ in range(20):
        policy.committed(request, 2, 0, [7, 8])
        policy._draft_tokens(request)
        request.drafts_source = DraftSource.LAYERS
    policy.committed(request, 2, 0, [7, 8])
    assert policy._draft_tokens(request) == [1, 2, 3]
    policy.committed(request, 0, 0)
    assert policy._draft_tokens(request) == [1, 2, 3]


def test_room_for_drafts_ends_with_the_output() -> None:
    """No row is computed for a token that the output can not have; a request may be kept from speculating."""
    policy = speculation()
    free = make_request("free", prompt_of(1, 5))
    assert policy._room(free, 0) == 3
    assert policy._room(make_request("p", prompt_of(1, 5), presence_penalty=0.1), 0) == 3
    kept = make_request("c", prompt_of(1, 5))
    kept.speculates = False
    assert policy._room(kept, 0) == 0
    # The output's last token is the step's own.
    free.output_token_ids += [1] * 9
    assert policy._room(free, 0) == 2
    assert policy._room(free, 1) == 1
    assert policy._room(free, 2) == 0


def decode(rows: int, drafts: int = 0, num_drafts: int = 0) -> Batch:
    """Returns a step of a number of requests, the first with drafts."""
    requests = [make_request(f"r{i}", [1]) for i in range(rows)]
    own = [[1] * drafts, *[[]] * (rows - 1)] if drafts else []
    ones = [1] * rows
    return Batch(requests, ones, ones, [True] * rows, drafts=own, num_drafts=num_drafts)


class Clock:
    """Moved by the test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_steps_are_measured_from_commit_to_commit_and_forgotten() -> None:
    """Steps with drafts apart from overlapping ones without; idle time, prompts and what stands alone are
    no request's; one pause does not count much; what is old is gone."""
    clock = Clock()
    pace = DraftPace(clock)
    policy = speculation(plain={}, verifying={})

    def commit(batch: Batch, seconds: float, overlaps: bool = True) -> None:
        clock.now += seconds
        pace.committed(batch, overlaps)

    assert pace.message() is None
    commit(decode(1), 5.0)  # the first: since when?
    assert pace.message() is None
    commit(decode(1), 9.0)
    commit(decode(1), 1.0)
    commit(decode(1, 3), 2.0, overlaps=False)
    assert json.loads(pace.message() or "") == [{}, {"4": 2.0}, None], "two steps say too little"
    commit(decode(1), 3.0)
    commit(decode(1, num_drafts=3), 7.0)
    commit(decode(2), 7.0, overlaps=False)
    prompt = decode(1)
    prompt.num_new_tokens = [40]
    commit(prompt, 9.0)
    message = pace.message()
    assert message is not None
    assert json.loads(message) == [{"1": 1.0}, {"1": 1.0, "4": 2.0}, None]
    policy.read(message)
    assert (policy.costs.plain(1), policy.costs.plain(2)) == (1.0, None)
    assert policy.costs.verifying(1, 3) == 2.0
    assert pace.message() is None, "nothing is new"
    commit(decode(1), 1.0)
    commit(decode(1), 100.0)  # a pause
    clock.now += 50
    pace.idled()
    commit(decode(1), 1.0)
    policy.read(pace.message() or "")
    assert policy.costs.plain(1) == pytest.approx(1.25)
    for _ in range(600):
        commit(decode(3), 1.0)
    policy.read(pace.message() or "")
    assert (policy.costs.plain(1), policy.costs.plain(3)) == (None, 1.0)
    assert policy.costs.verifying(1, 3) == 1.0


def test_steps_without_drafts_are_measured_again_soon_and_then_later() -> None:
    """While every step has drafts, what the first ones took is forgotten after 64 steps, then after 128."""
    clock = Clock()
    pace = DraftPace(clock)

    def commit(batch: Batch, overlaps: bool) -> bool:
        clock.now += 1.0
        pace.committed(batch, overlaps)
        message = pace.message()
        return message is not None and json.loads(message)[0] == {}

    for lasts in (64, 128):
        for _ in range(5):
            commit(decode(1), overlaps=True)
        forgotten = [commit(decode(1, 1), overlaps=False) for _ in range(lasts + 1)]
        assert forgotten.index(True) == lasts


def test_a_message_that_is_none_is_an_error() -> None:
    """Ranks of different versions notice."""
    with pytest.raises(ValueError, match="double quotes"):
        speculation().read("{")


def test_drafts_take_no_page_that_a_request_needs() -> None:
    """With only the watermark left, a step has no drafts; with pages it has, beside all requests."""
    for pages, expected in ((10, 0), (40, 3)):
        knobs = Knobs(num_pages=pages, num_drafts=3, drafter=FixedDrafter(1, 2, 3), prefix_caching=False)
        scheduler = build_scheduler(knobs)
        requests = [make_request(f"r{i}", prompt_of(i, 14), max_tokens=9) for i in range(2)]
        for request in requests:
            scheduler.add(request)
        batch = scheduler.schedule()
        assert batch is not None
        assert not batch.drafts
        scheduler.commit(batch, results(batch))
        decoding: Batch | None = scheduler.schedule()
        assert decoding is not None
        assert len(decoding.requests) == 2
        # 15 tokens known and one sampled fit four pages; the drafts need a fifth.
        assert [len(own) for own in decoding.drafts or [[], []]] == [expected] * 2
        assert scheduler.schedule() is None or not expected, "others wait for a step with drafts"
