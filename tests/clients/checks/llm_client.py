"""llm (Simon Willison's command line and library), with the server as one of its extra OpenAI models."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import llm
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

NAME = "llm"


def model_of(server: Server) -> Any:
    """Returns a model as a line of extra-openai-models.yaml makes it."""
    directory = Path(tempfile.mkdtemp(prefix="llm-"))
    entry = {
        "model_id": "served",
        "model_name": server.model,
        "api_base": server.v1,
        "supports_tools": True,
        "supports_schema": True,
        "vision": True,
    }
    (directory / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    os.environ["LLM_USER_PATH"] = str(directory)
    return llm.get_model("served")


@check(NAME, "chat")
def plain(servers: Servers) -> None:
    answer = model_of(servers.scripted).prompt("Hello", system="Be brief", stream=False)
    assert answer.text() == "You said: Hello [system: Be brief]"


@check(NAME, "stream")
def streamed(servers: Servers) -> None:
    parts = list(model_of(servers.scripted).prompt("Hello"))
    assert "".join(parts) == "You said: Hello"
    assert len(parts) > 2


@check(NAME, "multi-turn")
def several_turns(servers: Servers) -> None:
    conversation = model_of(servers.scripted).conversation()
    conversation.prompt("Fish").text()
    assert conversation.prompt("The first thing?").text() == "The first thing was: Fish"


@check(NAME, "tool")
def one_tool(servers: Servers) -> None:
    answer = model_of(servers.scripted).chain(ASK_ONE, tools=[get_weather, to_fahrenheit], stream=False)
    assert answer.text().endswith("Weather: Oslo -3 degrees")


@check(NAME, "parallel tools")
def parallel_tools(servers: Servers) -> None:
    answer = model_of(servers.scripted).chain(ASK_BOTH, tools=[get_weather, to_fahrenheit], stream=False)
    assert answer.text().endswith("Weather: Oslo -3 degrees; Rome 21 degrees")


@check(NAME, "streamed tools")
def streamed_tools(servers: Servers) -> None:
    answer = model_of(servers.scripted).chain(ASK_BOTH, tools=[get_weather, to_fahrenheit])
    assert answer.text().endswith("Weather: Oslo -3 degrees; Rome 21 degrees")


@check(NAME, "agent loop")
def loop(servers: Servers) -> None:
    answer = model_of(servers.scripted).chain(ASK_CHAIN, tools=[get_weather, to_fahrenheit])
    assert answer.text().endswith(CHAIN_ANSWER)


@check(NAME, "JSON schema")
def schema(servers: Servers) -> None:
    for server in (servers.scripted, servers.demo):
        answer = model_of(server).prompt("Report", schema=Report, max_tokens=200, temperature=0)
        is_report(Report.model_validate_json(answer.text()))


@check(NAME, "vision")
def vision(servers: Servers) -> None:
    picture = llm.Attachment(content=png(), type="image/png")
    assert model_of(servers.scripted).prompt("What?", attachments=[picture]).text() == "I see 1 image(s)."
