"""anthropic-python: Messages."""

from __future__ import annotations

import base64
from typing import Any, Literal

from anthropic import Anthropic, beta_tool
from checks.common import (
    ASK_BOTH,
    ASK_CHAIN,
    ASK_ONE,
    CHAIN_ANSWER,
    TOOLS,
    Server,
    Servers,
    check,
    get_weather,
    png,
    to_fahrenheit,
)
from pydantic import BaseModel

NAME = "anthropic"
CLAUDE_TOOLS: Any = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]
FUNCTIONS: dict[str, Any] = {"get_weather": get_weather, "to_fahrenheit": to_fahrenheit}


class Unbounded(BaseModel):
    """The client takes bounds of numbers out of schemas and checks them itself."""

    city: Literal["Oslo", "Rome"]
    degrees: int
    is_warm: bool


def client_of(server: Server) -> Anthropic:
    """Returns a client without retries."""
    return Anthropic(base_url=server.base, api_key="none", max_retries=0, timeout=120)


def ask(server: Server, given: Any, **options: Any) -> Any:
    """Sends one question, or a list of messages."""
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    request = {"model": server.model, "max_tokens": 500, "messages": messages, **options}
    return client_of(server).messages.create(**request)


@check(NAME, "chat")
def plain(servers: Servers) -> None:
    answer = ask(servers.scripted, "Hello", system=[{"type": "text", "text": "Be brief"}])
    assert answer.content[0].text == "You said: Hello [system: Be brief]"
    assert answer.stop_reason == "end_turn"
    counted = client_of(servers.scripted).messages.count_tokens(
        model=servers.scripted.model, messages=[{"role": "user", "content": "Hello"}]
    )
    assert counted.input_tokens > 1


@check(NAME, "stream")
def streamed(servers: Servers) -> None:
    client, model = client_of(servers.scripted), servers.scripted.model
    messages: Any = [{"role": "user", "content": "Hello"}]
    with client.messages.stream(model=model, max_tokens=100, messages=messages) as stream:
        parts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(parts) == "You said: Hello"
    assert len(parts) > 2
    assert final.usage.output_tokens > 2


@check(NAME, "multi-turn")
def several_turns(servers: Servers) -> None:
    first = ask(servers.scripted, "Fish")
    question = {"role": "user", "content": "The first thing?"}
    history = [{"role": "user", "content": "Fish"}, {"role": "assistant", "content": first.content}, question]
    assert ask(servers.scripted, history).content[0].text == "The first thing was: Fish"


@check(NAME, "tool")
def one_tool(servers: Servers) -> None:
    answer = ask(servers.scripted, ASK_ONE, tools=CLAUDE_TOOLS)
    (block,) = answer.content
    assert (answer.stop_reason, block.name, block.input) == ("tool_use", "get_weather", {"city": "Oslo"})


@check(NAME, "parallel tools")
def parallel_tools(servers: Servers) -> None:
    blocks = ask(servers.scripted, ASK_BOTH, tools=CLAUDE_TOOLS).content
    assert [block.input["city"] for block in blocks if block.type == "tool_use"] == ["Oslo", "Rome"]


@check(NAME, "streamed tools")
def streamed_tools(servers: Servers) -> None:
    client, model = client_of(servers.scripted), servers.scripted.model
    request: Any = {"messages": [{"role": "user", "content": ASK_BOTH}], "tools": CLAUDE_TOOLS}
    with client.messages.stream(model=model, max_tokens=500, **request) as stream:
        kinds = [event.type for event in stream]
        blocks = stream.get_final_message().content
    assert kinds.count("input_json") > 2
    assert [block.input for block in blocks if block.type == "tool_use"] == [
        {"city": "Oslo"},
        {"city": "Rome"},
    ]


@check(NAME, "forced tool")
def forced_tool(servers: Servers) -> None:
    choice = {"type": "tool", "name": "to_fahrenheit"}
    answer = ask(
        servers.demo,
        "Hi",
        tools=CLAUDE_TOOLS,
        tool_choice=choice,
        max_tokens=200,
        extra_body={"temperature": 0},
    )
    assert isinstance(answer.content[-1].input["celsius"], int)


@check(NAME, "JSON schema")
def schema(servers: Servers) -> None:
    for server in (servers.scripted, servers.demo):
        answer = client_of(server).messages.parse(
            model=server.model,
            max_tokens=200,
            extra_body={"temperature": 0},
            messages=[{"role": "user", "content": "Report"}],
            output_format=Unbounded,
        )
        assert isinstance(answer.parsed_output, Unbounded)


@check(NAME, "reasoning")
def reasoning(servers: Servers) -> None:
    options: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    thought, text = ask(servers.scripted, "Please think", **options).content
    assert (thought.type, thought.thinking) == ("thinking", "The user wants something.")
    assert text.text == "You said: Please think"
    question = {"role": "user", "content": "The first thing?"}
    first = [{"role": "user", "content": "Please think"}, {"role": "assistant", "content": [thought, text]}]
    assert "Please think" in ask(servers.scripted, [*first, question], **options).content[-1].text


@check(NAME, "vision")
def vision(servers: Servers) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png()).decode()}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    assert ask(servers.scripted, [{"role": "user", "content": parts}]).content[0].text == "I see 1 image(s)."


@check(NAME, "agent loop")
def loop(servers: Servers) -> None:
    messages: list[Any] = [{"role": "user", "content": ASK_CHAIN}]
    for _ in range(5):
        answer = ask(servers.scripted, messages, tools=CLAUDE_TOOLS)
        if answer.stop_reason != "tool_use":
            break
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": FUNCTIONS[block.name](**block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    assert answer.content[-1].text == CHAIN_ANSWER
    runner = client_of(servers.scripted).beta.messages.tool_runner(
        model=servers.scripted.model,
        max_tokens=500,
        tools=[beta_tool(get_weather), beta_tool(to_fahrenheit)],
        messages=[{"role": "user", "content": ASK_CHAIN}],
    )
    assert runner.until_done().content[-1].text == CHAIN_ANSWER
