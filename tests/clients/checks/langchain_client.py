"""langchain-openai."""

from __future__ import annotations

import base64
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
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

NAME = "langchain-openai"
BRIEF: dict[str, Any] = {"max_tokens": 200, "temperature": 0}
TOOLS = [tool(get_weather), tool(to_fahrenheit)]


def model_of(server: Server, **options: Any) -> ChatOpenAI:
    """Returns a chat model."""
    return ChatOpenAI(base_url=server.v1, api_key="none", model=server.model, max_retries=0, **options)


@check(NAME, "chat")
def plain(servers: Servers) -> None:
    answer = model_of(servers.scripted).invoke("Hello")
    assert answer.content == "You said: Hello"
    assert answer.usage_metadata["output_tokens"] > 0


@check(NAME, "stream")
def streamed(servers: Servers) -> None:
    chunks = list(model_of(servers.scripted, stream_usage=True).stream("Hello"))
    assert "".join(chunk.text for chunk in chunks) == "You said: Hello"
    assert any(chunk.usage_metadata for chunk in chunks)


@check(NAME, "multi-turn")
def several_turns(servers: Servers) -> None:
    history = [
        SystemMessage("Be brief"),
        HumanMessage("Fish"),
        AIMessage("Yes"),
        HumanMessage("The first thing?"),
    ]
    assert model_of(servers.scripted).invoke(history).content == "The first thing was: Fish"


@check(NAME, "tool")
def one_tool(servers: Servers) -> None:
    (call,) = model_of(servers.scripted).bind_tools(TOOLS).invoke(ASK_ONE).tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})


@check(NAME, "parallel tools")
def parallel_tools(servers: Servers) -> None:
    calls = model_of(servers.scripted).bind_tools(TOOLS).invoke(ASK_BOTH).tool_calls
    assert [call["args"]["city"] for call in calls] == ["Oslo", "Rome"]


@check(NAME, "streamed tools")
def streamed_tools(servers: Servers) -> None:
    total: Any = None
    for chunk in model_of(servers.scripted).bind_tools(TOOLS).stream(ASK_BOTH):
        total = chunk if total is None else total + chunk
    assert [call["args"]["city"] for call in total.tool_calls] == ["Oslo", "Rome"]


@check(NAME, "forced tool")
def forced_tool(servers: Servers) -> None:
    bound = model_of(servers.demo, **BRIEF).bind_tools(TOOLS, tool_choice="to_fahrenheit")
    (call,) = bound.invoke("Hi").tool_calls
    assert isinstance(call["args"]["celsius"], int)


@check(NAME, "JSON schema")
def schema(servers: Servers) -> None:
    for server in (servers.scripted, servers.demo):
        is_report(model_of(server, **BRIEF).with_structured_output(Report).invoke("Report"))
    by_call = model_of(servers.demo, **BRIEF).with_structured_output(Report, method="function_calling")
    is_report(by_call.invoke("Report"))


@check(NAME, "vision")
def vision(servers: Servers) -> None:
    picture = "data:image/png;base64," + base64.b64encode(png()).decode()
    parts: Any = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": picture}}]
    assert model_of(servers.scripted).invoke([HumanMessage(parts)]).content == "I see 1 image(s)."


@check(NAME, "agent loop")
def loop(servers: Servers) -> None:
    by_name = {one.name: one for one in TOOLS}
    for use_responses_api in (False, True):
        model = model_of(servers.scripted, use_responses_api=use_responses_api).bind_tools(TOOLS)
        messages: list[Any] = [HumanMessage(ASK_CHAIN)]
        for _ in range(5):
            answer = model.invoke(messages)
            messages.append(answer)
            for call in answer.tool_calls:
                result = by_name[call["name"]].invoke(call["args"])
                messages.append(ToolMessage(result, tool_call_id=call["id"]))
            if not answer.tool_calls:
                break
        assert answer.text == CHAIN_ANSWER


@check(NAME, "reasoning")
def reasoning(servers: Servers) -> None:
    """Chat completions drop thoughts in this client; Responses keep them."""
    answer = model_of(servers.scripted, use_responses_api=True, output_version="responses/v1").invoke(
        "Please think"
    )
    assert [block["type"] for block in answer.content] == ["reasoning", "text"]
