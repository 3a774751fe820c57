"""Guards OpenAI's Responses without a server: what a request becomes, an answer's events, and the store."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from gateway.apis.formats import Output, Usage
from gateway.apis.responses import ResponsesReply, ToolName, encrypted, translate
from gateway.apis.responses_format import InputText, ResponsesFormat
from gateway.apis.stored_responses import ResponseStore, StoreLimits, shared_store
from gateway.apis.translation import Context, Translation
from gateway.parsers.events import (
    ContentDelta,
    Finish,
    ParsedDelta,
    ReasoningDelta,
    TokenLogprob,
    ToolCallArguments,
    ToolCallStart,
)
from gateway.schemas.common import Tolerance
from gateway.schemas.errors import ApiError
from gateway.schemas.responses import ResponsesRequest
from gateway.text.tokenizer import Tokenizer
from moebius.config import GatewayConfig, MoebiusConfig
from moebius.errors import ConfigError
from tests.helpers.api_requests import ANSWER, delta, events, served_model
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

USAGE = Usage(prompt_tokens=50, completion_tokens=9, cached_tokens=32, reasoning_tokens=4)
LIMITS = StoreLimits(count=3, size=100_000, age_s=60.0)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def store(tmp_path: Path) -> ResponseStore:
    """Returns an empty one."""
    return ResponseStore(str(tmp_path), LIMITS)


@pytest.fixture
def context(tmp_path: Path, store: ResponseStore) -> Context:
    """Returns the context as in a prompt process."""
    return Context(Tolerance(), served_model(tmp_path), store)


def translated(context: Context, **fields: Any) -> Translation:
    """Returns the translation of a body with these fields."""
    body = {"model": "tiny", "input": "hi", **fields}
    return translate(ResponsesRequest.model_validate(body, context=context.tolerance), context)


def format_of(reply: ResponsesReply, tmp_path: Path, logprobs: int | None = None) -> ResponsesFormat:
    """Returns a format as the route makes it."""
    write_tokenizer(tmp_path, byte_level_tokenizer())
    store = ResponseStore(str(tmp_path), LIMITS)
    return ResponsesFormat("tiny", Tokenizer.from_dir(tmp_path), logprobs, reply, store)


def streamed(form: ResponsesFormat, answer: list[ParsedDelta]) -> list[dict[str, Any]]:
    """Returns the events of an answer that comes delta by delta, each valid for OpenAI's client and
    numbered.
    """
    data = b"".join(form.stream_delta(one, lambda: USAGE) for one in answer)
    found = events(data + form.stream_end(USAGE))
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    for one in found:
        EVENT.validate_python(one)
        # Clients add deltas to what was added: it has to be empty, also where both come of one message.
        added = {**one.get("item", {}), **one.get("part", {})} if one["type"].endswith(".added") else {}
        assert not any(added.get(name) for name in ("arguments", "input", "text", "content", "logprobs"))
    return found


TOOLS = {"weather": ToolName("function", "weather"), "patch": ToolName("custom", "patch")}
REPLY = ResponsesReply("resp_0a", {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}, TOOLS)


def test_stream_of_thought_text_and_calls(tmp_path: Path) -> None:
    """The golden order: each item is added, grows, is done before the next; the last event has them all."""
    found = streamed(format_of(REPLY, tmp_path), ANSWER)
    call = ["output_item.added", "function_call_arguments.delta"]
    done = ["function_call_arguments.done", "output_item.done"]
    assert [one["type"].removeprefix("response.") for one in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *call,
        "function_call_arguments.delta",
        *done,
        *call,
        *done,
        "completed",
    ]
    response = found[-1]["response"]
    Response.model_validate(response)
    assert response["output"] == [one["item"] for one in found if one["type"].endswith("item.done")]
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert response["output"][2] == {
        "id": "fc_0a_2",
        "type": "function_call",
        "call_id": "call_1",
        "name": "weather",
        "arguments": '{"city": "Rome"}',
        "status": "completed",
    }
    assert response["usage"] == {
        "input_tokens": 50,
        "input_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 59,
    }


def test_whole_response_equals_the_streams_last(tmp_path: Path) -> None:
    """A response that is not streamed is the one a stream ends with."""
    last = streamed(format_of(REPLY, tmp_path), ANSWER)[-1]["response"]
    whole = format_of(REPLY, tmp_path).whole([Output(list(ANSWER), ANSWER[-1].finish)], USAGE)
    times = {"created_at": 0, "completed_at": 0}
    assert {**whole, **times} == {**last, **times}


def test_summaries_and_encrypted_thoughts(tmp_path: Path) -> None:
    """Where a summary is asked for, the thought is one; encrypted content holds it for the next request."""
    reply = ResponsesReply("resp_0a", {}, TOOLS, summarises=True, encrypts=True)
    thought = [delta(ReasoningDelta("Höm.")), delta(ContentDelta("Yes."), finish=Finish("stop"))]
    form = format_of(reply, tmp_path)
    data = b"".join(form.stream_delta(one, lambda: USAGE) for one in thought) + form.stream_end(USAGE)
    found = events(data)
    assert [one["type"].removeprefix("response.") for one in found][3:7] == [
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ]
    item = found[-1]["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "Höm."}]
    assert item["encrypted_content"] == encrypted("Höm.")
    assert "content" not in item


def test_custom_tools_take_text(tmp_path: Path) -> None:
    """A custom tool's call has the text itself, streamed as it comes out of the function's arguments."""
    text = 'line "one"\n\tü 😀\\'
    arguments = json.dumps({"input": text})
    pieces = [delta(ToolCallStart(0, "c", "patch"))]
    pieces += [delta(ToolCallArguments(0, one)) for one in arguments]
    found = streamed(format_of(REPLY, tmp_path), [*pieces, delta(finish=Finish("tool_calls"))])
    deltas = [one["delta"] for one in found if one["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 10
    assert "".join(deltas) == text
    item = found[-1]["response"]["output"][0]
    assert (item["type"], item["input"], item["name"]) == ("custom_tool_call", text, "patch")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\u00e4\\ud83d\\ude00b\\n\\"c"}', 'aä😀b\n"c'),
        ('{"input": "\\ud83dx"}', "\ufffdx"),
        ('{"input": "cut of', "cut of"),
        ('{"input": "cut \\u00', "cut "),
        ('{"other": 1, "input": "x"}', "x"),
        ('{"other": 1}', '{"other": 1}'),
        ('{"input": 7}', '{"input": 7}'),
        ("no object", "no object"),
        ("", ""),
        ('{"input": "\\q"}', "\\q"),
        ('{"input": "\\uzzzz and so on', "\\uzzzz and so on"),
        (' {\n "input" : "x" }', "x"),
    ],
)
def test_text_of_arguments_at_every_cut(arguments: str, text: str) -> None:
    """However the arguments are cut, the text is the same; what is no such object is given whole."""
    for cut in range(len(arguments) + 1):
        reader = InputText()
        found = reader.feed(arguments[:cut]) + reader.feed(arguments[cut:]) + reader.finish(arguments)
        assert found == text == "".join(reader.given)
    reader = InputText()
    assert "".join(map(reader.feed, arguments)) + reader.finish(arguments) == text


def test_text_of_arguments_takes_linear_time() -> None:
    """Ten times the text, fed by the character, takes no hundred times as long."""

    def seconds(count: int) -> float:
        reader, started = InputText(), time.process_time()
        for piece in ['{"input": "', *(["ab\\n"] * count), '"}']:
            reader.feed(piece)
        return time.process_time() - started

    assert seconds(100_000) < 40 * max(seconds(10_000), 0.005)


def test_length_makes_it_incomplete(tmp_path: Path) -> None:
    """An output cut at its limit: the response and its last item are incomplete."""
    cut = [delta(ContentDelta("abc"), finish=Finish("length"))]
    found = streamed(format_of(REPLY, tmp_path), cut)
    assert found[-1]["type"] == "response.incomplete"
    response = found[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_failure_in_a_stream(tmp_path: Path) -> None:
    """A stream fails with a response of status failed, also before anything was said."""
    form = format_of(REPLY, tmp_path)
    found = events(form.stream_failure(ApiError(503, "gone")))
    assert [one["type"] for one in found] == ["response.created", "response.in_progress", "response.failed"]
    assert found[-1]["response"]["error"] == {"code": "server_error", "message": "gone"}
    form = format_of(REPLY, tmp_path)
    form.stream_delta(ANSWER[0], lambda: USAGE)
    (failed,) = events(form.stream_failure(ApiError(429, "later", code="queue_full")))
    assert failed["sequence_number"] == 5
    assert failed["response"]["error"]["code"] == "rate_limit_exceeded"


def test_logprobs_are_those_of_the_text(tmp_path: Path) -> None:
    """Where they are asked for, each text has its tokens' log-probabilities, and the item all of them."""
    scores = [(TokenLogprob(60 + n, -0.5, ((60 + n, -0.5),), n),) for n in range(2)]
    answer = [ParsedDelta(0, (ContentDelta("x"),), score, (), 1) for score in scores]
    found = streamed(format_of(REPLY, tmp_path, logprobs=1), answer)
    deltas = [one["logprobs"] for one in found if one["type"] == "response.output_text.delta"]
    assert [len(one) for one in deltas] == [1, 1]
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == deltas[0] + deltas[1]


