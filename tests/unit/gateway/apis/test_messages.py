"""Guards Anthropic's Messages without a server: what a request becomes, and the events of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.apis.formats import Output, Usage
from gateway.apis.messages import MessagesFormat, MessagesReply, translate
from gateway.apis.translation import Context
from gateway.parsers.events import (
    ContentDelta,
    Finish,
    ParsedDelta,
    ReasoningDelta,
)
from gateway.schemas.common import Tolerance
from gateway.schemas.errors import ApiError
from gateway.schemas.messages import MessagesRequest
from tests.helpers.api_requests import ANSWER, delta, events, served_model

REPLY = MessagesReply("tiny", context_length=100)
USAGE = Usage(prompt_tokens=50, completion_tokens=9, cached_tokens=32, reasoning_tokens=4)
TOOL = {"name": "weather", "description": "Looks it up", "input_schema": {"type": "object"}}


def streamed(answer: list[ParsedDelta]) -> list[dict[str, Any]]:
    """Returns the events of an answer that comes delta by delta."""
    form = MessagesFormat("r1", REPLY)
    data = b"".join(form.stream_delta(one, lambda: USAGE) for one in answer)
    return events(data + form.stream_end(USAGE))


def whole(answer: list[ParsedDelta]) -> dict[str, Any]:
    """Returns the message of the same answer."""
    output = Output(deltas=list(answer), finish=answer[-1].finish)
    return MessagesFormat("r1", REPLY).whole([output], USAGE)


def test_stream_of_thought_text_and_calls() -> None:
    """The golden order: each block starts, grows and stops before the next; thoughts are signed."""
    found = streamed(ANSWER)
    assert [(one["type"], one.get("index")) for one in found] == [
        ("message_start", None),
        ("ping", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("content_block_start", 3),
        ("content_block_delta", 3),
        ("content_block_stop", 3),
        ("message_delta", None),
        ("message_stop", None),
    ]
    start = found[0]["message"]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    usage = {
        "input_tokens": 18,
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "cache_read_input_tokens": 32,
        "output_tokens": 9,
        "output_tokens_details": {"thinking_tokens": 4},
    }
    assert start["usage"] == usage
    assert [one["delta"]["type"] for one in found if one.get("index") == 0 and "delta" in one] == [
        "thinking_delta",
        "thinking_delta",
        "signature_delta",
    ]
    block = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}}
    assert found[10]["content_block"] == block
    assert found[11]["delta"] == {"type": "input_json_delta", "partial_json": '{"city": '}
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"] == usage


def test_whole_message_equals_the_stream() -> None:
    """What a client puts together of the events is the message that is not streamed."""
    blocks: list[dict[str, Any]] = []
    pieces: dict[int, str] = {}
    for one in streamed(ANSWER):
        if one["type"] == "content_block_start":
            blocks.append(one["content_block"])
        elif one["type"] == "content_block_delta":
            change = {name: text for name, text in one["delta"].items() if name != "type"}
            for name, text in change.items():
                if name == "partial_json":
                    pieces[one["index"]] = pieces.get(one["index"], "") + text
                else:
                    blocks[one["index"]][name] += text
    for index, text in pieces.items():
        blocks[index]["input"] = json.loads(text)
    message = whole(ANSWER)
    assert message["content"] == blocks
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["id"].startswith("msg_")
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (Finish("stop"), "end_turn", None),
        (Finish("stop", 7), "end_turn", None),
        (Finish("stop", "END"), "stop_sequence", "END"),
        (Finish("length"), "max_tokens", None),
        (Finish("tool_calls"), "tool_use", None),
    ],
)
def test_stop_reasons(finish: Finish, reason: str, sequence: str | None) -> None:
    """Why an output ended, in Anthropic's words."""
    message = whole([delta(ContentDelta("x"), finish=finish)])
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_full_context() -> None:
    """An output that filled the context says so, rather than that its own limit was reached."""
    full = Usage(prompt_tokens=90, completion_tokens=10, cached_tokens=0)
    output = Output(deltas=[], finish=Finish("length"))
    message = MessagesFormat("r1", REPLY).whole([output], full)
    assert message["stop_reason"] == "model_context_window_exceeded"


