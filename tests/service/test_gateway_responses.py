"""Guards what the openai client's `.responses` sees of the gateway, in front of a scripted engine."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.agent_gateway import GREEDY, THOUGHT, AgentGateway, agent_gateway
from tests.helpers.fake_engine import MODEL, Script

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Edits files"}
CALLS = (
    f"{THOUGHT}Let me look.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+x \\"y\\""}}\n</tool_call>'
)


def test_text(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """A whole response of a text; what the engine gets has its id."""
    response = client.responses.create(model=MODEL, input="Tell me.", instructions="Brief.", temperature=0)
    assert response.output_text == GREEDY
    assert (response.status, response.model, response.instructions) == ("completed", MODEL, "Brief.")
    assert response.usage is not None
    sent = gateway.engine.seen.requests[0]
    assert (response.usage.input_tokens, sent.request_id) == (len(sent.tokenized.input_ids), response.id)
    assert gateway.prompt().startswith("<|start|>system\nBrief.<|end|>")


def test_stream_builds_the_same_response(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """Thought, text and calls of both kinds: the stream's last event has what its events added up to."""
    settings: Any = {"model": MODEL, "input": "Weather?", "tools": [WEATHER, PATCH]}
    gateway.says(CALLS)
    whole = client.responses.create(**settings)
    with client.responses.stream(**settings) as stream:
        found = list(stream)
        built = stream.get_final_response()
    assert [item.type for item in built.output] == [
        "reasoning",
        "message",
        "function_call",
        "custom_tool_call",
    ]

    def essence(response: Any) -> list[dict[str, Any]]:
        items = [item.to_dict() for item in response.output]
        left_out = ("id", "call_id", "parsed_arguments")
        return [{name: item[name] for name in item if name not in left_out} for item in items]

    texts = [one.delta for one in found if one.type == "response.output_text.delta"]
    assert len(texts) > 2
    assert "".join(texts).strip() == "Let me look."
    assert essence(whole)[2:] == [
        {
            "type": "function_call",
            "name": "get_weather",
            "arguments": '{"city": "Zürich"}',
            "status": "completed",
        },
        {
            "type": "custom_tool_call",
            "name": "apply_patch",
            "input": '*** Begin\n+x "y"',
            "status": "completed",
        },
    ]
    assert essence(whole)[2:] == essence(built)[2:]
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert [one.sequence_number for one in found] == list(range(len(found)))


def test_agent_loop_without_a_store(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """All of the history is sent back, thoughts encrypted, with what the tools gave, as Codex works."""
    settings: Any = {
        "model": MODEL,
        "store": False,
        "tools": [WEATHER, PATCH, {"type": "web_search"}],
        "include": ["reasoning.encrypted_content"],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "prompt_cache_key": "x",
    }
    history: Any = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    gateway.says(CALLS.rpartition("\n<tool_call>")[0])
    first = client.responses.create(input=history, **settings)
    history += [item.to_dict() for item in first.output]
    call: Any = first.output[-1]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"})
    gateway.says("It is sunny.")
    second = client.responses.create(input=history, **settings)
    assert second.output_text == "It is sunny."
    prompt = gateway.prompt()
    for text in ("The fox wants\n the weather.", '"city": "Zürich"', "<|start|>tool\nSunny"):
        assert text in prompt
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_agent_loop_over_the_store(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """Only what is new is sent; the conversation up to the former response is the server's."""
    gateway.says(CALLS.rpartition("\n<tool_call>")[0])
    first = client.responses.create(model=MODEL, input="Weather?", tools=[WEATHER])
    call: Any = first.output[-1]
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}]
    gateway.says("It is sunny.")
    with client.responses.stream(
        model=MODEL, input=output, previous_response_id=first.id, tools=[WEATHER]
    ) as stream:
        second = stream.get_final_response()
    for text in ("Weather?", "The fox wants", '"city": "Zürich"', "<|start|>tool\nSunny"):
        assert text in gateway.prompt()
    assert client.responses.retrieve(second.id).output_text == "It is sunny."
    listed = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.type for item in listed] == [
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
    ]
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(second.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    client.responses.create(model=MODEL, input="x", previous_response_id=second.id)


def test_refusals_name_this_apis_parameters(client: openai.OpenAI) -> None:
    """What the chat request would refuse is refused by the name that was sent."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", max_output_tokens=100_000)
    assert caught.value.param == "max_output_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="fox " * 20_000)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    wrong: Any = {"effort": "much"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", reasoning=wrong)
    assert caught.value.param == "reasoning.effort"
    schema: Any = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", text=schema)
    assert str(caught.value.param).startswith("text.format")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.responses.create(model="gpt-9", input="x")


def test_failure_in_a_stream(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """A failure after the first content ends the stream with a response that failed."""
    gateway.engine.script = Script(fail_after=3)
    events = list(client.responses.create(model=MODEL, input="x", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.code == "server_error"


def test_a_cut_answer_is_incomplete(client: openai.OpenAI) -> None:
    """At the limit of its tokens a response is incomplete, and can still be gone on from."""
    response = client.responses.create(model=MODEL, input="x", max_output_tokens=3, temperature=0)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    client.responses.create(model=MODEL, input="y", previous_response_id=response.id)


def test_leaving_cancels(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """A client that leaves a stream ends the engine's work, and nothing is stored."""
    gateway.engine.script = Script(held=threading.Event())
    stream = client.responses.create(model=MODEL, input="x", stream=True)
    first = next(iter(stream))
    stream.close()
    assert gateway.engine.seen.cancelled.wait(60)
    assert first.type == "response.created"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.response.id)


