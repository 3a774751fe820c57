"""Guards the prefill lane: two steps in flight give the tokens of one, whatever happens, and both get on.

On a device in virtual time, which computes when it is time: who gets a page, a slot or a token too early says
something else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_service.core.interface import Abort, Add, Message, NullObserver, Stop
from gpu_service.core.request import FinishReason, Request
from gpu_service.core.step import Batch
from gpu_service.engine.pacing import LanePace
from gpu_service.experts.client import ExpertUnavailable
from tests.helpers.engine_harness import Knobs, LateSupply, make_request, prompt_of, running_engine
from tests.helpers.virtual_device import (
    Frames,
    Times,
    VirtualEngine,
    VirtualExperts,
    VirtualFollower,
    VirtualLeader,
)

CONTEXT = 256
LOST = ExpertUnavailable(0, "killed")
PARAMS: list[dict[str, object]] = [
    {},
    {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
]


@cache
def truth(seed: int, length: int, max_tokens: int, kind: int) -> list[int]:
    """Returns the tokens of a request that is alone, without a lane."""
    request = make_request("alone", prompt_of(seed, length), max_tokens=max_tokens, seed=seed, **PARAMS[kind])
    with running_engine(budget=256, context_limit=CONTEXT, prefix_caching=False) as harness:
        return harness.run([request])[0]


def add(request: Request) -> Callable[[], Message]:
    """Returns the message of its arrival."""
    return lambda: Add((request,))


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 60),  # arrival, ms
        st.integers(0, 3),  # seed: some prompts share prefixes
        st.integers(1, 150),
        st.integers(1, 14),
        st.integers(0, 1),
        st.none() | st.integers(0, 120),  # abort, ms after the arrival
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=max(20, settings().max_examples), deadline=None)
@given(
    drawn=REQUESTS,
    pages=st.integers(66, 160),
    seqs=st.integers(1, 5),
    budget=st.sampled_from([8, 20, 64]),
    chunk=st.sampled_from([24, 64, 200]),
    overlap=st.booleans(),
    caching=st.booleans(),
    speeds=st.sampled_from([(1e-4, 5e-3), (1e-3, 1e-3), (3e-3, 2e-4)]),
    lost_at=st.sets(st.integers(1, 60), max_size=4),
    broken=st.dictionaries(st.integers(1, 6), st.tuples(st.integers(0, 5), st.booleans()), max_size=2),
    has_lane=st.booleans(),
)
def test_every_interleaving_gives_the_same_tokens(
    drawn: list[tuple[int, int, int, int, int, int | None]],
    pages: int,
    seqs: int,
    budget: int,
    chunk: int,
    overlap: bool,
    caching: bool,
    speeds: tuple[float, float],
    lost_at: set[int],
    broken: dict[int, tuple[int, bool]],
    has_lane: bool,
) -> None:
    """With aborts, preemptions, shared prefixes, lost servers of the main lane and failing steps of the lane;
    without a lane with steps of long prompts that take turns with the others. Afterwards not a page, slot or
    mark is left.
    """
    knobs = Knobs(
        num_pages=pages,
        max_num_seqs=seqs,
        budget=budget,
        overlap=overlap,
        prefix_caching=caching,
        context_limit=CONTEXT,
    )
    experts = VirtualExperts(lambda step: LOST if step in lost_at else None)
    virtual = VirtualEngine(
        knobs,
        Times(main=speeds[0], lane=speeds[1]),
        has_lane=has_lane,
        prefill_chunk_max=chunk,
        experts=experts,
    )
    virtual.steps.streams = not has_lane

    def fails(step: int, layer: int) -> Exception | None:
        at, is_loss = broken.get(step, (-1, False))
        if layer != at:
            return None
        return ExpertUnavailable(-1, "replaced") if is_loss else RuntimeError("boom")

    virtual.lane.fails = fails
    script, requests = [], []
    for index, (arrival, seed, length, max_tokens, kind, abort) in enumerate(drawn):
        name = f"r{index}"
        request = make_request(
            name, prompt_of(seed, length), max_tokens=max_tokens, seed=seed, **PARAMS[kind]
        )
        requests.append((request, truth(seed, length, max_tokens, kind)))
        script.append((arrival / 1e3, add(request)))
        if abort is not None:
            script.append(((arrival + abort) / 1e3, partial(Abort, name)))
    virtual.run(script)
    for request, expected in requests:
        got = virtual.tokens(request)
        assert request.finished
        if request.finish_reason is FinishReason.LENGTH:
            assert got == expected
        else:
            assert got == expected[: len(got)]
            assert request.error_message == (
                "" if request.finish_reason is FinishReason.ABORT else "RuntimeError: boom"
            )


def long_knobs(overlap: bool = True) -> Knobs:
    """Returns the room for a prompt of many steps."""
    return Knobs(num_pages=1200, budget=64, overlap=overlap, context_limit=4096)


def gaps(virtual: VirtualEngine, request: Request, begin: float, end: float) -> list[float]:
    """Times between two tokens of a running stream within a span."""
    times = [at for at in virtual.token_times(request) if begin <= at <= end]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize("shares", [(0.9, 0.9), (0.5, 0.8), (0.25, 0.9)], ids=str)
def test_a_stream_and_a_long_prompt_both_get_on(shares: tuple[float, float], overlap: bool) -> None:
    """However the device divides itself, each keeps half of its rate, and no token waits for a whole step."""
    times = Times(main_share=shares[0], lane_share=shares[1])
    alone = VirtualEngine(long_knobs(overlap), times, prefill_chunk_max=512)
    prompt = make_request("prompt", prompt_of(3, 2048), max_tokens=1)
    alone.run([(0.0, add(prompt))])
    prompt_alone = alone.token_times(prompt)[0]

    both = VirtualEngine(long_knobs(overlap), times, prefill_chunk_max=512)
    stream = make_request("stream", prompt_of(1, 9), max_tokens=150)
    prompt = make_request("prompt", prompt_of(3, 2048), max_tokens=1)
    both.run([(0.0, add(stream)), (0.2, add(prompt))])
    ended = both.token_times(prompt)[0]
    idle = gaps(both, stream, 0.05, 0.2)
    meanwhile = gaps(both, stream, 0.2, ended)
    assert both.lane.launched == 4
    assert sum(meanwhile) / len(meanwhile) <= 2 * sum(idle) / len(idle)
    assert ended - 0.2 <= 2 * prompt_alone
    # A step of the lane takes 60 ms; the device's own doing is at most the whole of a token at its share.
    assert max(meanwhile) <= max(idle) / shares[0] + 5e-3


def without_lane(
    streams: bool, max_added_s: float | None = None
) -> tuple[VirtualEngine, float, list[float], list[float]]:
    """Returns, for one running stream and a prompt of 2048 tokens, when that ended, and the stream's times
    between tokens before it and meanwhile. A step that streams its experts takes 61 ms for 512 tokens, 34 ms
    for 64.
    """
    virtual = VirtualEngine(
        long_knobs(), Times(), has_lane=False, prefill_chunk_max=512, max_added_s=max_added_s
    )
    virtual.steps.streams = streams
    stream = make_request("stream", prompt_of(1, 9), max_tokens=400)
    prompt = make_request("prompt", prompt_of(3, 2048), max_tokens=1)
    virtual.run([(0.0, add(stream)), (0.2, add(prompt))])
    ended = virtual.token_times(prompt)[0]
    return virtual, ended, gaps(virtual, stream, 0.05, 0.2), gaps(virtual, stream, 0.2, ended)


def test_without_a_lane_long_prompts_and_streams_take_turns() -> None:
    """Both get half of the device: with steps that hold both, each token would wait for all experts' copies,
    and only 64 rows would have them.
    """
    _, ended, idle, meanwhile = without_lane(True)
    seconds = 6 * (5e-3 + 512 * 10e-6)
    assert ended - 0.2 <= 2.05 * 4 * seconds
    assert sum(meanwhile) / len(meanwhile) <= 2.05 * sum(idle) / len(idle)
    assert max(meanwhile) <= seconds + 3 * max(idle)


def test_without_a_lane_a_bound_makes_shorter_steps_of_prompts() -> None:
    """`max_itl_ms` is what streams wait for at most, but for the first steps, which are not timed yet."""
    late = 0.045 + 0.012
    for bound, most in ((None, 9), (0.045, 2)):
        _, _, _, found = without_lane(True, bound)
        waits = sum(gap > late for gap in found)
        assert 0 < waits <= most, (bound, sorted(found)[-5:])
        assert bound is not None or waits >= 3


def test_without_a_lane_steps_are_no_longer_than_is_of_use() -> None:
    """While others decode and the link is not waited for, longer steps would only stop others for longer."""
    batches = Batches()
    virtual = VirtualEngine(long_knobs(), Times(), has_lane=False, prefill_chunk_max=512, observer=batches)
    virtual.steps.streams, virtual.steps.useful_tokens = True, 256
    stream = make_request("stream", prompt_of(1, 9), max_tokens=400)
    prompt = make_request("prompt", prompt_of(3, 1024), max_tokens=1)
    virtual.run([(0.0, add(stream)), (0.2, add(prompt))])
    assert [tokens for batch in batches.seen for key, tokens in batch if key == prompt.key] == [256] * 4


def test_a_bound_on_what_is_added_holds() -> None:
    """With a tight bound the lane takes smaller slices than without, and still more than half of its time."""
    worst = {}
    for bound in (1e-3, 1.0):
        times = Times(main_share=0.4, lane_share=0.9)
        virtual = VirtualEngine(long_knobs(), times, prefill_chunk_max=512, max_added_s=bound)
        stream = make_request("stream", prompt_of(1, 9), max_tokens=150)
        prompt = make_request("prompt", prompt_of(3, 2048), max_tokens=1)
        virtual.run([(0.0, add(stream)), (0.2, add(prompt))])
        ended = virtual.token_times(prompt)[0]
        meanwhile = gaps(virtual, stream, 0.2, ended)
        worst[bound] = sum(meanwhile) / len(meanwhile), ended
    assert worst[1e-3][0] < worst[1.0][0]
    assert worst[1e-3][1] - 0.2 < 2 * (worst[1.0][1] - 0.2)


def test_late_tokens_hold_the_lane_only_while_somebody_decodes() -> None:
    """A late token pauses the lane once what is queued has ended, for a bounded time; idleness frees it."""
    now = [0.0]
    pace = LanePace(None, lambda: now[0])
    decode = Batch([make_request("r", [1])], [0], [1], [True])

    def token(after: float, lane_is_open: bool) -> None:
        now[0] += after
        pace.committed(decode, lane_is_open)

    for _ in range(3):
        token(0.01, False)
    pace.opened()
    token(0.01, True)
    assert pace.may_go_on(queued=3)
    token(0.05, True)
    assert not pace.may_go_on(queued=1)
    assert not pace.may_go_on(queued=0), "the main lane has the device for itself"
    now[0] += 0.65 * 0.06
    assert pace.may_go_on(queued=0), "the prompt keeps more than half of its rate"
    assert not pace.may_go_on(queued=2), "slices are smaller now"
    token(0.05, True)
    pace.idled()
    assert pace.may_go_on(queued=3)


def test_short_prompts_are_served_with_a_long_one() -> None:
    """Who arrives while the lane computes gets its answer before the lane's step has ended."""
    virtual = VirtualEngine(long_knobs(), Times(lane=50e-3), prefill_chunk_max=512)
    prompt = make_request("prompt", prompt_of(3, 400), max_tokens=1)
    short = make_request("short", prompt_of(1, 9), max_tokens=4)
    virtual.run([(0.0, add(prompt)), (0.05, add(short))])
    assert virtual.token_times(short)[-1] < virtual.token_times(prompt)[0]
    assert virtual.token_times(short)[0] < 0.08


