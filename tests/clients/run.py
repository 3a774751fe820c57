"""`python -m tests.clients.run PYTHON [--only CLIENT] [--write] [--tls]`: all checks against two servers.

PYTHON is an interpreter that has tests/clients/requirements.txt, which need not fit our own packages. One
server is the gateway with a model that follows rules (`scripted_model.py`), the other `moebius serve demo`.
With `--write` the table goes into docs/clients.md. Exits with 1 when a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.helpers import tls_everywhere
from tests.helpers.demo import demo_checkpoint
from tests.helpers.stack import ROOT, running_stack

HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- table: made by make test-clients -->\n", "<!-- end of the table -->\n"
CAPABILITIES = (
    "chat",
    "stream",
    "multi-turn",
    "tool",
    "parallel tools",
    "streamed tools",
    "forced tool",
    "JSON schema",
    "reasoning",
    "vision",
    "agent loop",
)
# The client's package, for its version.
PACKAGES = {"openai, Responses": "openai", "pydantic-ai": "pydantic-ai-slim"}


@contextlib.contextmanager
def scripted_model() -> Iterator[str]:
    """Yields the URL of the gateway in front of the model that follows rules."""
    command = [sys.executable, "-m", "tests.clients.scripted_model"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("http")), "")
            if not line:
                log.seek(0)
                raise RuntimeError(f"the scripted model did not start:\n{log.read().decode()[-3000:]}")
            yield line.strip()
        finally:
            process.terminate()
            process.wait(30)


def run_checks(python: Path, scripted: str, demo: str, only: Sequence[str]) -> list[dict[str, Any]]:
    """Yields the results of all checks, each printed as it arrives."""
    command = [str(python), "-m", "checks", scripted, demo, *only]
    results = []
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it contacts another host
    environment.pop("PYTHONPATH", None)  # of our environment
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue  # a client's own output
            result = json.loads(line)
            results.append(result)
            state = f"FAILED {result['detail']}" if result["detail"] else "ok"
            print(f"{result['client']}: {result['capability']} ({result['seconds']} s): {state}", flush=True)
    if process.returncode:
        raise RuntimeError(f"the checks ended with status {process.returncode}")
    return results


def failures(results: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the failures, a line each."""
    return [f"{one['client']}: {one['check']}: {one['detail']}" for one in results if one["detail"]]


def table(results: Sequence[dict[str, Any]], versions: dict[str, str]) -> str:
    """Returns a table of clients by capabilities, in Markdown."""
    lines = [f"| client | {' | '.join(CAPABILITIES)} |", "|---" * (len(CAPABILITIES) + 1) + "|"]
    for client in dict.fromkeys(result["client"] for result in results):
        cells = []
        for capability in CAPABILITIES:
            found = [r["detail"] for r in results if (r["client"], r["capability"]) == (client, capability)]
            cells.append("" if not found else "**fails**" if any(found) else "yes")
        name = PACKAGES.get(client, client)
        lines.append(f"| {client} {versions.get(name, '')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def versions_of() -> dict[str, str]:
    """Returns the versions in requirements.txt, by package."""
    lines = (HERE / "requirements.txt").read_text().splitlines()
    return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="clients, by parts of their files' names")
    parser.add_argument("--write", action="store_true", help="put the table into docs/clients.md")
    parser.add_argument("--tls", action="store_true", help="HTTPS to clients, mutual TLS between processes")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moebius-clients-")))
        if options.tls:
            tls_everywhere.switch_on_for_others(directory / "certificates")
        scripted = stack.enter_context(scripted_model())
        template = ("--chat-template", str(HERE / "demo_template.jinja"))
        demo = stack.enter_context(
            running_stack(demo_checkpoint(), directory, "--expert-servers", "1", *template)
        )
        results = run_checks(options.python, scripted, demo.base_url, options.only)
    found = table(results, versions_of())
    failed = len(failures(results))
    print(f"\n{found}\n{len(results) - failed} of {len(results)} checks pass")
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
