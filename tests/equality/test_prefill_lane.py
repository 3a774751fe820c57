"""Guards the prefill lane: two steps in flight give the tokens of one, whatever happens, and both get on.

On a device in virtual time, which computes when it is time: who gets a page, a slot or a token too early says
something else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_service.engine.interface import Abort, Add, Message, Stop
from gpu_service.experts.client import ExpertUnavailable
from gpu_service.request import FinishReason, Request
from tests.helpers.engine_harness import Knobs, make_request, prompt_of, running_engine
from tests.helpers.virtual_device import Times, VirtualEngine, VirtualExperts

CONTEXT = 256
LOST = ExpertUnavailable(0, "killed")
PARAMS: list[dict[str, object]] = [
    {},
    {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
]


@cache
def truth(seed: int, length: int, max_tokens: int, kind: int) -> list[int]:
    """The tokens of a request that is alone, without a lane."""
    request = make_request("alone", prompt_of(seed, length), max_tokens=max_tokens, seed=seed, **PARAMS[kind])
    with running_engine(budget=256, context_limit=CONTEXT, prefix_caching=False) as harness:
        return harness.run([request])[0]


def add(request: Request) -> Callable[[], Message]:
    """The message of its arrival."""
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


@settings(max_examples=150, deadline=None)
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
) -> None:
    """With aborts, preemptions, shared prefixes, lost servers of the main lane and failing steps of the lane;
    afterwards not a page, slot or mark is left.
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
        knobs, Times(main=speeds[0], lane=speeds[1]), prefill_chunk_max=chunk, experts=experts
    )

    def fails(step: int, layer: int) -> Exception | None:
        at, is_loss = broken.get(step, (-1, False))
        if layer != at:
            return None
        return ExpertUnavailable(-1, "replaced") if is_loss else RuntimeError("boom")

    virtual.lane.fails = fails
    script, requests = [], []
    for index, (arrival, seed, length, max_tokens, kind, abort) in enumerate(drawn):
        name = f"r{index}"
        request = make_request(name, prompt_of(seed, length), max_tokens=max_tokens, seed=seed, **PARAMS[kind])
        requests.append((request, truth(seed, length, max_tokens, kind)))
        script.append((arrival / 1e3, add(request)))
        if abort is not None:
            script.append(((arrival + abort) / 1e3, lambda name=name: Abort(name)))
    virtual.run(script)
    for request, expected in requests:
        got = virtual.tokens(request)
        assert request.finished
        if request.finish_reason is FinishReason.LENGTH:
            assert got == expected
        else:
            assert got == expected[: len(got)]
            assert request.error_message == ("" if request.finish_reason is FinishReason.ABORT else "RuntimeError: boom")
