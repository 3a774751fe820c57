"""Guards that outputs keep to their constraints, whatever happens to their steps, and disturb no others."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from gpu_service.core.constraint import OutputConstraint, Words
from gpu_service.core.request import FinishReason, Request
from gpu_service.core.step import StepPlan
from gpu_service.engine import token_masks
from gpu_service.engine.step_runner import LaunchedStep, StepRunner
from gpu_service.experts.client import ExpertUnavailable
from gpu_service.server.responses import complete
from moebius.grammar.compile import GrammarError
from protos.engine_pb2 import Choice, Constraint
from tests.helpers.constraints import compiler, constrained, ids_of, text_of
from tests.helpers.device_experts import DoomedExperts, DoomedModel, Failure
from tests.helpers.drafters import AnswerDrafter
from tests.helpers.engine_harness import LOOPS, Knobs, make_request, prompt_of, running_engine
from tests.helpers.fake_model import VOCAB

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["disc", "bar", None]},
        "n": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        "on": {"type": "boolean"},
    },
    "required": ["kind", "n", "on"],
    "additionalProperties": False,
}
COLOURS = ["red", "reddish", "green"]
PATTERN = r"[a-f]{2,5}-[0-9]{3}"
GRAMMARS = [
    Constraint(json_schema=json.dumps(SCHEMA), no_whitespace=True),
    Constraint(choice=Choice(options=COLOURS)),
    Constraint(regex=PATTERN),
    Constraint(lark='start: "<" (item ",")~2 item ">"\nitem: /[xyz]{1,4}/'),
]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
LENGTHS = (3, 9, 30, 17, 4, 41, 8, 25)


def check(request: Request, text: str) -> None:
    """The text is what its constraint asks for."""
    assert request.constraint is not None
    assert request.finish_reason is FinishReason.STOP, (request.error_message, text)
    kind = request.constraint.source.WhichOneof("kind")
    if kind == "json_schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif kind == "choice":
        assert text in COLOURS
    else:
        pattern = PATTERN if kind == "regex" else "<([xyz]{1,4},){2}[xyz]{1,4}>"
        assert re.fullmatch(pattern, text), text


def workload(
    is_constrained: Callable[[int], bool] = lambda index: index % 2 == 0, **params: Any
) -> list[Request]:
    """Returns eight prompts, some with a constraint; fresh objects in every call."""
    return [
        constrained(f"r{i}", prompt_of(i, n), GRAMMARS[i // 2 % 4], seed=i, **params, max_tokens=42)
        if is_constrained(i)
        else make_request(f"r{i}", prompt_of(i, n), seed=i, **params)
        for i, n in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module", params=[{}, SAMPLED], ids=["greedy", "sampled"])
def truth(request: pytest.FixtureRequest) -> tuple[dict[str, Any], list[list[int]]]:
    """Parameters, and the tokens when requests run one at a time, unchunked, uncached, synchronously."""
    with running_engine(budget=256, prefix_caching=False) as harness:
        requests = workload(**request.param)
        tokens = [harness.run([one])[0] for one in requests]
    for one, output in zip(requests, tokens, strict=True):
        if one.constraint is not None:
            check(one, text_of(output))
    return request.param, tokens


@pytest.mark.covering(2)
@LOOPS
@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(budget=256),
        Knobs(budget=16),
        Knobs(budget=5, max_num_seqs=3),
        Knobs(num_pages=28),
        Knobs(num_pages=22, prefix_caching=False, budget=16),
    ],
    ids=["batch", "chunked", "tiny-budget", "preempted", "preempted-uncached"],
)
def test_scheduling_does_not_show(
    truth: tuple[dict[str, Any], list[list[int]]], knobs: Knobs, loop: dict[str, Any]
) -> None:
    """Batch 1 = batch 8, chunked = unchunked, preempted = not, overlap = synchronous, masked or not."""
    params, expected = truth
    with running_engine(knobs, **loop) as harness:
        assert harness.run(workload(**params), together=True) == expected
        if knobs.num_pages < 40:
            assert harness.engine.scheduler.num_preemptions > 0, "the scenario must preempt"


@pytest.mark.covering(2)
@LOOPS
@pytest.mark.parametrize("wrong_every", [0, 1, 3], ids=["right", "wrong", "mixed"])
@pytest.mark.parametrize("knobs", [Knobs(budget=256), Knobs(num_pages=28)], ids=["batch", "preempted"])
def test_drafts_do_not_show(
    truth: tuple[dict[str, Any], list[list[int]]], knobs: Knobs, wrong_every: int, loop: dict[str, Any]
) -> None:
    """A draft's row has the mask after the drafts before it: outputs are those of decoding one by one, right
    drafts all count, and what a grammar refuses is not verified at all."""
    params, expected = truth
    requests = workload(**params)
    answers = {one.request_id: tokens for one, tokens in zip(requests, expected, strict=True)}
    drafter = AnswerDrafter(answers, VOCAB, wrong_every)
    with running_engine(knobs, drafter=drafter, num_drafts=3, **loop) as harness:
        assert harness.run(requests, together=True) == expected
        speculation = harness.engine.scheduler.speculation
        assert speculation is not None
        constrained_ones = [one for one in requests if one.constraint is not None]
        accepted = sum(one.accepted_draft_tokens for one in constrained_ones)
        rejected = sum(one.rejected_draft_tokens for one in constrained_ones)
        if wrong_every == 1:
            assert accepted == 0
        else:
            assert accepted > 15
        if wrong_every == 0:
            # At an output's end there is no row that could accept the draft.
            assert rejected <= len(constrained_ones)
        assert sum(one.accepted_draft_tokens for one in requests) == speculation.num_accepted


@LOOPS
@pytest.mark.parametrize("limit", [0, 3, 7])
def test_drafts_around_a_thought_do_not_show(limit: int, loop: dict[str, Any]) -> None:
    """Where a thought ends, by itself or by force, within the drafts of a step."""

    def one() -> Request:
        source = Constraint(regex="[a-f]{4}[0-9]+", **AFTER, max_reasoning_tokens=limit)
        return constrained("r", prompt_of(3, 9), source, temperature=0.9, seed=limit, max_tokens=30)

    with running_engine() as harness:
        (said,) = harness.run([one()])
    for wrong_every in (0, 4):
        drafter = AnswerDrafter({"r": said}, VOCAB, wrong_every)
        with running_engine(drafter=drafter, num_drafts=4, **loop) as harness:
            request = one()
            assert harness.run([request]) == [said]
            assert request.accepted_draft_tokens > 8


@LOOPS
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_requests_without_a_constraint_are_not_disturbed(
    params: dict[str, Any], loop: dict[str, Any]
) -> None:
    """Their tokens are those of a batch without any constraint."""
    with running_engine(**loop) as harness:
        alone = harness.run(workload(lambda index: False, **params), together=True)
    with running_engine(**loop) as harness:
        mixed = harness.run(workload(**params), together=True)
    assert mixed[1::2] == alone[1::2]


LOST = ExpertUnavailable(0, "killed")


def run_failing(
    fails_at: Callable[[int], Failure | None], requests: list[Request]
) -> tuple[list[list[int]], DoomedExperts]:
    """Tokens in an engine whose experts are lost at some steps, found out one step late."""
    experts = DoomedExperts(fails_at)
    with running_engine(
        overlap=True,
        device_runner=True,
        budget=24,
        max_num_seqs=4,
        experts=experts,
        model=DoomedModel(experts),
    ) as harness:
        return harness.run(requests, together=True), experts


def test_lost_experts_do_not_show(truth: tuple[dict[str, Any], list[list[int]]]) -> None:
    """Tokens stay the same wherever the failure falls: before or after the masks of the step behind it were
    supplied.
    """
    params, expected = truth
    steps = run_failing(lambda step: None, workload(**params))[1].steps
    for lost in range(1, steps + 1, 3):
        tokens, experts = run_failing(
            lambda step, lost=lost: LOST if step == lost else None, workload(**params)
        )
        assert tokens == expected, lost
        assert experts.recoveries >= 1
    for every in (2, 3):
        tokens, _ = run_failing(
            lambda step, every=every: LOST if step % every == 0 else None, workload(**params)
        )
        assert tokens == expected, every


OVERLAPPING = pytest.mark.parametrize(
    "loop", [{"overlap": True}, {"overlap": True, "device_runner": True}], ids=["host", "device"]
)


class Watching(StepRunner):
    """Passes steps on, and notes what was launched and supplied."""

    def __init__(self, inner: StepRunner) -> None:
        self._inner = inner
        self.awaiting: list[bool] = []

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.awaiting.append(plan.awaits_masks)
        return self._inner.launch(plan)

    def zero_pages(self, pages: list[int]) -> None:
        self._inner.zero_pages(pages)

    def close(self) -> None:
        self._inner.close()


@OVERLAPPING
def test_steps_await_masks_only_where_there_are_any(loop: dict[str, Any]) -> None:
    """A batch without a constraint is launched whole; with one, before the token that its mask depends on."""
    with running_engine(**loop) as harness:
        watching = Watching(harness.engine._runner)
        harness.engine._runner = watching
        harness.run(workload(lambda index: False), together=True)
        assert len(watching.awaiting) > 10
        assert not any(watching.awaiting)
        harness.run([replace_name(one, "again") for one in workload(lambda index: index == 0)], together=True)
        assert sum(watching.awaiting) > 3


def replace_name(request: Request, name: str) -> Request:
    """Returns the same request under another id."""
    request.request_id = f"{name}-{request.request_id}"
    return request


@OVERLAPPING
def test_no_overlap_is_lost(loop: dict[str, Any]) -> None:
    """With a constraint as without one, a step is launched before the one before it is committed."""
    depths: list[int] = []
    with running_engine(**loop) as harness:
        engine = harness.engine
        launch = engine._runner.launch

        def noting(plan: StepPlan) -> LaunchedStep:
            depths.append(len(engine._in_flight))
            return launch(plan)

        engine._runner.launch = noting  # type: ignore[method-assign]
        harness.run([constrained("r", prompt_of(1, 9), Constraint(regex="[a-z]{30}"))])
    assert depths.count(1) >= 28


@LOOPS
def test_several_outputs_of_one_request_have_a_state_each(loop: dict[str, Any]) -> None:
    """`n` outputs from one compiled grammar."""
    made = compiler().make(GRAMMARS[0], 4)
    requests = []
    for index, constraint in enumerate(made):
        request = make_request("n", prompt_of(2, 12), temperature=1.5, seed=index, max_tokens=60)
        request.index, request.constraint = index, constraint
        requests.append(request)
    with running_engine(**loop) as harness:
        harness.engine.submit(requests)
        harness.wait(requests)
        texts = [text_of(harness.tokens(request)) for request in requests]
    for request, text in zip(requests, texts, strict=True):
        check(request, text)
    assert len(set(texts)) > 1


@LOOPS
def test_an_output_ends_with_its_grammar(loop: dict[str, Any]) -> None:
    """At once where nothing may follow, even if ends of sequences are ignored; else with the end token."""
    with running_engine(**loop) as harness:
        fixed = constrained("fixed", prompt_of(1, 9), Constraint(regex="yes"), ignore_eos=True)
        short = constrained("short", prompt_of(1, 9), Constraint(regex="yes"), max_tokens=2)
        least = constrained("least", prompt_of(1, 9), Constraint(regex="yes"), min_tokens=9)
        assert harness.run([fixed])[0] == ids_of("yes")
        assert (fixed.finish_reason, fixed.matched_stop_token) == (FinishReason.STOP, None)
        assert text_of(harness.run([short])[0]) == "ye"
        assert short.finish_reason is FinishReason.LENGTH
        assert harness.run([least])[0] == ids_of("yes")


@LOOPS
def test_min_tokens_puts_the_end_off(loop: dict[str, Any]) -> None:
    """The end token is allowed where the grammar may stop, and not before the minimum of tokens."""
    likes_end = {"logit_bias": ((0, 100.0),), "min_tokens": 7}
    with running_engine(**loop) as harness:
        request = constrained("r", prompt_of(1, 9), Constraint(regex="[ab]+"), **likes_end)
        tokens = harness.run([request])[0]
        never = constrained("s", prompt_of(1, 9), Constraint(regex="[ab]{3}[cd]*"), logit_bias=((0, 100.0),))
        early = harness.run([never])[0]
        on = constrained("t", prompt_of(1, 9), Constraint(regex="[ab]+"), ignore_eos=True, max_tokens=11)
        assert set(text_of(harness.run([on])[0])) <= {"a", "b"}
        assert on.finish_reason is FinishReason.LENGTH
    assert re.fullmatch("[ab]{7}", text_of(tokens))
    assert (tokens[-1], request.finish_reason, request.matched_stop_token) == (0, FinishReason.STOP, 0)
    assert re.fullmatch("[ab]{3}", text_of(early))


@LOOPS
def test_what_no_token_can_spell_ends_with_an_error(loop: dict[str, Any]) -> None:
    """An output that no token can continue ends with an error, without a hang or any text; requests in the
    same batch go on.
    """
    with running_engine(**loop) as harness:
        stuck = constrained("stuck", prompt_of(1, 9), Constraint(regex="[ab]{2}日"))
        other = make_request("other", prompt_of(2, 9))
        tokens, whole = harness.run([stuck, other], together=True)
        assert stuck.finish_reason is FinishReason.ERROR
        assert "constraint" in stuck.error_message
        assert len(tokens) <= 2
        assert other.finish_reason is FinishReason.LENGTH
        assert len(whole) == 12


@LOOPS
def test_a_matcher_that_fails_ends_its_output_alone(
    loop: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception while masks are computed is the constrained requests' error."""
    with running_engine(**loop) as harness:
        broken = constrained("broken", prompt_of(1, 9), Constraint(regex="[a-z]{30}"))
        other = make_request("other", prompt_of(2, 9))
        assert broken.constraint is not None
        calls = []

        def fail(words: object, banned: object) -> bool:
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("the matcher broke")
            return finish(words, banned)

        finish = broken.constraint.finish_mask
        monkeypatch.setattr(broken.constraint, "finish_mask", fail)
        harness.run([broken, other], together=True)
        assert broken.finish_reason is FinishReason.ERROR
        assert "the matcher broke" in broken.error_message
        after = make_request("after", prompt_of(4, 9))
        harness.run([after])
        assert after.finish_reason is FinishReason.LENGTH