def test_hidden_thoughts_come_back(tmp_path: Path) -> None:
    """With `display` omitted a thought is in its signature alone, and the next request has it."""
    reply = MessagesReply("tiny", context_length=100, hides_thinking=True)
    form = MessagesFormat("r1", reply)
    thought = [delta(ReasoningDelta("Höm, "), ReasoningDelta("well."), finish=Finish("stop"))]
    data = b"".join(form.stream_delta(one, lambda: USAGE) for one in thought) + form.stream_end(USAGE)
    changes = [one["delta"] for one in events(data) if one["type"] == "content_block_delta"]
    block = MessagesFormat("r1", reply).whole([Output(deltas=list(thought))], USAGE)["content"][0]
    assert changes == [{"type": "signature_delta", "signature": block["signature"]}]
    assert block["thinking"] == ""
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [block]}]
    request, _ = translated(tmp_path, messages=history, thinking={"type": "adaptive", "display": "omitted"})
    assert request["messages"][1]["reasoning_content"] == "Höm, well."
    other = {**block, "signature": "hidden:%%"}
    request, _ = translated(tmp_path, messages=[history[0], {"role": "assistant", "content": [other]}])
    assert "reasoning_content" not in request["messages"][1]


def test_nothing_was_said() -> None:
    """An output without any text is still a complete message."""
    assert [one["type"] for one in streamed([delta(finish=Finish("stop"))])] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]
    assert whole([delta(finish=Finish("stop"))])["content"] == []


def test_failure_in_a_stream() -> None:
    """The error event is Anthropic's envelope."""
    data = MessagesFormat("r1", REPLY).stream_failure(ApiError(503, "gone"))
    assert events(data) == [
        {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}, "request_id": "r1"}
    ]


def translated(
    tmp_path: Path, strict: bool = False, reasoning_parser: str = "qwen3", **fields: Any
) -> tuple[dict[str, Any], set[str]]:
    """The chat request of a body with these fields, and what was left out."""
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    tolerance = Tolerance(strict)
    request = MessagesRequest.model_validate(body, context=tolerance)
    return translate(
        request, Context(tolerance, served_model(tmp_path, reasoning_parser))
    ).request, tolerance.ignored


def test_marks_of_the_cache_ask_for_their_longest_time(tmp_path: Path) -> None:
    """`cache_control` in a request, a tool, a block or within one keeps the prefix; others are refused."""

    def kept_s(**body: Any) -> Any:
        return translated(tmp_path, **{"messages": [{"role": "user", "content": "Hi"}], **body})[0].get(
            "keep_prefix_s"
        )

    short, long = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    text = {"type": "text", "text": "Hi"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text | {"cache_control": long}]}
    assert kept_s() is None
    assert kept_s(cache_control=short) == 300
    assert kept_s(system=[text | {"cache_control": short}], cache_control=long) == 3600
    assert kept_s(tools=[{"name": "f", "input_schema": {}, "cache_control": long}]) == 3600
    assert kept_s(messages=[{"role": "user", "content": [text | {"cache_control": short}]}]) == 300
    assert kept_s(messages=[{"role": "user", "content": [result]}]) == 3600
    with pytest.raises(ValidationError, match="ttl"):
        kept_s(cache_control={"type": "ephemeral", "ttl": "2h"})


def test_tokens_that_are_kept_are_counted_apart() -> None:
    """What was computed and is kept is neither plain input nor read from the cache, as Anthropic counts."""
    form = MessagesFormat("r1", MessagesReply("claude", 100, kept_s=3600))
    usage = form.whole([Output(list(ANSWER), ANSWER[-1].finish)], USAGE)["usage"]
    assert (usage["input_tokens"], usage["cache_creation_input_tokens"]) == (0, 18)
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 18}
    assert usage["cache_read_input_tokens"] == 32