def test_history_of_an_agent(context: Context) -> None:
    """Instructions, messages, thoughts, calls of both kinds and what they gave become a chat."""
    items = [
        {"role": "developer", "content": "Careful."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": encrypted("Hm.")},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "***"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [
                {"type": "input_text", "text": "Done"},
                {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "original"},
            ],
        },
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}], "content": None},
        {"type": "function_call", "call_id": "c3", "name": "list", "arguments": "{", "namespace": "mcp__a__"},
        {"type": "function_call_output", "call_id": "c3", "output": "x"},
    ]
    request = translated(context, input=items, instructions="Be brief.").request

    def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert request["messages"] == [
        {"role": "system", "content": "Be brief.\n\nCareful."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I look.",
            "tool_calls": [
                call("c1", "weather", {"city": "Rome"}),
                call("c2", "patch", {"input": "***"}),
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "Done"},
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
        },
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "So.",
            "tool_calls": [call("c3", "mcp__a__list", {"arguments": "{"})],
        },
        {"role": "tool", "tool_call_id": "c3", "content": "x"},
    ]
    assert context.tolerance.ignored == {"input[].web_search_call"}


def test_tools_of_every_kind(context: Context) -> None:
    """Functions, custom tools and namespaces can be called; what OpenAI runs itself is left out."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    translation = translated(
        context,
        tools=[
            function,
            {"type": "custom", "name": "patch", "description": "Edits.", "format": grammar},
            {
                "type": "namespace",
                "name": "mcp__a",
                "description": "A",
                "tools": [{**function, "strict": False}],
            },
            {"type": "web_search"},
            {"type": "local_shell"},
        ],
        tool_choice={"type": "custom", "name": "patch"},
        parallel_tool_calls=False,
    )
    tools = {tool["function"]["name"]: tool["function"] for tool in translation.request["tools"]}
    assert list(tools) == ["f", "patch", "mcp__a__f"]
    assert tools["f"]["strict"] is True
    assert "start: /x+/" in tools["patch"]["description"]
    assert tools["patch"]["parameters"]["required"] == ["input"]
    assert translation.request["tool_choice"] == {"type": "function", "function": {"name": "patch"}}
    assert translation.request["parallel_tool_calls"] is False
    assert translation.reply.tools["mcp__a__f"] == ToolName("function", "f", "mcp__a")
    assert translation.reply.tools["patch"].kind == "custom"
    assert context.tolerance.ignored == {"tools[].web_search", "tools[].local_shell"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    choice = translated(context, tools=[function], tool_choice=allowed).request["tool_choice"]
    named = {"type": "function", "function": {"name": "f"}}
    assert choice == {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}


def test_a_namespace_is_named_with_its_calls(tmp_path: Path) -> None:
    """A call of a namespace's tool has the name and the namespace that were sent."""
    reply = ResponsesReply("resp_0a", {}, {"mcp__a__f": ToolName("function", "f", "mcp__a")})
    answer = [delta(ToolCallStart(0, "c", "mcp__a__f"), ToolCallArguments(0, "{}"))]
    item = format_of(reply, tmp_path).whole([Output(answer)], USAGE)["output"][0]
    assert (item["name"], item["namespace"]) == ("f", "mcp__a")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_none"}, "conversation"),
        ({"conversation": {"id": "c"}, "previous_response_id": "r"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": []}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_none_1"}]}, "input"),
    ],
)
def test_what_is_refused(context: Context, fields: dict[str, Any], param: str) -> None:
    """What would make another answer and cannot be done is refused by its name."""
    with pytest.raises(ApiError) as caught:
        translated(context, **fields)
    assert caught.value.param == param
    assert caught.value.status == (404 if "none" in str(fields) else 400)