def test_a_lost_server_does_not_touch_the_lane() -> None:
    """While the main lane waits for its return the prompt's step goes on, and says what it always says."""
    tokens, ends = [], []
    for lost_at in (set[int](), {3}):
        experts = VirtualExperts(dict.fromkeys(lost_at, LOST).get)
        virtual = VirtualEngine(long_knobs(), Times(), prefill_chunk_max=512, experts=experts)
        stream = make_request("stream", prompt_of(1, 9), max_tokens=40)
        prompt = make_request("prompt", prompt_of(3, 500), max_tokens=3)
        virtual.run([(0.0, add(stream)), (0.0, add(prompt))])
        assert experts.recoveries == len(lost_at)
        tokens.append((virtual.tokens(stream), virtual.tokens(prompt)))
        ends.append(virtual.token_times(prompt)[0])
    assert tokens[0] == tokens[1]
    # A server's return takes 0.2 s; the step's 90 ms are not put off by that.
    assert ends[1] < 0.26 < ends[0] + 0.2


def test_the_end_of_the_engine_waits_for_the_lane() -> None:
    """A stop in the middle of a step: every request ends at once, their pages only with the step."""
    virtual = VirtualEngine(long_knobs(), Times(), prefill_chunk_max=512)
    prompt = make_request("prompt", prompt_of(3, 500), max_tokens=3)
    virtual.run([(0.0, add(prompt)), (0.02, Stop)])
    assert prompt.finish_reason is FinishReason.ABORT
    assert not virtual.scheduler.has_work


