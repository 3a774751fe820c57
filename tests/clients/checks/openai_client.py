"""openai-python: chat completions and Responses."""

from __future__ import annotations

import base64
import json
from typing import Any

from checks.common import (
    ASK_BOTH,
    ASK_CHAIN,
    ASK_ONE,
    CHAIN_ANSWER,
    TOOLS,
    Report,
    Server,
    Servers,
    check,
    get_weather,
    is_report,
    png,
    to_fahrenheit,
)
from openai import OpenAI

NAME = "openai"
RESPONSES = "openai, Responses"
FUNCTIONS: dict[str, Any] = {"get_weather": get_weather, "to_fahrenheit": to_fahrenheit}
FLAT_TOOLS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
PICTURE = "data:image/png;base64," + base64.b64encode(png()).decode()


def client_of(server: Server) -> OpenAI:
    """Returns a client without retries, which would hide errors."""
    return OpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=120)


def chat(server: Server, text: str, **options: Any) -> Any:
    """Sends one question; `options` go into the request."""
    messages: Any = [{"role": "user", "content": text}]
    return client_of(server).chat.completions.create(model=server.model, messages=messages, **options)


@check(NAME, "chat")
def plain(servers: Servers) -> None:
    answer = chat(servers.scripted, "Hello")
    assert answer.choices[0].message.content == "You said: Hello"
    assert answer.usage.completion_tokens > 0
    real = chat(servers.demo, "What is the capital of France?", max_tokens=16, temperature=0)
    assert "Paris" in real.choices[0].message.content