@pytest.mark.parametrize(
    "fields",
    [
        {"input": 3},
        {"input": [{"type": "message", "role": "nobody", "content": "x"}]},
        {"input": [{"type": "function_call", "name": "f"}]},
        {"max_output_tokens": 0},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "namespace", "name": "n", "tools": 3}]},
    ],
)
def test_wrong_bodies(context: Context, fields: dict[str, Any]) -> None:
    """Items and tools of known kinds have to be right."""
    with pytest.raises(ValidationError):
        translated(context, **fields)


def test_fields_reach_the_chat_and_come_back(context: Context) -> None:
    """Sampling, format, effort and limits are the chat's; the response repeats what was sent."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {
        "format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True},
        "verbosity": "low",
    }
    translation = translated(
        context,
        text=text,
        reasoning={"effort": "low", "summary": "auto"},
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        metadata={"k": "v"},
        truncation="auto",
        store=False,
        prompt_cache_key="key",
        client_metadata={"x": "y"},
    )
    request, fields = translation.request, translation.reply.fields
    assert request["response_format"]["json_schema"] == {"name": "a", "schema": schema, "strict": True}
    assert (request["reasoning_effort"], request["max_tokens"], request["top_p"]) == ("low", 7, 0.9)
    assert (request["logprobs"], request["top_logprobs"]) == (True, 2)
    assert fields["text"] == text
    assert fields["reasoning"] == {"effort": "low", "summary": "auto"}
    assert (fields["metadata"], fields["store"], fields["truncation"]) == ({"k": "v"}, False, "auto")
    assert translation.reply.summarises
    assert translation.reply.encrypts
    assert translation.reply.input_items is None
    assert context.tolerance.ignored == {"client_metadata"}


def stored(context: Context, tmp_path: Path, **fields: Any) -> dict[str, Any]:
    """Returns a response that was answered and stored."""
    form = format_of(translated(context, **fields).reply, tmp_path)
    thought = [delta(ReasoningDelta("Hm."), ContentDelta("Yes."), finish=Finish("stop"))]
    response = form.whole([Output(thought)], USAGE)
    asyncio.run(form.settle())
    return response


def test_going_on_from_a_response(context: Context, tmp_path: Path) -> None:
    """The next request has all that was said before, but not the instructions of then; and so on."""
    first = stored(context, tmp_path, input="One", instructions="Old.")
    second = stored(context, tmp_path, input="Two", previous_response_id=first["id"])
    third = translated(context, input="Three", previous_response_id=second["id"], instructions="New.")
    answered = {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."}
    assert third.request["messages"] == [
        {"role": "system", "content": "New."},
        {"role": "user", "content": "One"},
        answered,
        {"role": "user", "content": "Two"},
        answered,
        {"role": "user", "content": "Three"},
    ]
    assert second["previous_response_id"] == first["id"]
    found = context.responses.find(second["id"]) if context.responses else None
    assert found is not None
    assert found.response == second
    assert [item.get("role") for item in found.input] == ["user", None, "assistant", "user"]
    assert all(item["id"] for item in found.input)


def test_items_by_reference(context: Context, tmp_path: Path) -> None:
    """A stored response's item may be sent by its id."""
    first = stored(context, tmp_path, input="One")
    reference = {"type": "item_reference", "id": first["output"][1]["id"]}
    request = translated(context, input=[reference, {"role": "user", "content": "x"}]).request
    assert request["messages"][0] == {"role": "assistant", "content": "Yes."}


