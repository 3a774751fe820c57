"""Guards what Cohere's clients see of their chat, in front of a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.agent_gateway import GREEDY, THOUGHT, AgentGateway, agent_gateway
from tests.helpers.fake_engine import MODEL, Script

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentGateway]:
    """Shared by this file."""
    with agent_gateway(tmp_path_factory.mktemp("cohere")) as gateway:
        yield gateway


@pytest.fixture
def gateway(running: AgentGateway) -> AgentGateway:
    """Returns the shared servers with a fresh record."""
    running.engine.reset()
    return running


def chat(gateway: AgentGateway, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v2/chat", json={"model": MODEL, "messages": HELLO, **body}, timeout=60)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Returns the data of each event, whose name is the data's type."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.splitlines()
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line[7:] for line in lines if line.startswith("event: ")] == [one["type"] for one in data]
    return data


def test_a_message_whole_and_streamed(gateway: AgentGateway) -> None:
    """Cohere's names of sampling fields reach the engine; the events add up to the whole message."""
    asked = {"temperature": 0, "max_tokens": 40, "k": 0, "p": 0.9, "stop_sequences": ["zebra"]}
    whole = chat(gateway, **asked).json()
    assert whole["message"] == {"role": "assistant", "content": [{"type": "text", "text": GREEDY}]}
    assert whole["finish_reason"] == "COMPLETE"
    counts = whole["usage"]["tokens"]
    assert (counts["input_tokens"] > 0, counts["output_tokens"] > 0) == (True, True)
    params = gateway.engine.seen.requests[0].sampling_params
    assert (params.max_tokens, round(params.top_p, 3), params.temperature) == (40, 0.9, 0)
    start, opened, *pieces, closed, end = events(chat(gateway, **asked, stream=True))
    assert (start["type"], start["delta"]["message"]["role"]) == ("message-start", "assistant")
    assert (opened["type"], opened["index"], closed["type"]) == ("content-start", 0, "content-end")
    assert "".join(piece["delta"]["message"]["content"]["text"] for piece in pieces) == GREEDY
    assert (end["type"], end["delta"]["finish_reason"]) == ("message-end", "COMPLETE")
    assert end["delta"]["usage"]["tokens"] == counts
    assert chat(gateway, **(asked | {"max_tokens": 3})).json()["finish_reason"] == "MAX_TOKENS"
    stopped = chat(gateway, **(asked | {"stop_sequences": ["jumps"]})).json()
    assert stopped["finish_reason"] == "STOP_SEQUENCE"


def test_thoughts_and_calls(gateway: AgentGateway) -> None:
    """A thought is content of its own; calls have ids and texts of arguments, also in pieces; their results
    and the thought before them come back in the next request's prompt."""
    gateway.says(f"{THOUGHT}{CALL}")
    whole = chat(gateway, tools=[WEATHER], tool_choice="REQUIRED").json()
    message = whole["message"]
    assert (whole["finish_reason"], message["content"][0]["type"]) == ("TOOL_CALL", "thinking")
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich"}
    streamed = events(chat(gateway, tools=[WEATHER], tool_choice="REQUIRED", stream=True))
    kinds = [one["type"] for one in streamed]
    assert [kind for kind in dict.fromkeys(kinds) if kind.startswith("tool-call")] == [
        "tool-call-start",
        "tool-call-delta",
        "tool-call-end",
    ]
    pieces = [one["delta"]["message"]["tool_calls"] for one in streamed if one["type"] == "tool-call-delta"]
    text = "".join(piece["function"]["arguments"] for piece in pieces)
    assert json.loads(text) == {"city": "Zürich"}
    begun = next(one for one in streamed if one["type"] == "tool-call-start")
    assert (begun["index"], begun["delta"]["message"]["tool_calls"]["function"]["name"]) == (0, "get_weather")
    gateway.says(GREEDY)
    found = {"type": "document", "document": {"id": "1", "data": {"sky": "clear"}}}
    earlier = {"role": "assistant", "tool_plan": "Look it up.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": [found]}
    system = {"role": "system", "content": "Brief."}
    answer = chat(gateway, messages=[system, *HELLO, earlier, result], tools=[WEATHER]).json()
    assert answer["message"]["content"][-1]["type"] == "text"
    for part in ("Brief.", "Look it up.", "get_weather", '{"sky": "clear"}'):
        assert part in gateway.prompt()


def test_json_and_refusals(gateway: AgentGateway) -> None:
    """A schema becomes the engine's constraint; what is wrong is named by Cohere's fields; a failure within a
    stream ends the message."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    gateway.says('{"a": 1}')
    chat(gateway, response_format={"type": "json_object", "json_schema": schema})
    assert gateway.engine.seen.requests[0].HasField("constraint")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"p": 2}, "p"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"tool_choice": "MAYBE"}, "tool_choice"),
        ({"messages": []}, "messages"),
    ]
    for body, param in wrong:
        answer = chat(gateway, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert chat(gateway, model="other").status_code == 404
    gateway.engine.script = Script(error_message="broken")
    *_, end = events(chat(gateway, stream=True))
    assert (end["type"], end["delta"]["finish_reason"]) == ("message-end", "ERROR")
    assert "broken" in end["delta"]["error"]
