"""Guards tools and reasoning through /v1/chat/completions, streamed and not, over recorded outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.agent_gateway import THOUGHT, agent_gateway
from tests.helpers.fake_engine import MODEL, FakeEngine, Script

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
MESSAGES = [{"role": "user", "content": "What is the weather?"}]
CALLS = (
    'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}'
    "\n</tool_call>\n"
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


@dataclass
class Setup:
    """Gateway, engine and a client; filled by the fixture."""

    url: str
    engine: FakeEngine
    client: openai.OpenAI

    def create(self, text: str, **fields: Any) -> Any:
        """Returns the answer to the messages when the model says `text`."""
        self.engine.reset()
        self.engine.script = Script(text=text)
        return self.client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)

    def refusal(self, **fields: Any) -> dict[str, Any]:
        """Returns the error object of a request that is refused."""
        answer = httpx.post(f"{self.url}/v1/chat/completions", json={"messages": MESSAGES, **fields})
        assert answer.status_code == 400, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error

    def prompt(self) -> str:
        """Returns the last request that reached the engine."""
        return self.engine.decode(self.engine.seen.requests[-1].tokenized.input_ids)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """Shared by this file."""
    with agent_gateway(tmp_path_factory.mktemp("tools")) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        yield Setup(running.url, running.engine, client)


@dataclass
class Message:
    """The sum of a stream's deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] | None = None
    finish_reason: str | None = None


def collected(stream: Any) -> Message:
    """Adds deltas up by index, as clients do."""
    message = Message()
    for chunk in stream:
        for choice in chunk.choices:
            message.content += choice.delta.content or ""
            message.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                message.calls = message.calls or []
                if call.index == len(message.calls):
                    assert call.id
                    assert call.type == "function"
                    message.calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                else:
                    assert call.index == len(message.calls) - 1, "calls come one after the other"
                    assert (call.id, call.function.name) == (None, None), "said once"
                message.calls[call.index]["arguments"] += call.function.arguments or ""
            message.finish_reason = choice.finish_reason or message.finish_reason
    return message


def test_a_whole_answer_has_thought_content_and_calls_apart(setup: Setup) -> None:
    """One message with all three, under both names for reasoning, and the reason that agents look for."""
    answer = setup.create(THOUGHT + CALLS, tools=[WEATHER, TIME])
    choice = answer.choices[0]
    assert choice.message.content == "Let me look."
    assert choice.message.reasoning == choice.message.reasoning_content == "The fox wants\n the weather."
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather", "get_time"]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Zürich", "days": 2}
    assert choice.message.tool_calls[1].function.arguments == "{}"
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert choice.finish_reason == "tool_calls"
    thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert 0 < thought < answer.usage.completion_tokens


def test_a_stream_adds_up_to_the_whole(setup: Setup) -> None:
    """The same message token by token; arguments come in several pieces, while they are made."""
    stream = list(setup.create(THOUGHT + CALLS, tools=[WEATHER, TIME], stream=True))
    message = collected(stream)
    assert message.content == "Let me look."
    assert message.reasoning == "The fox wants\n the weather."
    assert message.calls is not None
    assert [(call["name"], call["arguments"]) for call in message.calls] == [
        ("get_weather", '{"city": "Zürich", "days": 2}'),
        ("get_time", "{}"),
    ]
    assert message.finish_reason == "tool_calls"
    pieces = [c.choices[0].delta.tool_calls for c in stream if c.choices and c.choices[0].delta.tool_calls]
    assert len(pieces) > 6


def test_without_tools_tags_are_text_and_thoughts_are_not(setup: Setup) -> None:
    """A request without tools gets no calls, whatever the model writes."""
    message = setup.create(THOUGHT + "Say <tool_call>\n{}").choices[0].message
    assert message.content == "Say <tool_call>\n{}"
    assert message.reasoning_content == "The fox wants\n the weather."
    assert message.tool_calls is None


def test_a_single_call_ends_the_generation(setup: Setup) -> None:
    """Without parallel calls the second is neither given out nor generated."""
    fields = {"tools": [WEATHER, TIME], "parallel_tool_calls": False}
    choice = setup.create(CALLS, **fields).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    assert choice.finish_reason == "tool_calls"
    assert setup.engine.seen.requests[-1].stream
    message = collected(setup.create(CALLS, stream=True, **fields))
    assert message.calls is not None
    assert len(message.calls) == 1


def test_cut_off_in_the_thought_there_is_no_content(setup: Setup) -> None:
    """All tokens of an output that ends in its thought are reasoning tokens."""
    answer = setup.create(THOUGHT + "fox", max_tokens=6)
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content is None
    assert choice.message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens == 6