@LOOPS
def test_aborted_outputs_delay_no_other(loop: dict[str, Any]) -> None:
    """A constrained request may go between the launch of a step and its masks."""
    with running_engine(**loop) as harness:
        endless = constrained("endless", prompt_of(1, 9), Constraint(regex="[a-z]+x{9}"), max_tokens=110)
        other = make_request("other", prompt_of(2, 9), max_tokens=40)
        harness.engine.submit([endless])
        harness.engine.submit([other])
        harness.wait_tokens(endless, 4)
        harness.engine.abort("endless")
        harness.wait([endless, other])
        assert endless.finish_reason is FinishReason.ABORT
        assert other.finish_reason is FinishReason.LENGTH


THOUGHT_END = ids_of("/t")
AFTER = {"after_token_ids": THOUGHT_END}


@LOOPS
@pytest.mark.parametrize("limit", [0, 1, 2, 5, 9])
def test_the_grammar_begins_after_the_thought_which_is_bounded(limit: int, loop: dict[str, Any]) -> None:
    """Anything but the output's end, until the limit; then the end is forced, then the grammar holds."""
    source = Constraint(regex="[ab]{4}", max_reasoning_tokens=limit, **AFTER)
    with running_engine(**loop) as harness:
        request = constrained("r", prompt_of(1, 9), source, logit_bias=((0, 100.0),))
        text = text_of(harness.run([request])[0])
    assert 0 not in request.output_token_ids
    assert re.fullmatch(rf"(?s).{{{limit}}}/t[ab]{{4}}", text), text
    assert request.finish_reason is FinishReason.STOP


