"""litellm, with its OpenAI and its Anthropic provider."""

from __future__ import annotations

import base64
import json
from typing import Any

import litellm
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

NAME = "litellm"
FUNCTIONS: dict[str, Any] = {"get_weather": get_weather, "to_fahrenheit": to_fahrenheit}


def complete(server: Server, text: str | list[Any], **options: Any) -> Any:
    """Sends one question, or a list of messages, to a server that litellm knows as vLLM."""
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    model = f"hosted_vllm/{server.model}"
    return litellm.completion(model, messages, api_base=server.v1, api_key="none", num_retries=0, **options)


@check(NAME, "chat")
def plain(servers: Servers) -> None:
    assert complete(servers.scripted, "Hello").choices[0].message.content == "You said: Hello"
    by_messages = litellm.completion(
        f"anthropic/{servers.scripted.model}",
        [{"role": "user", "content": "Hello"}],
        api_base=servers.scripted.base,
        api_key="none",
    )
    assert by_messages.choices[0].message.content == "You said: Hello"


@check(NAME, "stream")
def streamed(servers: Servers) -> None:
    chunks = complete(servers.scripted, "Hello", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "You said: Hello"


@check(NAME, "multi-turn")
def several_turns(servers: Servers) -> None:
    first = complete(servers.scripted, "Fish").choices[0].message
    history = [{"role": "user", "content": "Fish"}, first, {"role": "user", "content": "The first thing?"}]
    assert complete(servers.scripted, history).choices[0].message.content == "The first thing was: Fish"


@check(NAME, "tool")
def one_tool(servers: Servers) -> None:
    (call,) = complete(servers.scripted, ASK_ONE, tools=TOOLS).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}


@check(NAME, "parallel tools")
def parallel_tools(servers: Servers) -> None:
    calls = complete(servers.scripted, ASK_BOTH, tools=TOOLS).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Oslo", "Rome"]


@check(NAME, "streamed tools")
def streamed_tools(servers: Servers) -> None:
    chunks = list(complete(servers.scripted, ASK_BOTH, tools=TOOLS, stream=True))
    calls = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Oslo", "Rome"]


@check(NAME, "forced tool")
def forced_tool(servers: Servers) -> None:
    choice = {"type": "function", "function": {"name": "to_fahrenheit"}}
    answer = complete(servers.demo, "Hi", tools=TOOLS, tool_choice=choice, max_tokens=200, temperature=0)
    assert isinstance(json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["celsius"], int)


@check(NAME, "JSON schema")
def schema(servers: Servers) -> None:
    for server in (servers.scripted, servers.demo):
        answer = complete(server, "Report", response_format=Report, max_tokens=200, temperature=0)
        is_report(Report.model_validate_json(answer.choices[0].message.content))


@check(NAME, "reasoning")
def reasoning(servers: Servers) -> None:
    message = complete(servers.scripted, "Please think").choices[0].message
    assert (message.reasoning_content, message.content) == (
        "The user wants something.",
        "You said: Please think",
    )
    chunks = complete(servers.scripted, "Please think", stream=True)
    thoughts = (getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks)
    assert "".join(thoughts) == "The user wants something."


@check(NAME, "vision")
def vision(servers: Servers) -> None:
    picture = "data:image/png;base64," + base64.b64encode(png()).decode()
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": picture}}]
    answer = complete(servers.scripted, [{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == "I see 1 image(s)."


@check(NAME, "agent loop")
def loop(servers: Servers) -> None:
    messages: list[Any] = [{"role": "user", "content": ASK_CHAIN}]
    for _ in range(5):
        message = complete(servers.scripted, messages, tools=TOOLS).choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert message.content == CHAIN_ANSWER