@check(NAME, "stream")
def streamed(servers: Servers) -> None:
    chunks = list(chat(servers.scripted, "Hello", stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "You said: Hello"
    assert len(chunks) > 4
    assert chunks[-1].usage.completion_tokens > 0


@check(NAME, "multi-turn")
def several_turns(servers: Servers) -> None:
    client, model = client_of(servers.scripted), servers.scripted.model
    messages: Any = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Fish"}]
    first = client.chat.completions.create(model=model, messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "What was the first thing I said?"}]
    second = client.chat.completions.create(model=model, messages=messages)
    assert second.choices[0].message.content == "The first thing was: Fish"


@check(NAME, "tool")
def one_tool(servers: Servers) -> None:
    choice = chat(servers.scripted, ASK_ONE, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    none = chat(servers.scripted, ASK_ONE, tools=TOOLS, tool_choice="none").choices[0]
    assert not none.message.tool_calls


@check(NAME, "parallel tools")
def parallel_tools(servers: Servers) -> None:
    calls = chat(servers.scripted, ASK_BOTH, tools=TOOLS).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Oslo", "Rome"]
    assert len({call.id for call in calls}) == 2
    single = chat(servers.scripted, ASK_BOTH, tools=TOOLS, parallel_tool_calls=False)
    assert len(single.choices[0].message.tool_calls) == 1


@check(NAME, "streamed tools")
def streamed_tools(servers: Servers) -> None:
    client = client_of(servers.scripted)
    messages: Any = [{"role": "user", "content": ASK_BOTH}]
    tools: Any = TOOLS
    with client.chat.completions.stream(
        model=servers.scripted.model, messages=messages, tools=tools
    ) as stream:
        kinds = [event.type for event in stream]
        calls = stream.get_final_completion().choices[0].message.tool_calls or []
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Oslo", "Rome"]


@check(NAME, "forced tool")
def forced_tools(servers: Servers) -> None:
    named = {"type": "function", "function": {"name": "to_fahrenheit"}}
    limits: dict[str, Any] = {"max_tokens": 200, "temperature": 0}
    (call,) = chat(servers.demo, "Hi", tools=TOOLS, tool_choice=named, **limits).choices[0].message.tool_calls
    assert call.function.name == "to_fahrenheit"
    assert isinstance(json.loads(call.function.arguments)["celsius"], int)
    tools = TOOLS[1:]
    choice = chat(
        servers.demo, "Hi", tools=tools, tool_choice="required", parallel_tool_calls=False, **limits
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "to_fahrenheit"


@check(NAME, "JSON schema")
def schema(servers: Servers) -> None:
    for server in (servers.scripted, servers.demo):
        messages: Any = [{"role": "user", "content": "Report"}]
        answer = client_of(server).chat.completions.parse(
            model=server.model, messages=messages, response_format=Report, max_tokens=200, temperature=0
        )
        is_report(answer.choices[0].message.parsed)
    loose = chat(
        servers.demo, "Report", response_format={"type": "json_object"}, max_tokens=200, temperature=0
    )
    if loose.choices[0].finish_reason == "stop":
        json.loads(loose.choices[0].message.content)


@check(NAME, "reasoning")
def reasoning(servers: Servers) -> None:
    message = chat(servers.scripted, "Please think").choices[0].message
    assert message.content == "You said: Please think"
    assert message.model_extra["reasoning_content"] == "The user wants something."
    answer = chat(servers.scripted, "Please think", stream=True, stream_options={"include_usage": True})
    thought, usage = "", None
    for chunk in answer:
        usage = chunk.usage or usage
        if chunk.choices:
            thought += (chunk.choices[0].delta.model_extra or {}).get("reasoning_content") or ""
    assert thought == "The user wants something."
    assert usage.completion_tokens_details.reasoning_tokens > 0


@check(NAME, "vision")
def vision(servers: Servers) -> None:
    client = client_of(servers.scripted)
    parts: Any = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": PICTURE}},
    ]
    answer = client.chat.completions.create(
        model=servers.scripted.model, messages=[{"role": "user", "content": parts}]
    )
    assert answer.choices[0].message.content == "I see 1 image(s)."


@check(NAME, "agent loop")
def loop(servers: Servers) -> None:
    client, messages = client_of(servers.scripted), [{"role": "user", "content": ASK_CHAIN}]
    for _ in range(5):
        request: Any = {"model": servers.scripted.model, "messages": messages, "tools": TOOLS}
        message: Any = client.chat.completions.create(**request).choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert message.content == CHAIN_ANSWER


def respond(server: Server, given: Any, **options: Any) -> Any:
    """Calls /v1/responses once."""
    return client_of(server).responses.create(model=server.model, input=given, **options)


@check(RESPONSES, "chat")
def responses_plain(servers: Servers) -> None:
    answer = respond(servers.scripted, "Hello", instructions="Be brief")
    assert answer.output_text == "You said: Hello [system: Be brief]"
    assert answer.status == "completed"
    assert answer.usage.output_tokens > 0


@check(RESPONSES, "stream")
def responses_streamed(servers: Servers) -> None:
    client = client_of(servers.scripted)
    with client.responses.stream(model=servers.scripted.model, input="Hello") as stream:
        events = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "You said: Hello"
    assert events[0] == "response.created"
    assert events[-1] == "response.completed"
    assert events.count("response.output_text.delta") > 2


@check(RESPONSES, "multi-turn")
def responses_turns(servers: Servers) -> None:
    first = respond(servers.scripted, "Fish")
    question = "What was the first thing I said?"
    assert respond(servers.scripted, question, previous_response_id=first.id).output_text.endswith("Fish")
    history = [{"role": "user", "content": "Fish"}, *first.output, {"role": "user", "content": question}]
    assert respond(servers.scripted, history, store=False).output_text.endswith("Fish")


@check(RESPONSES, "tool")
def responses_tool(servers: Servers) -> None:
    (item,) = respond(servers.scripted, ASK_ONE, tools=FLAT_TOOLS).output
    assert (item.type, item.name, json.loads(item.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Oslo"},
    )


@check(RESPONSES, "parallel tools")
def responses_parallel(servers: Servers) -> None:
    items = respond(servers.scripted, ASK_BOTH, tools=FLAT_TOOLS).output
    assert [json.loads(item.arguments)["city"] for item in items] == ["Oslo", "Rome"]


@check(RESPONSES, "streamed tools")
def responses_streamed_tools(servers: Servers) -> None:
    client = client_of(servers.scripted)
    with client.responses.stream(model=servers.scripted.model, input=ASK_ONE, tools=FLAT_TOOLS) as stream:
        events = list(stream)
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(pieces)) == {"city": "Oslo"}
    assert any(event.type == "response.output_item.done" for event in events)


@check(RESPONSES, "forced tool")
def responses_forced(servers: Servers) -> None:
    choice = {"type": "function", "name": "to_fahrenheit"}
    items = respond(
        servers.demo, "Hi", tools=FLAT_TOOLS, tool_choice=choice, max_output_tokens=200, temperature=0
    ).output
    assert isinstance(json.loads(items[-1].arguments)["celsius"], int)


@check(RESPONSES, "JSON schema")
def responses_schema(servers: Servers) -> None:
    for server in (servers.scripted, servers.demo):
        answer = client_of(server).responses.parse(
            model=server.model, input="Report", text_format=Report, max_output_tokens=200, temperature=0
        )
        is_report(answer.output_parsed)


@check(RESPONSES, "reasoning")
def responses_reasoning(servers: Servers) -> None:
    thought, message = respond(servers.scripted, "Please think").output
    assert thought.type == "reasoning"
    assert thought.content[0].text == "The user wants something."
    assert message.content[0].text == "You said: Please think"


@check(RESPONSES, "vision")
def responses_vision(servers: Servers) -> None:
    parts = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": PICTURE}]
    assert "1 image" in respond(servers.scripted, [{"role": "user", "content": parts}]).output_text


@check(RESPONSES, "agent loop")
def responses_loop(servers: Servers) -> None:
    given: list[Any] = [{"role": "user", "content": ASK_CHAIN}]
    for _ in range(5):
        answer = respond(servers.scripted, given, tools=FLAT_TOOLS, store=False)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        given += answer.output
        for item in calls:
            result = FUNCTIONS[item.name](**json.loads(item.arguments))
            given.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    assert answer.output_text == CHAIN_ANSWER
