"""Guards conversations of the clients that our own environment has; `make test-clients` has all nine.

`make test` asks the same APIs with the openai client and as bytes: test_end_to_end.py, test_gateway_*.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.clients.run import failures, run_checks, scripted_model
from tests.helpers.demo import demo_checkpoint
from tests.helpers.stack import ROOT, running_stack

TEMPLATE = ROOT / "tests" / "clients" / "demo_template.jinja"


@pytest.mark.demo
@pytest.mark.full
def test_openai_and_anthropic(tmp_path: Path) -> None:
    """Tools (single, parallel, streamed, forced), schemas, thoughts, pictures, whole loops of agents."""
    flags = ("--expert-servers", "1", "--chat-template", str(TEMPLATE))
    with scripted_model() as scripted, running_stack(demo_checkpoint(), tmp_path, *flags) as demo:
        results = run_checks(Path(sys.executable), scripted, demo.base_url, ["openai_client", "anthropic"])
    assert {result["client"] for result in results} == {"openai", "openai, Responses", "anthropic"}
    assert failures(results) == []