def test_thoughts_can_be_left_out_or_left_in(setup: Setup) -> None:
    """`include_reasoning` false drops them, `separate_reasoning` false leaves them in their tags."""
    answer = setup.create(THOUGHT + "fox", extra_body={"include_reasoning": False})
    assert answer.choices[0].message.content == "fox"
    assert not hasattr(answer.choices[0].message, "reasoning_content")
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    answer = setup.create(THOUGHT + "fox", extra_body={"separate_reasoning": False})
    assert answer.choices[0].message.content == THOUGHT + "fox"


def test_effort_none_switches_the_thought_off(setup: Setup) -> None:
    """`reasoning_effort` reaches the template under the name that it reads; what a client set itself wins."""
    setup.create("fox", reasoning_effort="none")
    assert setup.prompt().endswith("<think>\n\n</think>\n\n")
    setup.create("fox", reasoning_effort="high")
    assert setup.prompt().endswith("assistant\n")
    setup.create(
        "fox", reasoning_effort="none", extra_body={"chat_template_kwargs": {"enable_thinking": True}}
    )
    assert setup.prompt().endswith("assistant\n")


def test_logprobs_belong_to_the_content(setup: Setup) -> None:
    """Their tokens spell the content, in a stream as in a whole answer; thoughts and calls have none."""
    fields = {"tools": [WEATHER], "logprobs": True, "stop": ["dog"]}
    text = THOUGHT + "The fox: über\n" + CALLS.removeprefix("Let me look.\n")
    whole = setup.create(text, **fields).choices[0]
    spelled = b"".join(bytes(token.bytes) for token in whole.logprobs.content)
    assert spelled.decode().strip() == whole.message.content == "The fox: über"
    streamed = b""
    for chunk in setup.create(text, stream=True, **fields):
        for choice in chunk.choices:
            for token in choice.logprobs.content if choice.logprobs else ():
                streamed += bytes(token.bytes)
    assert streamed == spelled


def test_history_is_rendered_as_the_template_knows_it(setup: Setup) -> None:
    """Our own answer, sent back with the tool's result, is what the model wrote."""
    setup.engine.reset()
    setup.engine.script = Script(text=THOUGHT + CALLS)
    first = setup.client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[WEATHER, TIME])  # type: ignore[list-item]
    message = first.choices[0].message
    history = [
        *MESSAGES,
        message.model_dump(),
        {
            "role": "tool",
            "tool_call_id": message.tool_calls[0].id,
            "content": [{"type": "text", "text": "sun"}],
        },
    ]
    setup.client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER, TIME])  # type: ignore[list-item]
    prompt = setup.prompt()
    assert "<think>\nThe fox wants\n the weather.\n</think>" in prompt
    assert '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}' in prompt
    assert "tool\nsun" in prompt
    assert json.dumps(WEATHER, ensure_ascii=False) in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objet"}}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        ({"functions": [TIME["function"]], "tools": [TIME]}, "functions"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ],
)
def test_wrong_tools_are_refused_by_name(setup: Setup, fields: dict[str, Any], param: str) -> None:
    """A 400 names the parameter, before anything reaches the engine."""
    setup.engine.reset()
    assert setup.refusal(**fields)["param"] == param
    assert not setup.engine.seen.requests


def test_only_allowed_tools_are_offered(setup: Setup) -> None:
    """`allowed_tools` leaves the others out of the prompt, `none` all of them."""
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TIME]}}
    setup.create("fox", tools=[WEATHER, TIME], tool_choice=choice)
    assert "get_time" in setup.prompt()
    assert "get_weather" not in setup.prompt()
    setup.create("fox", tools=[WEATHER, TIME], tool_choice="none")
    assert "# Tools" not in setup.prompt()


def test_a_required_call_is_the_engines_constraint(setup: Setup) -> None:
    """The grammar holds from the thought's end on; a named choice allows that one tool, once."""
    answer = setup.create(
        THOUGHT + CALLS.removeprefix("Let me look.\n"), tools=[WEATHER, TIME], tool_choice="required"
    )
    assert len(answer.choices[0].message.tool_calls) == 2
    constraint = setup.engine.seen.requests[-1].constraint
    assert "get_weather" in constraint.lark
    assert "get_time" in constraint.lark
    assert setup.engine.decode(constraint.after_token_ids) == "</think>"
    assert setup.engine.decode(constraint.start_token_ids) == "<think>"
    named = {"type": "function", "function": {"name": "get_time"}}
    answer = setup.create(CALLS.partition("\n")[2], tools=[WEATHER, TIME], tool_choice=named)
    assert len(answer.choices[0].message.tool_calls) == 1
    constraint = setup.engine.seen.requests[-1].constraint
    assert "get_weather" not in constraint.lark
    setup.create(CALLS, tools=[WEATHER, TIME])
    assert not setup.engine.seen.requests[-1].HasField("constraint")


