"""Guards forced and strict tool calls through the whole system: template, grammar, masks, parser, answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.helpers.demo import demo_checkpoint
from tests.helpers.stack import running_stack

pytestmark = pytest.mark.demo
MODEL = "moebius-demo"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou have these tools:\n{% for tool in tools %}{{ tool | tojson }}\n"
    '{% endfor %}Call one with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n'
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
    "{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
TIME: Any = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "additionalProperties": False}},
}
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris for 3 days?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """The demo model, too small to choose tools by itself, behind a template that shows it tools."""
    directory = tmp_path_factory.mktemp("tools")
    (directory / "template.jinja").write_text(TEMPLATE)
    flags = ["--expert-servers", "1", "--served-model-name", MODEL]
    flags += ["--chat-template", str(directory / "template.jinja")]
    with running_stack(demo_checkpoint(), directory, *flags) as stack:
        yield openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0, timeout=120)


def test_a_required_call_satisfies_its_schema(client: openai.OpenAI) -> None:
    """Whatever the model would have said; the stream's pieces add up to the whole answer's call."""
    fields: Any = {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=200, temperature=0, **fields
    ).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls or []
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, SCHEMA if call.function.name == "get_weather" else {"maxProperties": 0})
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=200, temperature=0, stream=True, **fields
    )
    pieces = [c.choices[0].delta.tool_calls or [] for c in stream if c.choices]
    assert "".join(p.function.arguments or "" for piece in pieces for p in piece) == call.function.arguments
    assert sum(map(len, pieces)) > 3


@pytest.mark.parametrize(
    "tool",
    [pytest.param(WEATHER, id="weather"), pytest.param(TIME, id="time", marks=pytest.mark.full)],
)
def test_a_named_call_is_of_that_tool(client: openai.OpenAI, tool: Any) -> None:
    """Each of several sampled outputs calls the tool, once, with arguments of its schema."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=200,
        seed=1,
        n=3,
        tools=[WEATHER, TIME],
        tool_choice={"type": "function", "function": {"name": tool["function"]["name"]}},
    )
    for choice in answer.choices:
        (call,) = choice.message.tool_calls or []
        assert call.function.name == tool["function"]["name"]
        assert choice.finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), tool["function"]["parameters"])


def test_a_json_answer_next_to_tools(client: openai.OpenAI) -> None:
    """A response format does not take the tools away: the output is calls, or an answer of its schema."""
    answer: Any = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"enum": ["sun", "rain"]}},
    }
    choice = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=200,
        temperature=0,
        tools=[WEATHER],
        response_format=answer,
    ).choices[0]
    if choice.message.tool_calls:
        jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), SCHEMA)
    else:
        assert choice.message.content in ('"sun"', '"rain"')


def test_strict_tools_leave_the_choice(client: openai.OpenAI) -> None:
    """Text without a call, as the model prefers it, under a grammar that would hold a call to its schema."""
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    choice = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=30, temperature=0, tools=[strict]
    ).choices[0]
    assert choice.message.content or choice.message.tool_calls


def test_a_thought_is_ended_by_its_budget_before_a_forced_call(client: openai.OpenAI) -> None:
    """The grammar waits for the end of the thought, which the budget brings."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=200,
        temperature=0,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 8},
    )
    message: Any = answer.choices[0].message
    assert message.reasoning_content
    (call,) = message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    # The budget, and the few tokens that spell the end.
    assert 8 <= (answer.usage.completion_tokens_details.reasoning_tokens or 0) <= 14
