"""ollama-python."""

from __future__ import annotations

import json
from typing import Any

from checks.common import (
    ASK_BOTH,
    ASK_CHAIN,
    ASK_ONE,
    CHAIN_ANSWER,
    Report,
    Server,
    Servers,
    check,
    get_weather,
    is_report,
    png,
    to_fahrenheit,
)
from ollama import Client

NAME = "ollama"
TOOLS = [get_weather, to_fahrenheit]
FUNCTIONS: dict[str, Any] = {"get_weather": get_weather, "to_fahrenheit": to_fahrenheit}


def chat(server: Server, given: Any, **options: Any) -> Any:
    """Sends one question, or a list of messages."""
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return Client(host=server.base, timeout=120).chat(server.model, messages, **options)


@check(NAME, "chat")
def plain(servers: Servers) -> None:
    server = servers.scripted
    client = Client(host=server.base, timeout=120)
    assert [model.model for model in client.list().models] == [f"{server.model}:latest"]
    assert "completion" in (client.show(server.model).capabilities or [])
    answer = chat(server, "Hello")
    assert (answer.message.content, answer.done, answer.done_reason) == ("You said: Hello", True, "stop")
    assert answer.eval_count > 0
    made = client.generate(server.model, "Hello", system="Be brief")
    assert "You said: Hello" in made.response


@check(NAME, "stream")
def streamed(servers: Servers) -> None:
    parts = list(chat(servers.scripted, "Hello", stream=True))
    assert "".join(part.message.content or "" for part in parts) == "You said: Hello"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    made = Client(host=servers.scripted.base).generate(servers.scripted.model, "Hello", stream=True)
    assert "".join(part.response or "" for part in made) == "You said: Hello"


@check(NAME, "multi-turn")
def several_turns(servers: Servers) -> None:
    first = chat(servers.scripted, "Fish").message
    history = [{"role": "user", "content": "Fish"}, first, {"role": "user", "content": "The first thing?"}]
    assert chat(servers.scripted, history).message.content == "The first thing was: Fish"


@check(NAME, "tool")
def one_tool(servers: Servers) -> None:
    (call,) = chat(servers.scripted, ASK_ONE, tools=TOOLS).message.tool_calls
    assert (call.function.name, dict(call.function.arguments)) == ("get_weather", {"city": "Oslo"})


@check(NAME, "parallel tools")
def parallel_tools(servers: Servers) -> None:
    calls = chat(servers.scripted, ASK_BOTH, tools=TOOLS).message.tool_calls
    assert [call.function.arguments["city"] for call in calls] == ["Oslo", "Rome"]


@check(NAME, "streamed tools")
def streamed_tools(servers: Servers) -> None:
    parts = chat(servers.scripted, ASK_BOTH, tools=TOOLS, stream=True)
    calls = [call for part in parts for call in part.message.tool_calls or []]
    assert [call.function.arguments["city"] for call in calls] == ["Oslo", "Rome"]


@check(NAME, "agent loop")
def loop(servers: Servers) -> None:
    messages: list[Any] = [{"role": "user", "content": ASK_CHAIN}]
    for _ in range(5):
        message = chat(servers.scripted, messages, tools=TOOLS).message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    assert message.content == CHAIN_ANSWER


@check(NAME, "JSON schema")
def schema(servers: Servers) -> None:
    for server in (servers.scripted, servers.demo):
        answer = chat(
            server,
            "Report",
            format=Report.model_json_schema(),
            options={"num_predict": 200, "temperature": 0},
        )
        is_report(Report.model_validate_json(answer.message.content))
    loose = chat(servers.scripted, "Report", format="json")
    assert isinstance(json.loads(loose.message.content), dict)


@check(NAME, "reasoning")
def reasoning(servers: Servers) -> None:
    message = chat(servers.scripted, "Please think", think=True).message
    assert (message.thinking, message.content) == ("The user wants something.", "You said: Please think")


@check(NAME, "vision")
def vision(servers: Servers) -> None:
    answer = chat(servers.scripted, [{"role": "user", "content": "What?", "images": [png()]}])
    assert answer.message.content == "I see 1 image(s)."
