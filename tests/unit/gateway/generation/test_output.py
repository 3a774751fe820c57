"""Guards how one output's tokens become text, stop reasons and aligned log-probabilities."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.generation.output import OutputRules, OutputState, chat_logprobs, completion_logprobs
from gateway.parsers.events import ContentDelta, OutputPlan, ParsedDelta, ReasoningDelta, TokenLogprob
from gateway.schemas.errors import ApiError
from gateway.text.tokenizer import Tokenizer
from protos import engine_pb2 as pb
from tests.helpers.tiny_tokenizer import EOS, byte_level_tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer(), None)
EOS_ID = TOKENIZER.encode(EOS)[0]
RULES = OutputRules(
    stop_strings=(),
    include_stop=False,
    stop_token_ids=frozenset({EOS_ID}),
    eos_token_ids=frozenset({EOS_ID}),
    min_tokens=0,
    skip_special_tokens=True,
)


def run(
    ids: list[int], rules: OutputRules, reason: str = "length", matched: int | None = None
) -> list[ParsedDelta]:
    """Yields one chunk per token with a log-probability, then the completion; stops after a finish."""
    state, deltas = OutputState(0, TOKENIZER, rules, [3, 4]), []
    for token in ids:
        logprobs = pb.OutputLogProbs(
            token_ids=[token], token_logprobs=[-1.0], top_logprobs=[pb.TopLogProbs()]
        )
        deltas.append(state.feed(pb.GenerateStreamChunk(token_ids=[token], output_logprobs=logprobs)))
        if state.finish is not None:
            return deltas
    message = pb.GenerateComplete(output_ids=ids, finish_reason=reason)
    if matched is not None:
        message.matched_token_id = matched
    return [*deltas, state.complete(message)]


def text_of(deltas: list[ParsedDelta]) -> str:
    """Returns all released text."""
    return "".join(delta.content for delta in deltas)


def logprobs_of(deltas: list[ParsedDelta]) -> list[TokenLogprob]:
    """Returns all released log-probabilities."""
    return [token for delta in deltas for token in delta.logprobs]


def test_only_the_last_delta_finishes() -> None:
    """An output ends once, with the engine's reason."""
    deltas = run(TOKENIZER.encode("The fox"), RULES)
    assert text_of(deltas) == "The fox"
    assert [delta.finish is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    assert deltas[-1].finish is not None
    assert (deltas[-1].finish.reason, deltas[-1].finish.stop_reason) == ("length", None)


def test_stop_token_is_counted_but_not_shown() -> None:
    """A stop token that is ordinary text stays out of the text, is named, and keeps its log-probability."""
    stop = TOKENIZER.encode("!")[0]
    rules = replace(RULES, stop_token_ids=frozenset({stop, EOS_ID}))
    ids = [*TOKENIZER.encode("fox"), stop]
    deltas = run(ids, rules, "stop", stop)
    assert text_of(deltas) == "fox"
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.stop_reason == stop
    assert sum(delta.new_tokens for delta in deltas) == len(logprobs_of(deltas)) == len(ids)
    assert text_of(run(ids, replace(rules, include_stop=True), "stop", stop)) == "fox!"


def test_end_of_sequence_is_no_stop_reason() -> None:
    """The model's own end is a plain stop."""
    finish = run([*TOKENIZER.encode("fox"), EOS_ID], RULES, "stop", EOS_ID)[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_reason) == ("stop", None)


def test_stop_string_cuts_text_and_logprobs_alike() -> None:
    """Tokens wholly inside a cut-off stop string lose their log-probabilities with their text."""
    ids = TOKENIZER.encode("The fox (yes) runs")
    deltas = run(ids, replace(RULES, stop_strings=("(yes)",)))
    assert text_of(deltas) == "The fox "
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.stop_reason == "(yes)"
    kept = logprobs_of(deltas)
    assert all(token.offset < len("The fox ") for token in kept)
    assert b"".join(TOKENIZER.token_bytes(token.token_id) for token in kept).startswith(b"The fox")


def test_logprobs_wait_for_their_text() -> None:
    """While text is held back its log-probabilities are too, so a chunk's two parts belong together."""
    ids = TOKENIZER.encode("fox!?")
    for delta in run(ids, replace(RULES, stop_strings=("!?!",))):
        assert not delta.logprobs or delta.content


@given(
    pieces=st.lists(
        st.sampled_from(["a", "b ", "<", "!", "\u00e9", "\u65e5", "<think>", "</think>"]), max_size=12
    ),
    stops=st.sets(st.sampled_from(["<!", "!<", "a<", "\u00e9!"])),
    include_stop=st.booleans(),
    cuts=st.sets(st.integers(0, 60), max_size=8),
    streamed=st.integers(0, 60),
    parsed=st.booleans(),
)
@example(pieces=["a", "<", "!"], stops={"<!"}, include_stop=False, cuts={2}, streamed=9, parsed=False)
def test_messages_do_not_change_log_probabilities(
    pieces: list[str], stops: set[str], include_stop: bool, cuts: set[int], streamed: int, parsed: bool
) -> None:
    """Whatever tokens the engine's messages have, an output has the same log-probabilities.

    Messages end at `cuts`; tokens from `streamed` on come with the completion.
    """
    plan = OutputPlan(reasoning_parser="deepseek_r1") if parsed else None
    rules = replace(RULES, stop_strings=tuple(stops), include_stop=include_stop, plan=plan)
    ids = [*TOKENIZER.encode("".join(pieces)), EOS_ID]
    assert grouped(ids, rules, cuts, streamed) == grouped(ids, rules, set(range(len(ids))), len(ids))


def grouped(
    ids: list[int], rules: OutputRules, cuts: set[int], streamed: int
) -> tuple[str, list[TokenLogprob]]:
    """Returns text and log-probabilities of tokens that come in some messages."""
    state = OutputState(0, TOKENIZER, rules, [3, 4])
    ends = [cut for cut in sorted(cuts) if 0 < cut < min(streamed, len(ids))]
    deltas, start = [], 0
    for end in [*ends, *([min(streamed, len(ids))] if streamed else [])]:
        part, start = ids[start:end], end
        logprobs = pb.OutputLogProbs(token_ids=part, token_logprobs=[-1.0] * len(part))
        deltas.append(state.feed(pb.GenerateStreamChunk(token_ids=part, output_logprobs=logprobs)))
        if state.finish is not None:
            break
    if state.finish is None:
        logprobs = pb.OutputLogProbs(token_ids=ids, token_logprobs=[-1.0] * len(ids))
        message = pb.GenerateComplete(output_ids=ids, finish_reason="stop", output_logprobs=logprobs)
        message.matched_token_id = EOS_ID
        deltas.append(state.complete(message))
    return text_of(deltas), logprobs_of(deltas)


def test_the_prompts_log_probabilities_come_whatever_the_output_is() -> None:
    """A stop string at the output's beginning does not take tokens of an echoed prompt along."""
    ids = TOKENIZER.encode("fox")
    scored = [pb.InputTokenLogProb(value=-1.0) for _ in ids]
    rules = replace(RULES, stop_strings=("dog",), prompt_text="f", echoes_logprobs=True)
    state = OutputState(0, TOKENIZER, rules, ids)
    dog = TOKENIZER.encode("dog")
    chunk = pb.GenerateStreamChunk(
        token_ids=dog,
        output_logprobs=pb.OutputLogProbs(token_ids=dog, token_logprobs=[-1.0] * len(dog)),
        input_logprobs=pb.InputLogProbs(token_ids=ids, token_logprobs=scored),
    )
    assert [token.token_id for token in state.feed(chunk).logprobs] == ids


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    """Before `min_tokens` a stop string is text; afterwards it stops."""
    ids = TOKENIZER.encode("fox. dog. hill.")
    first_dot = next(number for number, token in enumerate(ids, 1) if "." in TOKENIZER.decode([token]))
    rules = replace(RULES, stop_strings=(".",), min_tokens=first_dot + 1)
    assert text_of(run(ids, rules)) == "fox. dog"


def test_echo_comes_once_with_offsets_after_it() -> None:
    """The prompt's text leads, and offsets of output tokens count from its beginning."""
    ids = TOKENIZER.encode("runs over")
    deltas = run(ids, replace(RULES, prompt_text="The fox "))
    assert text_of(deltas) == "The fox runs over"
    assert logprobs_of(deltas)[0].offset == len("The fox ")


def test_tokens_only_the_completion_brings_are_taken() -> None:
    """Engines that do not stream send all tokens, and their log-probabilities, at the end."""
    ids = TOKENIZER.encode("The fox")
    logprobs = pb.OutputLogProbs(token_ids=ids, token_logprobs=[-0.5] * len(ids))
    message = pb.GenerateComplete(output_ids=ids, finish_reason="length", output_logprobs=logprobs)
    delta = OutputState(0, TOKENIZER, RULES, [3]).complete(message)
    assert (delta.content, delta.new_tokens, len(delta.logprobs)) == ("The fox", len(ids), len(ids))


def test_failed_output_raises() -> None:
    """finish_reason "error" carries the engine's message."""
    message = pb.GenerateComplete(finish_reason="error", error_message="layer 3")
    with pytest.raises(ApiError, match="layer 3"):
        OutputState(0, TOKENIZER, RULES, [3]).complete(message)


def test_masked_tokens_stay_valid_json() -> None:
    """-inf of a masked token becomes a number that JSON has."""
    top = pb.TopLogProbs(token_ids=[5, 6], values=[-0.5, float("-inf")])
    logprobs = pb.OutputLogProbs(token_ids=[5], token_logprobs=[float("-inf")], top_logprobs=[top])
    chunk = pb.GenerateStreamChunk(token_ids=[5], output_logprobs=logprobs)
    delta = OutputState(0, TOKENIZER, RULES, [3]).feed(chunk)
    json.dumps(chat_logprobs(TOKENIZER, delta.logprobs, 2), allow_nan=False)
    assert delta.logprobs[0].logprob == delta.logprobs[0].top[1][1] == -9999.0


def test_logprob_formats() -> None:
    """Chat gives exact bytes of split characters; completions give parallel lists with the token itself,
    which clients of vLLM take the first of each entry for."""
    first = TOKENIZER.encode("\U00010348")[0]
    fox = TOKENIZER.encode(" fox")[0]
    tokens = [TokenLogprob(first, None, (), 0), TokenLogprob(fox, -0.5, ((first, -0.1), (fox, -0.5)), 1)]
    content = chat_logprobs(TOKENIZER, tokens, 1)["content"]
    assert content[0]["bytes"] == [0xF0]
    assert content[0]["token"] == "\ufffd"
    assert [entry["logprob"] for entry in content[1]["top_logprobs"]] == [-0.1]
    lists = completion_logprobs(TOKENIZER, tokens, 1)
    assert lists["token_logprobs"] == [None, -0.5]
    assert lists["top_logprobs"] == [None, {"\ufffd": -0.1, " fox": -0.5}]
    assert list(lists["top_logprobs"][1]) == [" fox", "\ufffd"]
    assert lists["text_offset"] == [0, 1]


def test_a_stop_string_ends_a_thought() -> None:
    """Stop strings are looked for in all of an output's text, as in vLLM: also in its thought, of which what
    came before stays; no answer follows.
    """
    plan = OutputPlan(reasoning_parser="qwen3", starts_in_reasoning=True)
    rules = replace(RULES, stop_strings=("dog",), plan=plan)
    deltas = run(TOKENIZER.encode("The fox and the dog</think>Yes"), rules)
    events = [event for delta in deltas for event in delta.events]
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "The fox and the"
    assert not any(isinstance(event, ContentDelta) for event in events)
    finish = deltas[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_reason) == ("stop", "dog")
