"""Guards what becomes of each field: implemented, refused by name, or named as one without an effect."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel, ValidationError

from gateway.schemas.common import HINTS, NEUTRAL_VALUES, Tolerance
from gateway.schemas.errors import describe_validation_error
from gateway.schemas.requests import ChatCompletionRequest, CompletionRequest

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}


def refusal(schema: type[BaseModel], body: dict[str, Any]) -> tuple[str, str | None, str]:
    """Returns message, param and code of a body that must be refused."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    return describe_validation_error([dict(error) for error in caught.value.errors()])


@pytest.mark.parametrize(
    ("schema", "params"),
    [
        (ChatCompletionRequest, chat_create_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_the_openai_client_is_known(schema: type[BaseModel], params: type[Any]) -> None:
    """A field the openai client can send is in the schema or in the table of refused ones."""
    assert set(params.__annotations__) - set(schema.model_fields) - set(NEUTRAL_VALUES) - set(HINTS) == set()


@pytest.mark.parametrize("name", sorted(NEUTRAL_VALUES))
def test_unsupported_fields_pass_only_when_neutral(name: str) -> None:
    """Null and the neutral values pass; anything else is a 400 that names the field."""
    schema, body = (CompletionRequest, TEXT) if name != "echo" else (ChatCompletionRequest, CHAT)
    if name in schema.model_fields:
        schema, body = ChatCompletionRequest, CHAT
    for value in (None, *NEUTRAL_VALUES[name]):
        schema.model_validate({**body, name: value})
    message, param, code = refusal(schema, {**body, name: "something else"})
    assert (param, code) == (name, "unsupported_parameter")
    assert name in message


def test_neutral_false_is_not_zero() -> None:
    """JSON 0 is not false: values of another type are not taken for neutral ones."""
    assert refusal(CompletionRequest, {**TEXT, "use_beam_search": 0})[1] == "use_beam_search"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 129}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
@pytest.mark.parametrize("base", [CHAT, TEXT], ids=["chat", "text"])
def test_wrong_values_are_named(base: dict[str, Any], body: dict[str, Any], param: str) -> None:
    """Type, range and spelling errors name the parameter, in both APIs."""
    schema = ChatCompletionRequest if "messages" in base else CompletionRequest
    assert refusal(schema, {**base, **body})[1] == param


@pytest.mark.parametrize(
    ("prompt", "normalised"),
    [
        ("x", ["x"]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompt_forms(prompt: Any, normalised: Any) -> None:
    """All four forms become a list of prompts."""
    assert CompletionRequest.model_validate({**TEXT, "prompt": prompt}).prompt == normalised


@pytest.mark.parametrize("prompt", [None, 1, [], [1, "x"], [[1], "x"], [-1], [True], [[1.5]], ["x"] * 300])
def test_wrong_prompts_are_named(prompt: Any) -> None:
    """Mixed, empty and mistyped prompts are refused."""
    assert refusal(CompletionRequest, {**TEXT, "prompt": prompt})[1] == "prompt"


def test_answers_can_be_sent_back_as_history() -> None:
    """What the client library dumps of an answer (nulls included) is accepted as a message."""
    history = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        "reasoning": "because",
    }
    body = {**CHAT, "messages": [*CHAT["messages"], history]}
    message = ChatCompletionRequest.model_validate(body).messages[1].for_template()
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert (message["content"], message["reasoning_content"]) == ("", "because")


def test_text_parts_are_joined_and_content_is_required() -> None:
    """Parts join with line breaks; a user message without content is refused."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {**CHAT, "messages": [{"role": "user", "content": parts}]}
    assert ChatCompletionRequest.model_validate(body).messages[0].for_template()["content"] == "a\nb"
    assert refusal(ChatCompletionRequest, {**CHAT, "messages": [{"role": "user"}]})[1] == "messages"


def test_conflicting_limits_and_turns_are_refused() -> None:
    """Two different output limits, or continuing and opening a turn, are contradictions."""
    assert refusal(ChatCompletionRequest, {**CHAT, "max_tokens": 1, "max_completion_tokens": 2})[1]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refusal(ChatCompletionRequest, {**CHAT, **both})[1] == "continue_final_message"
    assert refusal(CompletionRequest, {**TEXT, "max_tokens": 0})[1] == "max_tokens"
    assert refusal(ChatCompletionRequest, {**CHAT, "chat_template_kwargs": {"messages": []}})[1]


@pytest.mark.parametrize("base", [CHAT, TEXT], ids=["chat", "text"])
def test_what_does_not_change_the_answer_is_named_and_left_out(base: dict[str, Any]) -> None:
    """Hints and unknown fields, wherever they stand, pass and are named; null says nothing."""
    schema = ChatCompletionRequest if "messages" in base else CompletionRequest
    tolerance = Tolerance()
    more = {"metadata": {"a": "b"}, "store": True, "verbosity": "low", "no_such": [1], "nothing": None}
    stream = {"stream": True, "stream_options": {"x": 1}}
    made = schema.model_validate({**base, **more, **stream}, context=tolerance)
    assert tolerance.ignored == {"metadata", "store", "verbosity", "no_such", "stream_options.x"}
    assert made == schema.model_validate({**base, "stream": True, "stream_options": {}})


def test_unknown_fields_of_messages_and_parts_are_left_out() -> None:
    """Templates see the same message with and without them."""
    tolerance = Tolerance()
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    call = {"id": "1", "index": 0, "function": {"name": "f", "arguments": "{}", "strict": True}}
    messages = [
        {"role": "user", "content": [part], "tenant": 1},
        {"role": "assistant", "tool_calls": [call], "annotations": []},
    ]
    body = {**CHAT, "messages": messages}
    read = ChatCompletionRequest.model_validate(body, context=tolerance).messages
    assert tolerance.ignored == {
        "messages[].tenant",
        "messages[].annotations",
        "messages[].content[].cache_control",
        "messages[].tool_calls[].index",
        "messages[].tool_calls[].function.strict",
    }
    assert read[0].for_template() == {"role": "user", "content": "x"}
    assert read[1].for_template()["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    ]


@pytest.mark.parametrize("base", [CHAT, TEXT], ids=["chat", "text"])
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"no_such": None}, "no_such"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"store": True}, "store"),
        ({"metadata": {"a": "b"}}, "metadata"),
        ({"max_tokens": 2.0}, "max_tokens"),
        ({"model": ...}, "model"),
    ],
)
def test_strict_parameters_refuse_what_else_is_tolerated(
    base: dict[str, Any], more: dict[str, Any], param: str
) -> None:
    """With `strict_parameters` unknown names, hints, 2.0 for 2 and a missing model are errors by name."""
    schema = ChatCompletionRequest if "messages" in base else CompletionRequest
    body = {name: value for name, value in {**base, **more}.items() if value is not ...}
    schema.model_validate(body)
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body, context=Tolerance(strict=True))
    assert describe_validation_error([dict(error) for error in caught.value.errors()])[1] == param
    for hint, (*values,) in HINTS.items():
        for value in (None, *values):
            schema.model_validate({**base, hint: value}, context=Tolerance(strict=True))


def test_integral_floats_are_integers() -> None:
    """2.0 is 2 wherever an integer belongs; 2.5 is none, and what may be a float stays one."""
    sent = {
        "max_tokens": 2.0,
        "n": 1.0,
        "seed": 7.0,
        "stop_token_ids": [3.0],
        "temperature": 1.0,
        "top_k": 4.0,
    }
    read = CompletionRequest.model_validate({**TEXT, **sent})
    got = (read.max_tokens, read.n, read.seed, read.stop_token_ids, read.top_k)
    assert got == (2, 1, 7, [3], 4)
    assert all(type(value) is int for value in (read.max_tokens, read.n, read.seed, read.top_k))
    assert type(read.temperature) is float
    assert refusal(CompletionRequest, {**TEXT, "max_tokens": 2.5})[1] == "max_tokens"
    kwargs = {"depth": 2.0}
    chat = ChatCompletionRequest.model_validate({**CHAT, "chat_template_kwargs": kwargs})
    assert chat.chat_template_kwargs == kwargs
    assert type((chat.chat_template_kwargs or {})["depth"]) is float