def test_history_of_an_agent(tmp_path: Path) -> None:
    """System blocks, thoughts, calls and results of every kind become a chat's messages in their order."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "Sunny"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [
                        {"type": "text", "text": "No city"},
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "AA"},
                        },
                    ],
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    request, ignored = translated(tmp_path, messages=messages, system=system)
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
        {"id": "t2", "type": "function", "function": {"name": "weather", "arguments": {}}},
    ]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert request["messages"] == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "Sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error:\nNo city"},
        {"role": "user", "content": [image, {"type": "text", "text": "And now?"}]},
    ]
    assert ignored == {"messages[].content[].redacted_thinking"}


def test_tools_and_choices(tmp_path: Path) -> None:
    """Tools of clients become functions; Anthropic's own are left out and counted."""
    own = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    function = {"name": "weather", "description": "Looks it up", "parameters": {"type": "object"}}
    for choice, expected in (
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ):
        request, ignored = translated(tmp_path, tools=[TOOL, own], tool_choice=choice)
        assert request["tools"] == [{"type": "function", "function": function}]
        assert request["tool_choice"] == expected
        assert "parallel_tool_calls" not in request
        assert "tools[].web_search_20250305" in ignored
    single = {"type": "auto", "disable_parallel_tool_use": True}
    assert translated(tmp_path, tools=[TOOL], tool_choice=single)[0]["parallel_tool_calls"] is False
    with pytest.raises(ApiError, match="which is not one of 'tools'"):
        translated(tmp_path, tools=[TOOL], tool_choice={"type": "tool", "name": "other"})
    with pytest.raises(ApiError, match="there are none"):
        translated(tmp_path, tools=[own], tool_choice={"type": "any"})
    with pytest.raises(ApiError, match="strict_parameters"):
        translated(tmp_path, strict=True, tools=[{"type": "bash_20250124", "name": "bash"}])


def test_thinking_and_effort(tmp_path: Path) -> None:
    """Thinking is off unless asked for, as with Anthropic; budgets and efforts are passed on."""
    for thinking, on in ((None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True)):
        request, _ = translated(tmp_path, thinking=thinking)
        assert request["chat_template_kwargs"] == {"enable_thinking": on, "thinking": on}
        assert "thinking_token_budget" not in request
    enabled = {"type": "enabled", "budget_tokens": 2048}
    request, _ = translated(tmp_path, thinking=enabled, output_config={"effort": "high"})
    assert (request["thinking_token_budget"], request["reasoning_effort"]) == (2048, "high")
    request, _ = translated(tmp_path, reasoning_parser="none", thinking=enabled)
    assert "thinking_token_budget" not in request  # of a model without thoughts


def test_prefill_goes_on(tmp_path: Path) -> None:
    """A last message of the assistant is continued, unless it called tools."""
    said = {"role": "assistant", "content": "The answer is"}
    request, _ = translated(tmp_path, messages=[{"role": "user", "content": "x"}, said])
    assert (request["continue_final_message"], request["add_generation_prompt"]) == (True, False)
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    request, _ = translated(tmp_path, messages=[{"role": "user", "content": "x"}, called])
    assert "continue_final_message" not in request


def test_fields_and_schema(tmp_path: Path) -> None:
    """Sampling fields, schema and user are passed on; what is unknown is left out and counted."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request, ignored = translated(
        tmp_path,
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        stop_sequences=["END"],
        stream=True,
        metadata={"user_id": "u" * 2000},
        output_config={"format": {"type": "json_schema", "schema": schema}},
        context_management={"edits": []},
        mcp_servers=[],
    )
    assert {name: request[name] for name in ("temperature", "top_k", "top_p", "stop", "stream")} == {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "stop": ["END"],
        "stream": True,
    }
    assert request["user"] == "u" * 1024
    assert request["response_format"]["json_schema"]["schema"] == schema
    assert ignored == {"context_management", "mcp_servers"}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "source"),
        ({"messages": [{"role": "user", "content": [7]}]}, "content"),
        ({"thinking": {"type": 3}}, "thinking"),
        ({"tools": [{"name": "x", "input_schema": 3}]}, "tools"),
    ],
)
def test_wrong_bodies(tmp_path: Path, fields: dict[str, Any], names: str) -> None:
    """What is wrong is refused by its name."""
    with pytest.raises(ValidationError, match=names):
        translated(tmp_path, **fields)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "thinking", "thinking": "x"},
        {"type": "tool_use", "id": "a", "name": "b", "input": {}},
        {"type": "image", "source": {"type": "base64", "data": "AA"}},
    ],
)
def test_blocks_in_the_wrong_place(tmp_path: Path, block: dict[str, Any]) -> None:
    """A user neither thinks nor calls; an image without its bytes' type is none."""
    with pytest.raises(ApiError, match=r"messages\[0\]|needs"):
        translated(tmp_path, messages=[{"role": "user", "content": [block]}])