def put(store: ResponseStore, name: str, size: int = 10) -> bool:
    """Stores a small response."""
    return store.put({"id": name, "output": []}, json.dumps(["x" * size]).encode())


def test_the_store_keeps_the_newest(tmp_path: Path) -> None:
    """Count and bytes of all together bound what is kept; what is larger than all is not."""
    store = ResponseStore(str(tmp_path), StoreLimits(count=3, size=3000, age_s=60))
    for number in range(5):
        assert put(store, f"r{number}")
    assert [store.find(f"r{number}") is not None for number in range(5)] == [False, False, True, True, True]
    assert put(store, "large", 2950)
    assert store.find("r4") is None
    assert store.find("large") is not None
    assert not put(store, "too large", 3000)
    assert store.find("too large") is None


def test_the_store_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is deleted or too old is gone; the file is the user's alone."""
    store = ResponseStore(str(tmp_path), StoreLimits(count=3, size=3000, age_s=60))
    put(store, "a")
    put(store, "b")
    assert (tmp_path / "responses.sqlite").stat().st_mode & 0o077 == 0
    assert store.delete("a")
    assert not store.delete("a")
    assert store.find("a") is None
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    assert store.find("b") is None


def test_a_broken_store_costs_no_answer(tmp_path: Path) -> None:
    """A file that is none, or a directory that is gone, is a store without responses."""
    (tmp_path / "responses.sqlite").write_bytes(b"no database" * 100)
    store = ResponseStore(str(tmp_path), LIMITS)
    assert not put(store, "a")
    assert store.find("a") is None
    assert not store.delete("a")
    gone = ResponseStore(str(tmp_path / "gone"), LIMITS)
    assert not put(gone, "a")
    assert gone.find("a") is None


def test_where_the_store_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configured directory is made, or refused by the setting's name; a private one is removed at the end;
    without any place for it the gateway serves without a store."""
    with shared_store(MoebiusConfig()) as shared:
        private = Path(shared.gateway.stored_responses_dir)
        assert private.stat().st_mode & 0o077 == 0
        assert put(ResponseStore.of(shared.gateway), "a")
    assert not private.exists()
    chosen = tmp_path / "new" / "responses"
    settings = GatewayConfig(stored_responses_dir=str(chosen))
    with shared_store(MoebiusConfig(gateway=settings)) as shared:
        assert put(ResponseStore.of(shared.gateway), "a")
    assert ResponseStore.of(settings).find("a") is not None
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="stored_responses_dir"):
        ResponseStore.of(GatewayConfig(stored_responses_dir=str(tmp_path / "file")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert not ResponseStore.of(GatewayConfig()).keeps


def test_a_store_of_none(tmp_path: Path) -> None:
    """With a count of 0 nothing is written."""
    store = ResponseStore(str(tmp_path), StoreLimits(count=0, size=3000, age_s=60))
    assert not put(store, "a")
    assert list(tmp_path.iterdir()) == []