@LOOPS
def test_a_sentence_may_end_the_thought(loop: dict[str, Any]) -> None:
    """`forced_token_ids` come in full, and budgets hold without a grammar, too."""
    source = Constraint(max_reasoning_tokens=3, forced_token_ids=ids_of("enough/t"), **AFTER)
    with running_engine(**loop) as harness:
        request = constrained("r", prompt_of(1, 9), source, max_tokens=20, ignore_eos=True)
        free = make_request("free", prompt_of(1, 9), max_tokens=3)
        text = text_of(harness.run([request])[0])
        assert text[:3] == text_of(harness.run([free])[0])
    assert text[3:11] == "enough/t"
    assert len(text) == 20


@LOOPS
def test_a_thought_that_ends_by_itself_is_followed_by_the_grammar(loop: dict[str, Any]) -> None:
    """Whatever the tokens that end it are split over."""
    likes_end = tuple((token, 50.0) for token in THOUGHT_END)
    source = Constraint(choice=Choice(options=COLOURS), **AFTER)
    with running_engine(**loop) as harness:
        request = constrained(
            "r", prompt_of(1, 9), source, logit_bias=likes_end, frequency_penalty=2.0, max_tokens=80
        )
        text = text_of(harness.run([request])[0])
    thought, answer = text.split("/t", 1)
    assert set(thought) <= {"/", "t"}
    assert answer in COLOURS
    assert request.finish_reason is FinishReason.STOP


