"""instructor: structured answers by tools, by JSON schema, by JSON, and in parts."""

from __future__ import annotations

from typing import Any

import instructor
from checks.common import Report, Server, Servers, check, is_report
from openai import OpenAI

NAME = "instructor"
MESSAGES: Any = [{"role": "user", "content": "Report the weather."}]


def asked(server: Server, mode: instructor.Mode) -> Any:
    """Returns a client in a mode; it checks answers itself."""
    return instructor.from_openai(OpenAI(base_url=server.v1, api_key="none", max_retries=0), mode=mode)


def request_to(server: Server) -> dict[str, Any]:
    """Returns the fields of every request."""
    return {
        "model": server.model,
        "messages": MESSAGES,
        "max_tokens": 200,
        "temperature": 0,
        "max_retries": 0,
    }


@check(NAME, "JSON schema")
def by_schema(servers: Servers) -> None:
    for server in (servers.scripted, servers.demo):
        client = asked(server, instructor.Mode.JSON_SCHEMA)
        request = request_to(server)
        is_report(client.chat.completions.create(response_model=Report, **request))


@check(NAME, "forced tool")
def by_tools(servers: Servers) -> None:
    client = asked(servers.demo, instructor.Mode.TOOLS)
    request = request_to(servers.demo)
    is_report(client.chat.completions.create(response_model=Report, **request))


@check(NAME, "stream")
def in_parts(servers: Servers) -> None:
    client = asked(servers.demo, instructor.Mode.JSON_SCHEMA)
    request = request_to(servers.demo)
    parts = list(client.chat.completions.create_partial(response_model=Report, **request))
    assert len(parts) > 1
    Report.model_validate(parts[-1].model_dump())


@check(NAME, "streamed tools")
def tools_in_parts(servers: Servers) -> None:
    client = asked(servers.demo, instructor.Mode.TOOLS)
    request = request_to(servers.demo)
    parts = list(client.chat.completions.create_partial(response_model=Report, **request))
    assert len(parts) > 1
    Report.model_validate(parts[-1].model_dump())
