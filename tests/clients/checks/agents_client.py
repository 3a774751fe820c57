"""openai-agents: its default (Responses) and chat completions."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
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
from openai import AsyncOpenAI

NAME = "openai-agents"
TOOLS: Any = [function_tool(get_weather), function_tool(to_fahrenheit)]
set_tracing_disabled(True)


def agents_of(server: Server, **options: Any) -> list[Any]:
    """Returns the same agent over both APIs; clients belong to one event loop."""
    client = AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=120)
    models: list[Any] = [
        OpenAIResponsesModel(server.model, client),
        OpenAIChatCompletionsModel(server.model, client),
    ]
    return [Agent(name="Agent", model=model, **options) for model in models]


def outputs(server: Server, given: Any, **options: Any) -> list[Any]:
    """Returns the final outputs over both APIs."""

    async def run() -> list[Any]:
        return [(await Runner.run(agent, given)).final_output for agent in agents_of(server, **options)]

    return asyncio.run(run())


@check(NAME, "chat")
def plain(servers: Servers) -> None:
    found = outputs(servers.scripted, "Hello", instructions="Be brief")
    assert found == ["You said: Hello [system: Be brief]"] * 2


@check(NAME, "stream")
def streamed(servers: Servers) -> None:
    async def run(agent: Any) -> tuple[str, int]:
        result = Runner.run_streamed(agent, "Hello")
        deltas = 0
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                deltas += event.data.type == "response.output_text.delta"
        return result.final_output, deltas

    async def both() -> list[tuple[str, int]]:
        return [await run(agent) for agent in agents_of(servers.scripted)]

    for text, deltas in asyncio.run(both()):
        assert text == "You said: Hello"
        assert deltas > 2


@check(NAME, "multi-turn")
def several_turns(servers: Servers) -> None:
    async def run(agent: Any) -> str:
        session = SQLiteSession("one")
        await Runner.run(agent, "Fish", session=session)
        return str((await Runner.run(agent, "The first thing?", session=session)).final_output)

    async def both() -> list[str]:
        return [await run(agent) for agent in agents_of(servers.scripted)]

    assert asyncio.run(both()) == ["The first thing was: Fish"] * 2


@check(NAME, "tool")
def one_tool(servers: Servers) -> None:
    assert outputs(servers.scripted, ASK_ONE, tools=TOOLS) == ["Weather: Oslo -3 degrees"] * 2


@check(NAME, "parallel tools")
def parallel_tools(servers: Servers) -> None:
    found = outputs(servers.scripted, ASK_BOTH, tools=TOOLS)
    assert found == ["Weather: Oslo -3 degrees; Rome 21 degrees"] * 2


@check(NAME, "streamed tools")
def streamed_tools(servers: Servers) -> None:
    async def run(agent: Any) -> tuple[str, list[str]]:
        result = Runner.run_streamed(agent, ASK_CHAIN)
        called = []
        async for event in result.stream_events():
            if event.type == "run_item_stream_event" and event.name == "tool_called":
                called.append(event.item.raw_item.name)
        return result.final_output, called

    async def both() -> list[tuple[str, list[str]]]:
        return [await run(agent) for agent in agents_of(servers.scripted, tools=TOOLS)]

    assert asyncio.run(both()) == [(CHAIN_ANSWER, ["get_weather", "to_fahrenheit"])] * 2


@check(NAME, "agent loop")
def loop(servers: Servers) -> None:
    assert outputs(servers.scripted, ASK_CHAIN, tools=TOOLS) == [CHAIN_ANSWER] * 2


@check(NAME, "forced tool")
def forced_tool(servers: Servers) -> None:
    settings = ModelSettings(tool_choice="to_fahrenheit", max_tokens=200, temperature=0)
    options: Any = {"tools": TOOLS, "model_settings": settings, "tool_use_behavior": "stop_on_first_tool"}
    for found in outputs(servers.demo, "Hi", **options):
        assert isinstance(float(found), float)


@check(NAME, "JSON schema")
def schema(servers: Servers) -> None:
    for server in (servers.scripted, servers.demo):
        for found in outputs(
            server, "Report", output_type=Report, model_settings=ModelSettings(max_tokens=200, temperature=0)
        ):
            is_report(found)


@check(NAME, "vision")
def vision(servers: Servers) -> None:
    picture = "data:image/png;base64," + base64.b64encode(png()).decode()
    parts = [
        {"type": "input_text", "text": "What?"},
        {"type": "input_image", "image_url": picture, "detail": "auto"},
    ]
    assert outputs(servers.scripted, [{"role": "user", "content": parts}]) == ["I see 1 image(s)."] * 2


@check(NAME, "reasoning")
def reasoning(servers: Servers) -> None:
    assert outputs(servers.scripted, "Please think") == ["You said: Please think"] * 2
