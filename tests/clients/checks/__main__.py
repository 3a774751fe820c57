"""`python -m checks SCRIPTED_URL DEMO_URL [CLIENT...]`: runs checks and prints a line of JSON for each."""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
import urllib.request

from checks.common import CHECKS, Server, Servers

MODULES = (
    "openai_client",
    "langchain_client",
    "litellm_client",
    "instructor_client",
    "pydantic_ai_client",
    "llm_client",
    "agents_client",
    "anthropic_client",
    "ollama_client",
)


def server_at(url: str) -> Server:
    """Returns a server with the name of its model."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        return Server(url, json.load(answer)["data"][0]["id"])


def main(scripted: str, demo: str, *wanted: str) -> None:
    """Runs every check of the wanted clients; a check that raises has failed."""
    servers = Servers(server_at(scripted), server_at(demo))
    for name in MODULES:
        if not wanted or any(one in name for one in wanted):
            importlib.import_module(f"checks.{name}")
    for client, capability, function in CHECKS:
        begin, detail = time.monotonic(), ""
        try:
            function(servers)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)
            here = next((frame for frame in reversed(last) if "/checks/" in frame.filename), last[-1])
            detail = f"{here.filename.rpartition('/')[2]}:{here.lineno}: {type(error).__name__}: {error}"[
                :700
            ]
        seconds = round(time.monotonic() - begin, 2)
        result = {"client": client, "capability": capability, "check": function.__name__}
        print(json.dumps({**result, "detail": detail, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