def test_thoughts_are_bounded_and_come_before_structure(setup: Setup) -> None:
    """`thinking_token_budget` and a response format share one constraint, which knows where a thought is."""
    setup.create("fox", extra_body={"thinking_token_budget": 7})
    constraint = setup.engine.seen.requests[-1].constraint
    assert constraint.WhichOneof("kind") is None
    assert constraint.max_reasoning_tokens == 7
    assert setup.engine.decode(constraint.after_token_ids) == "</think>"
    setup.create("{}", response_format={"type": "json_object"})
    constraint = setup.engine.seen.requests[-1].constraint
    assert constraint.json_object
    assert setup.engine.decode(constraint.start_token_ids) == "<think>"
    # A template that closed the thought leaves nothing to wait for.
    setup.create("{}", response_format={"type": "json_object"}, reasoning_effort="none")
    constraint = setup.engine.seen.requests[-1].constraint
    assert constraint.json_object
    assert not constraint.after_token_ids


def test_strict_tools_and_json_answers_have_a_grammar_of_their_own(setup: Setup) -> None:
    """Where a tool is strict, its calls keep to its schema; with a response format, so do answers."""
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    setup.create("fox", tools=[strict])
    free = setup.engine.seen.requests[-1].constraint.lark
    assert "get_weather" in free
    setup.create(
        "fox",
        tools=[strict, {"type": "function", "function": {**TIME["function"], "name": "free"}}],  # type: ignore[dict-item]
    )
    mixed = setup.engine.seen.requests[-1].constraint.lark
    assert "city" in mixed
    assert "free" in mixed
    setup.create("fox", tools=[TIME])
    assert not setup.engine.seen.requests[-1].HasField("constraint")
    answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["oslo"]}}}
    setup.create('"oslo"', tools=[TIME], response_format=answer)
    constraint = setup.engine.seen.requests[-1].constraint
    assert "get_time" in constraint.lark
    assert "oslo" in constraint.lark
    assert constraint.after_token_ids


def test_clients_that_know_only_functions(setup: Setup) -> None:
    """`functions` are tools, and the answer is in their words, streamed and not; so is the history."""
    fields = {"functions": [WEATHER["function"], TIME["function"]], "function_call": "auto"}
    choice = setup.create(CALLS, **fields).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.function_call.name == "get_weather"
    assert json.loads(choice.message.function_call.arguments) == {"city": "Zürich", "days": 2}
    name, arguments = "", ""
    for chunk in setup.create(CALLS, stream=True, **fields):
        called = chunk.choices[0].delta.function_call
        name += (called and called.name) or ""
        arguments += (called and called.arguments) or ""
    assert (name, json.loads(arguments)["days"]) == ("get_weather", 2)
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": {"name": "get_time", "arguments": "{}"}},
        {"role": "function", "name": "get_time", "content": "noon"},
    ]
    setup.client.chat.completions.create(model=MODEL, messages=history, **fields)  # type: ignore[call-overload]
    assert '{"name": "get_time", "arguments": {}}\n</tool_call>' in setup.prompt()
    assert "tool\nnoon" in setup.prompt()


def test_what_a_model_wrote_as_arguments_may_be_sent_back(setup: Setup) -> None:
    """Arguments that are no JSON object stay the text that they are, rather than a 400 in the next turn."""
    call = {"id": "c", "type": "function", "function": {"name": "get_time", "arguments": '{"broken'}}
    history = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "no"}]
    setup.engine.reset()
    setup.engine.script = Script(text="fox")
    setup.client.chat.completions.create(model=MODEL, messages=history, tools=[TIME])  # type: ignore[list-item]
    assert '{\\"broken' in setup.prompt()


def test_stop_strings_count_in_thoughts_too(setup: Setup) -> None:
    """A stop string ends the output wherever it stands, as in vLLM."""
    choice = setup.create(THOUGHT + "fox", stop=["fox wants"]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content is None
    assert choice.message.reasoning_content == "The"


def test_a_prompt_with_tools_can_be_counted(setup: Setup) -> None:
    """/tokenize renders tools as a chat request does; /detokenize shows what the engine would be sent."""
    setup.create("fox", tools=[WEATHER])
    body = {"messages": MESSAGES, "tools": [WEATHER]}
    tokens = httpx.post(f"{setup.url}/tokenize", json=body).json()["tokens"]
    assert tokens == list(setup.engine.seen.requests[-1].tokenized.input_ids)


def test_schemas_of_older_dialects_are_taken(setup: Setup) -> None:
    """What generators of JSON Schema's drafts 4 and 7 write is no error."""
    old = {"type": "object", "properties": {"a": {"type": "number", "minimum": 0, "exclusiveMinimum": True}}}
    pair = {"type": "object", "properties": {"a": {"type": "array", "items": [{"type": "string"}]}}}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": p}}
        for n, p in enumerate((old, pair))
    ]
    assert setup.create("fox", tools=tools).choices[0].message.content == "fox"
