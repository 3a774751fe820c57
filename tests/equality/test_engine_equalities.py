"""Guards that how the engine schedules never shows in the tokens: eight equalities on the fake model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from gpu_service.core.request import Request
from tests.helpers.engine_harness import LOOPS, Knobs, make_request, prompt_of, running_engine

LENGTHS = (3, 9, 30, 17, 4, 41, 8, 25)


def workload(**params: object) -> list[Request]:
    """Returns eight different prompts; fresh objects in every call."""
    return [make_request(f"r{i}", prompt_of(i, n), seed=i, **params) for i, n in enumerate(LENGTHS)]


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.5, "repetition_penalty": 1.2}


@pytest.fixture(scope="module", params=[{}, SAMPLED], ids=["greedy", "sampled"])
def truth(request: pytest.FixtureRequest) -> tuple[dict[str, object], list[list[int]]]:
    """Parameters, and the tokens when requests run one at a time, unchunked, uncached, synchronously."""
    with running_engine(budget=256, prefix_caching=False) as harness:
        return request.param, [harness.run([r])[0] for r in workload(**request.param)]


@pytest.mark.covering(2)
@LOOPS
@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(budget=256),
        Knobs(budget=16),
        Knobs(budget=5, max_num_seqs=3),
        Knobs(num_pages=34),
        Knobs(num_pages=22, prefix_caching=False, budget=16),
        Knobs(page_size=16, num_pages=40, budget=20),
    ],
    ids=["batch", "chunked", "tiny-budget", "preempted", "preempted-uncached", "large-pages"],
)
def test_scheduling_does_not_show(
    truth: tuple[dict[str, object], list[list[int]]], knobs: Knobs, loop: dict[str, Any]
) -> None:
    """Batch 1 = batch 8, chunked = unchunked, preempted = not, overlap = synchronous."""
    params, expected = truth
    with running_engine(knobs, **loop) as harness:
        harness.model.gate.clear()
        requests = workload(**params)
        for request in requests:
            harness.engine.submit([request])
        harness.model.gate.set()
        harness.wait(requests)
        assert [harness.tokens(r) for r in requests] == expected
        assert [r.output_token_ids for r in requests] == expected
        if knobs.num_pages < 40:
            assert harness.engine.scheduler.num_preemptions > 0, "the scenario must preempt"


@LOOPS
def test_prefix_hit_equals_miss(loop: dict[str, Any]) -> None:
    """A second run finds its prompt (and the first run's output) in the tree and says the same."""
    with running_engine(**loop) as harness:
        cold = make_request("cold", prompt_of(1, 30))
        warm = make_request("warm", prompt_of(1, 30))
        (first,), (second,) = harness.run([cold]), harness.run([warm])
        longer = make_request("longer", prompt_of(1, 30) + first)
        harness.run([longer])
    assert first == second
    assert (cold.cached_len, warm.cached_len) == (0, 28)
    assert longer.cached_len == 40


def test_namespaces_do_not_share_prefixes() -> None:
    """Equal prompts under different salts never reuse each other's pages."""
    with running_engine() as harness:
        harness.run([make_request("a", prompt_of(1, 30))])
        other = make_request("b", prompt_of(1, 30))
        other.cache_namespace = "salt"
        harness.run([other])
    assert other.cached_len == 0


@LOOPS
def test_outputs_of_one_request_share_the_prompt(loop: dict[str, Any]) -> None:
    """Siblings wait for the first output's prefill and start from its pages."""
    outputs = [make_request("n", prompt_of(2, 30), temperature=1.0, seed=100 + i) for i in range(3)]
    for index, output in enumerate(outputs):
        output.index = index
    with running_engine(**loop) as harness:
        harness.engine.submit(outputs)
        harness.wait(outputs)
        tokens = [harness.tokens(output) for output in outputs]
    assert [output.cached_len for output in outputs] == [0, 28, 28]
    assert len({tuple(t) for t in tokens}) == 3


@LOOPS
def test_logprobs_are_the_same_chunked_or_not(loop: dict[str, Any]) -> None:
    """Prompt and output log-probabilities do not depend on chunks, and chosen greedy tokens rank first."""
    seen = []
    for budget in (256, 7):
        request = make_request("lp", prompt_of(3, 23), logprobs=3, prompt_logprobs=2)
        with running_engine(budget=budget, **loop) as harness:
            harness.run([make_request("warm", prompt_of(3, 23))])
            harness.run([request])
        seen.append((request.prompt_logprobs, request.output_logprobs))
    assert seen[0] == seen[1]
    prompt, output = seen[0]
    assert [record.token_id for record in prompt] == prompt_of(3, 23)
    assert prompt[0].logprob is None
    assert all(record.logprob is not None and record.logprob < 0 for record in prompt[1:])
    assert all(record.top_ids[0] == record.token_id for record in output)
    assert all(len(record.top_ids) == 3 for record in output)


@LOOPS
def test_stop_token_ends_the_output_although_known_late(loop: dict[str, Any]) -> None:
    """The extra token that the overlap loop computed after a stop token is dropped."""
    with running_engine(**loop) as harness:
        (free,) = harness.run([make_request("free", prompt_of(5, 9))])
        stop = free[4]
        until = free.index(stop) + 1
        stopped = make_request("stop", prompt_of(5, 9), stop_token_ids=frozenset({stop}))
        assert harness.run([stopped]) == [free[:until]]
        assert stopped.matched_stop_token == stop
        held = make_request("held", prompt_of(5, 9), stop_token_ids=frozenset({stop}), min_tokens=8)
        (late,) = harness.run([held])
    assert late[:until] != free[:until]
    assert stop not in late[:8]


@LOOPS
def test_bad_words_do_not_depend_on_the_order_of_steps(loop: dict[str, Any]) -> None:
    """With the tokens before known to the device only, a pair that was said is not said any more."""
    with running_engine(budget=256, prefix_caching=False) as harness:
        said = [harness.run([r])[0] for r in workload()]
        pairs = [(tokens[2], tokens[3]) for tokens in said]
        expected = [
            harness.run([make_request(f"b{i}", prompt_of(i, n), seed=i, bad_words=(pairs[i],))])[0]
            for i, n in enumerate(LENGTHS)
        ]
    with running_engine(budget=16, **loop) as harness:
        requests = [
            make_request(f"r{i}", prompt_of(i, n), seed=i, bad_words=(pairs[i],))
            for i, n in enumerate(LENGTHS)
        ]
        assert harness.run(requests) == expected
    for tokens, before, pair in zip(expected, said, pairs, strict=True):
        assert tokens[:3] == before[:3]
        assert pair not in itertools.pairwise(tokens)
