"""Guards that speculation never shows in the tokens: drafts right, wrong and mixed, in every kind of loop."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_service.core.request import FinishReason, Request
from gpu_service.experts.client import ExpertUnavailable
from gpu_service.speculation.ngram import NGramDrafter
from tests.equality.test_engine_equalities import LENGTHS, workload
from tests.equality.test_engine_faults import raise_at
from tests.helpers.drafters import AnswerDrafter, Answers, DeviceAnswerDrafter, FixedDrafter
from tests.helpers.engine_harness import (
    LOOPS,
    Harness,
    Knobs,
    make_request,
    prompt_of,
    running_engine,
)
from tests.helpers.fake_model import VOCAB

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.01},
    "edited": {
        "temperature": 0.7,
        "logit_bias": ((3, 2.0), (9, -1.0)),
        "bad_words": ((3,), (5, 7)),
        "logprobs": 2,
        "logprob_token_ids": (4, 5),
        "min_tokens": 6,
        "stop_token_ids": frozenset(range(20, 32)),
    },
    "penalised": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.6,
        "logprobs": 1,
    },
    "penalised-greedy": {"repetition_penalty": 1.3, "frequency_penalty": 0.9},
}


def answers_of(**params: Any) -> Answers:
    """Returns what each request of the workload says alone, without speculation."""
    with running_engine(budget=256, prefix_caching=False) as harness:
        return {r.request_id: harness.run([r])[0] for r in workload(**params)}


@pytest.fixture(scope="module", params=list(KINDS))
def truth(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Answers]:
    """Returns parameters and answers."""
    return KINDS[request.param], answers_of(**KINDS[request.param])


def accepted(harness: Harness) -> tuple[int, int]:
    """Drafts verified and accepted."""
    speculation = harness.engine.scheduler.speculation
    assert speculation is not None
    return speculation.num_verified, speculation.num_accepted


@pytest.mark.covering(2)
@LOOPS
@pytest.mark.parametrize("wrong_every", [0, 1, 3], ids=["right", "wrong", "mixed"])
@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(budget=256),
        Knobs(budget=16),
        Knobs(budget=5, max_num_seqs=3),
        Knobs(num_pages=34),
        Knobs(num_pages=22, prefix_caching=False, budget=16),
        Knobs(max_num_seqs=1),
    ],
    ids=["batch", "chunked", "tiny-budget", "preempted", "preempted-uncached", "alone"],
)
def test_drafts_do_not_show(
    truth: tuple[dict[str, Any], Answers], knobs: Knobs, wrong_every: int, loop: dict[str, Any]
) -> None:
    """Right, wrong and mixed drafts give the tokens, the log-probabilities and the ends of decoding one by
    one, next to chunked prompts and preemptions; right ones all count, wrong ones never."""
    params, answers = truth
    drafter = AnswerDrafter(answers, VOCAB, wrong_every)
    with running_engine(budget=256) as plain:
        alone = workload(**params)
        plain.run(alone)
    with running_engine(knobs, drafter=drafter, num_drafts=3, **loop) as harness:
        harness.model.gate.clear()
        requests = workload(**params)
        for request in requests:
            harness.engine.submit([request])
        harness.model.gate.set()
        harness.wait(requests)
        assert {r.request_id: harness.tokens(r) for r in requests} == answers
        for request, other in zip(requests, alone, strict=True):
            assert request.output_token_ids == other.output_token_ids
            assert (request.finish_reason, request.matched_stop_token) == (
                other.finish_reason,
                other.matched_stop_token,
            )
            assert request.output_logprobs == other.output_logprobs
        verified, right = accepted(harness)
        assert verified > 0
        ended_early = [r for r in requests if r.finish_reason is FinishReason.STOP]
        if wrong_every == 0:
            # A draft of the token that ended an output has no row that could accept it.
            assert verified >= right >= verified - len(ended_early)
        else:
            assert right == 0 if wrong_every == 1 else 0 < right < verified
        if knobs.num_pages < 40 and not ended_early:
            assert harness.engine.scheduler.num_preemptions > 0, "the scenario must preempt"


@LOOPS
def test_several_tokens_come_from_one_step_in_order(loop: dict[str, Any]) -> None:
    """With right drafts a delta has several tokens, a quarter of the steps is enough, and the output ends
    at its length or its stop token within an accepted run."""
    with running_engine() as harness:
        (said,) = harness.run([make_request("r", prompt_of(3, 9), max_tokens=22)])
    stop = next(token for index, token in enumerate(said) if index > 4 and token not in said[:index])
    drafter = AnswerDrafter({"r": said, "short": said, "stopped": said}, VOCAB)
    with running_engine(drafter=drafter, num_drafts=3, **loop) as harness:
        whole = make_request("r", prompt_of(3, 9), max_tokens=22)
        short = make_request("short", prompt_of(3, 9), max_tokens=7)
        stopped = make_request("stopped", prompt_of(3, 9), max_tokens=22, stop_token_ids=frozenset({stop}))
        tokens = [harness.run([request])[0] for request in (whole, short, stopped)]
    assert tokens == [said, said[:7], said[: said.index(stop) + 1]]
    assert (short.finish_reason, stopped.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)
    deltas = harness.deltas[whole.key]
    assert max(len(delta.token_ids) for delta in deltas) == 4
    assert len(deltas) <= 2 + 22 // 4 + 1
    assert [delta.num_output_tokens for delta in deltas][-1] == 22


@LOOPS
@pytest.mark.parametrize("wrong_every", [1, 3])
def test_rejected_drafts_leave_nothing_in_the_prefix_tree(wrong_every: int, loop: dict[str, Any]) -> None:
    """A second turn that starts from an answer with rejected drafts says what it says in a fresh engine."""
    with running_engine(**loop) as harness:
        (said,) = harness.run([make_request("r", prompt_of(1, 21), max_tokens=30)])
    second = prompt_of(1, 21) + said + [7, 8]
    with running_engine(**loop) as harness:
        (expected,) = harness.run([make_request("again", second)])
    drafter = AnswerDrafter({"r": said, "again": expected}, VOCAB, wrong_every)
    with running_engine(drafter=drafter, num_drafts=5, **loop) as harness:
        assert harness.run([make_request("r", prompt_of(1, 21), max_tokens=30)]) == [said]
        again = make_request("again", second)
        assert harness.run([again]) == [expected]
        verified, right = accepted(harness)
    # All but the answer's last token had KV.
    assert again.cached_len == (21 + 30 - 1) // 4 * 4
    assert right < verified


@LOOPS
def test_lost_experts_during_a_verifying_step_do_not_show(loop: dict[str, Any]) -> None:
    """A step that is run again writes its drafts where its first run put what it sampled, and counts tokens
    for penalties once."""
    params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 30, "frequency_penalty": 0.7}
    with running_engine() as harness:
        requests = [make_request(f"r{i}", prompt_of(i, 20), seed=i, **params) for i in range(3)]
        said = harness.run(requests, together=True)
    answers = {f"r{i}": tokens for i, tokens in enumerate(said)}
    with running_engine(drafter=AnswerDrafter(answers, VOCAB, 3), num_drafts=3, **loop) as harness:
        harness.model.before_forward = raise_at({2, 3, 6, 7, 10}, ExpertUnavailable(0, "killed"))
        requests = [make_request(f"r{i}", prompt_of(i, 20), seed=i, **params) for i in range(3)]
        assert harness.run(requests, together=True) == said
        assert harness.experts.recoveries == 5
        assert accepted(harness)[1] > 0


@LOOPS
def test_abort_while_drafts_are_verified(loop: dict[str, Any]) -> None:
    """What is aborted in mid flight gives up its pages, and the others say what they say."""
    with running_engine() as harness:
        (said,) = harness.run([make_request("kept", prompt_of(1, 20), max_tokens=60)])
        (other,) = harness.run([make_request("gone", prompt_of(2, 20), max_tokens=60)])
    drafter = AnswerDrafter({"kept": said, "gone": other}, VOCAB, 4)
    with running_engine(drafter=drafter, num_drafts=3, **loop) as harness:
        kept = make_request("kept", prompt_of(1, 20), max_tokens=60)
        gone = make_request("gone", prompt_of(2, 20), max_tokens=60)

        def abort_at(call: int) -> None:
            if call == 5:
                harness.engine.abort("gone")

        harness.model.before_forward = abort_at
        (tokens, cut) = harness.run([kept, gone], together=True)
    assert tokens == said
    assert gone.finish_reason is FinishReason.ABORT
    assert 0 < len(cut) < 60
    assert cut == other[: len(cut)]


@LOOPS
def test_a_rejected_draft_that_is_not_finite_ends_no_request(loop: dict[str, Any]) -> None:
    """A rejected draft's NaN never reaches the request's later tokens, nor those who get its pages next."""
    with running_engine() as harness:
        (said,) = harness.run([make_request("r", prompt_of(1, 9), max_tokens=20)])
    poison = next(token for token in range(1, VOCAB) if token not in said + prompt_of(1, 9))
    with running_engine(drafter=FixedDrafter(poison, poison), num_drafts=2, num_pages=14, **loop) as harness:
        harness.model.poison_token = poison
        for name in ("r", "s", "t"):
            request = make_request(name, prompt_of(1, 9), max_tokens=20)
            assert harness.run([request]) == [said]
            assert request.finish_reason is FinishReason.LENGTH
        assert accepted(harness)[0] > 0


@LOOPS
def test_n_grams_of_a_text_that_repeats_itself_are_accepted(loop: dict[str, Any]) -> None:
    """From end to end with the real drafter: outputs forced to repeat the prompt come several at a time."""
    pattern = [5, 9, 3, 11]
    prompt = pattern * 6
    # All logits but those of four tokens are gone; the fake model chooses among them as it likes.
    params: dict[str, Any] = {"max_tokens": 40, "allowed_token_ids": (5, 9)}
    with running_engine() as harness:
        (said,) = harness.run([make_request("r", prompt, **params)])
    with running_engine(drafter=NGramDrafter(2, 4), num_drafts=3, **loop) as harness:
        assert harness.run([make_request("r", prompt, **params)]) == [said]
        verified, right = accepted(harness)
    assert 0 < right < verified


@LOOPS
def test_drafts_of_both_drafters_are_accepted(loop: dict[str, Any]) -> None:
    """Text that repeats itself is drafted by n-grams, the rest by the device; tokens are those without."""
    prompt, params = [5, 9, 3, 11] * 6, {"max_tokens": 40, "allowed_token_ids": (5, 9)}
    new = make_request("new", prompt_of(1, 20), max_tokens=30)
    repeats = make_request("repeats", prompt, **params)
    with running_engine() as harness:
        said = harness.run([repeats, new])
    drafter = DeviceAnswerDrafter([new.prompt_token_ids + said[1]])
    by = {"drafter": NGramDrafter(2, 4), "device_drafter": drafter}
    with running_engine(num_drafts=3, **by, **loop) as harness:
        again = [Request(r.request_id, r.prompt_token_ids, r.params) for r in (repeats, new)]
        assert harness.run(again, together=True) == said
    assert min(request.accepted_draft_tokens for request in again) > 5


@LOOPS
@pytest.mark.parametrize("fails", [False, True])
def test_drafts_of_the_device_come_back_with_the_tokens(fails: bool, loop: dict[str, Any]) -> None:
    """A device drafter sees every row of every step, its drafts are verified by the next one; where it lost
    its experts the tokens stand."""
    with running_engine() as harness:
        requests = [make_request(f"r{i}", prompt_of(i, n), max_tokens=20) for i, n in enumerate(LENGTHS[:4])]
        said = harness.run(requests)
    texts = [r.prompt_token_ids + tokens for r, tokens in zip(requests, said, strict=True)]
    drafter = DeviceAnswerDrafter(texts, ExpertUnavailable(0, "killed") if fails else None)
    with running_engine(device_drafter=drafter, num_drafts=3, **loop) as harness:
        again = [Request(r.request_id, r.prompt_token_ids, r.params) for r in requests]
        assert harness.run(again, together=True) == said
        verified, right = accepted(harness)
        assert sum(drafter.rows) == sum(LENGTHS[:4]) + 4 * 19 + verified - right
    if fails:
        assert verified == 0
    else:
        assert right == verified > 30
    assert 3 in drafter.wanted