def test_a_lane_that_can_not_stream_leaves_prompts_to_the_main_lane() -> None:
    """Prompts are the main lane's until the lane's experts are registered, and again while they are
    reloaded.
    """
    virtual = VirtualEngine(long_knobs(), Times(), prefill_chunk_max=512)
    virtual.lane.ready = False
    prompt = make_request("prompt", prompt_of(3, 200), max_tokens=4)
    virtual.run([(0.0, add(prompt))])
    assert virtual.lane.launched == 0
    assert len(virtual.tokens(prompt)) == 4


def test_a_prompt_of_the_lanes_waits_for_pages_that_come_when_a_step_is_planned() -> None:
    """When the lane is asked about, its pages are still with experts: planning the main lane's step brings
    them, and that this step has nothing to compute ends no request.
    """
    virtual = VirtualEngine(long_knobs(), Times(), prefill_chunk_max=512)
    pages = virtual.scheduler.cache.pool.free_pages()
    virtual.scheduler.supply = LateSupply(virtual.scheduler, [page for page in pages if page > 5])
    prompt = make_request("prompt", prompt_of(3, 200), max_tokens=4)
    virtual.run([(0.0, add(prompt))])
    assert virtual.lane.launched == 1
    assert virtual.tokens(prompt) == truth(3, 200, 4, 0)


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
def test_without_a_lane_a_step_of_prompts_grows_while_they_are_streamed(overlap: bool) -> None:
    """The first rank tells all when that begins and ceases; tokens are the same."""
    knobs = Knobs(num_pages=200, budget=16, overlap=overlap, context_limit=CONTEXT)
    sizes = Sizes()
    virtual = VirtualEngine(knobs, Times(), has_lane=False, prefill_chunk_max=100, observer=sizes)
    virtual.steps.streams = True
    warm = make_request("warm", prompt_of(1, 5), max_tokens=3)
    first = make_request("first", prompt_of(2, 150), max_tokens=4)
    virtual.run([(0.0, add(warm)), (0.3, add(first))])
    assert max(sizes.seen) == 100
    assert virtual.tokens(first) == truth(2, 150, 4, 0)
    virtual.steps.streams = False
    virtual.engine._pacing._turns._look_again = 0.0
    again = make_request("again", prompt_of(3, 150), max_tokens=4)
    sizes.seen.clear()
    virtual.run([(virtual.device.now, add(warm_again())), (virtual.device.now + 0.3, add(again))])
    assert max(sizes.seen) <= 16