def test_pages_of_input_items(gateway: AgentGateway) -> None:
    """Items come newest first unless asked otherwise, in pages that a cursor joins; wrong cursors are
    refused.
    """
    items = [{"role": "user", "content": f"m{number}", "id": f"i{number}"} for number in range(5)]
    created = httpx.post(f"{gateway.url}/v1/responses", json={"model": MODEL, "input": items}).json()
    url = f"{gateway.url}/v1/responses/{created['id']}/input_items"
    page = httpx.get(url, params={"limit": 2}).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (["i4", "i3"], True)
    page = httpx.get(url, params={"limit": 9, "after": "i3"}).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (["i2", "i1", "i0"], False)
    assert page["data"][0]["content"] == [{"type": "input_text", "text": "m2"}]
    for params in ({"after": "none"}, {"limit": 0}, {"order": "up"}):
        answer = httpx.get(url, params=params)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_input_tokens_are_counted(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """The count is what the engine gets for the same request, with the stored response before it; counting
    sends nothing to the engine."""
    first = client.responses.create(model=MODEL, input="Tell me.")
    gateway.engine.reset()
    asked: dict[str, Any] = {
        "input": [{"role": "user", "content": "More."}],
        "instructions": "Brief.",
        "tools": [WEATHER, PATCH],
        "previous_response_id": first.id,
    }
    counted = client.responses.input_tokens.count(model=MODEL, **asked)
    assert (counted.object, gateway.engine.seen.requests) == ("response.input_tokens", [])
    client.responses.create(model=MODEL, **asked)
    sent = gateway.engine.seen.requests[0].tokenized.input_ids
    assert counted.input_tokens == len(sent) > 0
    with pytest.raises(openai.NotFoundError, match="resp_none"):
        client.responses.input_tokens.count(model=MODEL, input="x", previous_response_id="resp_none")


def test_nothing_is_stored(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With nothing to be stored, responses say so, and none is found."""
    with agent_gateway(tmp_path_factory.mktemp("none"), stored_responses=0) as gateway:
        created = httpx.post(f"{gateway.url}/v1/responses", json={"model": MODEL, "input": "x"}).json()
        assert created["store"] is False
        assert httpx.get(f"{gateway.url}/v1/responses/{created['id']}").status_code == 404
        body = {"model": MODEL, "input": "x", "previous_response_id": created["id"]}
        assert httpx.post(f"{gateway.url}/v1/responses", json=body).status_code == 404


def test_two_gateways_share_a_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whichever process a request reaches goes on from what another one answered."""
    shared = str(tmp_path_factory.mktemp("shared"))
    with (
        agent_gateway(tmp_path_factory.mktemp("one"), stored_responses_dir=shared) as one,
        agent_gateway(tmp_path_factory.mktemp("two"), stored_responses_dir=shared) as two,
    ):
        created = httpx.post(f"{one.url}/v1/responses", json={"model": MODEL, "input": "Remember"}).json()
        body = {"model": MODEL, "input": "x", "previous_response_id": created["id"]}
        assert httpx.post(f"{two.url}/v1/responses", json=body).status_code == 200
        assert "Remember" in two.prompt()


def test_json_of_a_schema(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """A schema reaches the engine as a constraint, and the response repeats it."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    response = client.responses.create(model=MODEL, input="x", text=form)
    assert json.loads(gateway.engine.seen.requests[0].constraint.json_schema)["required"] == ["a"]
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


def test_the_grammar_of_a_custom_tool_reaches_the_engine(
    gateway: AgentGateway, client: openai.OpenAI
) -> None:
    """It holds the tool's text also where the model chooses; one that cannot be enforced is a 400."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" /[^\\n]+/'}
    tool: Any = {**PATCH, "format": grammar}
    client.responses.create(model=MODEL, input="Edit.", tools=[tool])
    lark = gateway.engine.seen.requests[-1].constraint.lark
    assert "*** Begin" in lark
    tool = {**PATCH, "format": {"type": "text"}}
    client.responses.create(model=MODEL, input="Edit.", tools=[tool])
    assert not gateway.engine.seen.requests[-1].constraint.lark
    for wrong, part in (
        ({**grammar, "definition": "start: /a(?=b)/"}, "look-around"),
        ({"type": "grammar", "syntax": "lark"}, "definition"),
    ):
        tool = {**PATCH, "format": wrong}
        with pytest.raises(openai.BadRequestError, match=part):
            client.responses.create(model=MODEL, input="Edit.", tools=[tool])
