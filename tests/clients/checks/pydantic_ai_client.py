"""pydantic-ai: agents over chat completions and Responses."""

from __future__ import annotations

import asyncio
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
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.messages import ThinkingPart, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

NAME = "pydantic-ai"


def chat_model(server: Server) -> OpenAIChatModel:
    """Returns a model over chat completions."""
    return OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=server.v1, api_key="none"))


def agent_of(model: Any, **options: Any) -> Any:
    """Returns an agent with both tools."""
    return Agent(model, tools=[get_weather, to_fahrenheit], retries=0, **options)


def calls_of(result: Any) -> list[str]:
    """Returns the names of the tools that were called, in order."""
    return [
        part.tool_name
        for message in result.all_messages()
        for part in message.parts
        if isinstance(part, ToolCallPart)
    ]


@check(NAME, "chat")
def plain(servers: Servers) -> None:
    result = Agent(chat_model(servers.scripted), instructions="Be brief").run_sync("Hello")
    assert result.output == "You said: Hello [system: Be brief]"


@check(NAME, "stream")
def streamed(servers: Servers) -> None:
    async def run() -> list[str]:
        async with Agent(chat_model(servers.scripted)).run_stream("Hello") as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    parts = asyncio.run(run())
    assert "".join(parts) == "You said: Hello"
    assert len(parts) > 2


@check(NAME, "multi-turn")
def several_turns(servers: Servers) -> None:
    agent = Agent(chat_model(servers.scripted))
    first = agent.run_sync("Fish")
    second = agent.run_sync("The first thing?", message_history=first.all_messages())
    assert second.output == "The first thing was: Fish"


@check(NAME, "tool")
def one_tool(servers: Servers) -> None:
    result = agent_of(chat_model(servers.scripted)).run_sync(ASK_ONE)
    assert (result.output, calls_of(result)) == ("Weather: Oslo -3 degrees", ["get_weather"])


@check(NAME, "parallel tools")
def parallel_tools(servers: Servers) -> None:
    result = agent_of(chat_model(servers.scripted)).run_sync(ASK_BOTH)
    assert result.output == "Weather: Oslo -3 degrees; Rome 21 degrees"


@check(NAME, "streamed tools")
def streamed_tools(servers: Servers) -> None:
    async def run() -> str:
        async with agent_of(chat_model(servers.scripted)).run_stream(ASK_BOTH) as result:
            return str(await result.get_output())

    assert asyncio.run(run()) == "Weather: Oslo -3 degrees; Rome 21 degrees"


@check(NAME, "agent loop")
def loop(servers: Servers) -> None:
    server = servers.scripted
    provider = OpenAIProvider(base_url=server.v1, api_key="none")
    responses = OpenAIResponsesModel(server.model, provider=provider)
    # Not its AnthropicModel: this release of it raises TypeError with this release of anthropic.
    for model in (chat_model(server), responses):
        result = agent_of(model).run_sync(ASK_CHAIN)
        assert (result.output, calls_of(result)) == (CHAIN_ANSWER, ["get_weather", "to_fahrenheit"])


@check(NAME, "forced tool")
def forced_tool(servers: Servers) -> None:
    """A structured output is a tool that has to be called."""
    settings: Any = {"max_tokens": 200, "temperature": 0}
    agent = Agent(chat_model(servers.demo), output_type=Report, retries=0, model_settings=settings)
    is_report(agent.run_sync("Report").output)


@check(NAME, "JSON schema")
def schema(servers: Servers) -> None:
    for server in (servers.scripted, servers.demo):
        settings: Any = {"max_tokens": 200, "temperature": 0}
        agent = Agent(
            chat_model(server), output_type=NativeOutput(Report), retries=0, model_settings=settings
        )
        is_report(agent.run_sync("Report").output)


@check(NAME, "reasoning")
def reasoning(servers: Servers) -> None:
    result = Agent(chat_model(servers.scripted)).run_sync("Please think")
    thoughts = [part.content for part in result.all_messages()[-1].parts if isinstance(part, ThinkingPart)]
    assert (thoughts, result.output) == (["The user wants something."], "You said: Please think")


@check(NAME, "vision")
def vision(servers: Servers) -> None:
    picture = BinaryContent(data=png(), media_type="image/png")
    assert Agent(chat_model(servers.scripted)).run_sync(["What?", picture]).output == "I see 1 image(s)."