def test_steps_are_shorter_while_others_decode() -> None:
    """The lane's largest step is for prompts that are alone; who decodes says how long it may wait."""
    batches, waits = Batches(), list[float | None]()
    virtual = VirtualEngine(long_knobs(), Times(), prefill_chunk_max=512, observer=batches)

    def step_tokens(wait_s: float | None) -> int:
        waits.append(wait_s)
        return 128

    virtual.lane.step_tokens = step_tokens  # type: ignore[method-assign]
    alone, stream = (
        make_request("alone", prompt_of(2, 1024), max_tokens=1),
        make_request("s", [1], max_tokens=200),
    )
    prompt = make_request("prompt", prompt_of(3, 1024), max_tokens=1)
    virtual.run([(0.0, add(alone)), (1.0, add(stream)), (1.1, add(prompt))])
    sizes = {
        name: [tokens for batch in batches.seen for key, tokens in batch if key == request.key]
        for name, request in (("alone", alone), ("prompt", prompt))
    }
    assert sizes == {"alone": [512] * 2, "prompt": [128] * 8}
    # The time between two tokens of the stream, whose steps take 6 ms.
    assert waits[0] is None
    assert waits[-1] == pytest.approx(6e-3, rel=0.1)


class Batches(NullObserver):
    """Notes who is in each step, and with how many tokens."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[str, int]]] = []

    def launched(self, batch: Batch) -> None:
        keys = [request.key for request in batch.requests]
        self.seen.append(list(zip(keys, batch.num_new_tokens, strict=True)))


@settings(max_examples=max(15, settings().max_examples), deadline=None)
@given(
    drawn=REQUESTS,
    pages=st.integers(66, 160),
    seqs=st.integers(1, 5),
    overlap=st.booleans(),
    speeds=st.lists(st.sampled_from([(1e-4, 5e-3), (1e-3, 1e-3), (3e-3, 2e-4)]), min_size=2, max_size=2),
    broken=st.dictionaries(st.integers(1, 6), st.integers(0, 5), max_size=2),
)
def test_ranks_do_what_the_first_one_does(
    drawn: list[tuple[int, int, int, int, int, int | None]],
    pages: int,
    seqs: int,
    overlap: bool,
    speeds: list[tuple[float, float]],
    broken: dict[int, int],
) -> None:
    """However fast their devices are, ranks launch the same steps in the same order, those of the lane and
    those between its layers, with aborts and with experts that are replaced in the lane: by what the first
    one saw, never by what they see themselves. Else two streams' collectives would wait for each other.
    """
    knobs = Knobs(num_pages=pages, max_num_seqs=seqs, budget=20, overlap=overlap, context_limit=CONTEXT)
    frames, seen = Frames(), (Batches(), Batches())
    engines = [
        VirtualEngine(
            knobs, Times(main=main, lane=lane), prefill_chunk_max=64, observer=batches, make_inbox=make_inbox
        )
        for (main, lane), batches, make_inbox in zip(
            speeds,
            seen,
            (lambda device: VirtualLeader(device, frames), lambda device: VirtualFollower(device, frames)),
            strict=True,
        )
    ]
    script, requests = [], []
    for index, (arrival, seed, length, max_tokens, kind, abort) in enumerate(drawn):
        prompt, name = prompt_of(seed, length), f"r{index}"
        requests.append(make_request(name, prompt, max_tokens=max_tokens, seed=seed, **PARAMS[kind]))
        script.append((arrival / 1e3, add(requests[-1])))
        if abort is not None:
            script.append(((arrival + abort) / 1e3, partial(Abort, name)))
    for engine in engines:
        engine.lane.fails = lambda step, layer: (
            ExpertUnavailable(-1, "replaced") if broken.get(step) == layer else None
        )
    first, second = engines
    first.lane.step_tokens = lambda wait_s: 30  # type: ignore[method-assign]
    first.run(script)
    second.repeat(frames)
    assert seen[1].seen == seen[0].seen
    assert [second.tokens(request) for request in requests] == [first.tokens(request) for request in requests]
    assert second.lane.launched == first.lane.launched


class Sizes(NullObserver):
    """Notes how many tokens each step has."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def launched(self, batch: Batch) -> None:
        self.seen.append(batch.num_tokens)


def warm_again() -> Request:
    """So short that its size says nothing."""
    return make_request("warm again", prompt_of(4, 5), max_tokens=3)