@LOOPS
@pytest.mark.parametrize("thinks", [False, True])
def test_an_output_may_open_its_thought_or_not(thinks: bool, loop: dict[str, Any]) -> None:
    """Without the thought's beginning the grammar holds from the first token; with it, after its end."""
    source = Constraint(regex="[ab]{4}", start_token_ids=ids_of("T:"), max_reasoning_tokens=5, **AFTER)
    bias = ((ids_of("T")[0], 100.0 if thinks else -100.0),)
    with running_engine(**loop) as harness:
        request = constrained("r", prompt_of(1, 9), source, logit_bias=bias)
        text = text_of(harness.run([request])[0])
    assert re.fullmatch(r"(?s)T:.{3}/t[ab]{4}" if thinks else "[ab]{4}", text), text


def test_logprobs_are_those_before_the_mask() -> None:
    """Log-probabilities are what the model itself makes of the tokens, as with every other change of the
    logits.
    """
    with running_engine() as harness:
        masked = constrained("m", prompt_of(1, 9), Constraint(regex="[a-z]"), logprobs=2)
        free = make_request("f", prompt_of(1, 9), logprobs=2, max_tokens=1)
        harness.run([masked])
        harness.run([free])
    (of_masked,), (of_free,) = masked.output_logprobs, free.output_logprobs
    assert of_masked.top_ids == of_free.top_ids
    assert of_masked.top_logprobs == of_free.top_logprobs
    assert of_masked.token_id not in of_free.top_ids


AMBIGUOUS = (
    "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1} | a{i + 1}\n" for i in range(12)) + 'a12: /[a-z]/ | ""'
)


@LOOPS
def test_a_grammar_that_becomes_too_complex_ends_its_output(loop: dict[str, Any]) -> None:
    """The complexity is counted, so that ranks agree; the requests next to it are not disturbed."""
    with running_engine(**loop) as harness:
        ambiguous = constrained(
            "ambiguous", prompt_of(1, 9), Constraint(lark=AMBIGUOUS), max_tokens=110, ignore_eos=True
        )
        other = make_request("other", prompt_of(2, 9), max_tokens=60)
        harness.run([ambiguous, other], together=True)
        assert ambiguous.finish_reason is FinishReason.ERROR
        assert "items" in ambiguous.error_message
        assert 0 < len(ambiguous.output_token_ids) < 80
        assert other.finish_reason is FinishReason.LENGTH
        said = {r.key: complete(harness.deltas[r.key][-1], False, 0.0).complete for r in (ambiguous, other)}
    assert said[ambiguous.key].constraint_failed
    assert not said[other.key].constraint_failed


@LOOPS
def test_requests_that_wait_for_slow_masks_become_the_same(
    truth: tuple[dict[str, Any], list[list[int]]], loop: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that sits out until a thread has its mask has the tokens of one whose steps wait for it; also
    where pages are few, and it is sent back to wait meanwhile."""
    monkeypatch.setattr(token_masks, "_SLOW_S", -1.0)
    params, expected = truth
    for pages in (64, 28):
        with running_engine(budget=24, num_pages=pages, **loop) as harness:
            assert harness.run(workload(**params), together=True) == expected


def test_others_go_on_while_a_mask_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that takes long holds up its own request only."""
    monkeypatch.setattr(token_masks, "_SLOW_S", -1.0)
    computed, other = token_masks._mask_of, make_request("other", prompt_of(2, 9), max_tokens=60)
    waited: list[int] = []

    def long_mask(constraint: OutputConstraint) -> Words:
        end = time.monotonic() + 60
        before = len(other.output_token_ids)
        while not other.finished and len(other.output_token_ids) < before + 5 and time.monotonic() < end:
            time.sleep(0.001)
        waited.append(len(other.output_token_ids) - before)
        return computed(constraint)

    monkeypatch.setattr(token_masks, "_mask_of", long_mask)
    with running_engine() as harness:
        slow = constrained("slow", prompt_of(1, 9), Constraint(regex="[ab]{8}"))
        harness.run([slow, other], together=True)
    assert slow.finish_reason is FinishReason.STOP
    assert re.fullmatch("[ab]{8}", text_of(slow.output_token_ids))
    assert max(waited) >= 5


def test_a_grammar_whose_first_mask_is_too_complex_is_refused() -> None:
    """The grammar is refused before the request is queued, with the reason."""
    properties = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 50 + 1}}}$"} for i in range(3000)}
    schema = {"type": "object", "properties": properties}
    with pytest.raises(GrammarError, match="items"):
        compiler().make(Constraint(json_schema=json.dumps(schema)))
    with pytest.raises(GrammarError, match="no token"):
        compiler().make(Constraint(regex="ab日"))
    fewer = {"type": "object", "properties": dict(list(properties.items())[:60])}
    assert compiler().make(Constraint(json_schema=json.dumps(fewer)))


def test_a_grammar_that_was_not_announced_delays_no_request() -> None:
    """Where the engine ends while a grammar is sent to ranks, the request that has it gets the error."""
    made = compiler.__wrapped__()  # one of its own

    def refuse(_constraint: str) -> None:
        raise RuntimeError("the engine has ended")

    made.announce = refuse
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has ended"):
            made.make(Constraint(regex="[a-z]+"))
