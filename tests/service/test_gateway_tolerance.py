"""Guards fields that the gateway does not use: requests are answered, the fields counted, logged once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from gateway.telemetry.metrics import MAX_IGNORED_NAMES, OTHER_NAMES, GatewayMetrics
from tests.helpers.fake_engine import MODEL, FakeEngine, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

HINTS: dict[str, Any] = {
    "metadata": {"run": "7"},
    "store": True,
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "verbosity": "low",
    "service_tier": "flex",
    "no_such_field": {"a": [1]},
}


@dataclass
class Served:
    """One engine with a tolerant and a strict gateway before it; filled by the fixture."""

    engine: FakeEngine
    tolerant: str
    strict: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Shared by this file."""
    directory: Path = tmp_path_factory.mktemp("tolerance")
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    address = f"unix:{directory}/engine.sock"
    engine = FakeEngine(directory, tokenizer)
    with ExitStack() as stack:
        stack.enter_context(serving(engine, address))
        tolerant = stack.enter_context(running_gateway(gateway_config(address)))
        strict = stack.enter_context(running_gateway(gateway_config(address, strict_parameters=True)))
        yield Served(engine, tolerant, strict)


def test_hints_are_answered_counted_and_refused_where_that_is_wanted(served: Served) -> None:
    """The engine gets the same request with and without them; each is counted under its name."""
    served.engine.reset()
    body = {"messages": [{"role": "user", "content": "The", "tenant": 1}], "max_tokens": 2.0, "seed": 1}
    url = f"{served.tolerant}/v1/chat/completions"
    assert httpx.post(url, json=body).status_code == 200
    answer = httpx.post(url, json={**body, **HINTS, "modalities": ["text"], "user": "me"})
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
    first, second = served.engine.seen.requests
    for request in (first, second):
        request.request_id = ""
        request.trace_context.clear()  # each has a trace of its own
    assert first == second
    counted = dict(
        re.findall(
            r'moebius:gateway_ignored_parameters_total\{parameter="([^"]+)"\} (\S+)',
            httpx.get(f"{served.tolerant}/metrics").text,
        )
    )
    assert counted == {**dict.fromkeys(HINTS, "1.0"), "messages[].tenant": "2.0"}
    for name, value in HINTS.items():
        refused = httpx.post(
            f"{served.strict}/v1/completions", json={"model": MODEL, "prompt": "x", name: value}
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    refused = httpx.post(f"{served.strict}/v1/completions", json={"prompt": "x"})
    assert refused.json()["error"]["code"] == "missing_required_parameter"


@pytest.mark.parametrize("name", ["modalities", "use_beam_search", "web_search_options"])
def test_what_would_change_the_answer_is_refused_by_name(served: Served, name: str) -> None:
    """A client that asks for something else than it would get gets a 400, with either setting."""
    value = {"modalities": ["text", "audio"]}.get(name, True)
    for url in (served.tolerant, served.strict):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], name: value}
        refused = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_names_are_logged_once_and_bounded() -> None:
    """Clients may make up any number of names: the log and the metric hold a limited number."""
    metrics = GatewayMetrics()
    with capture_logs() as lines:
        for number in range(2 * MAX_IGNORED_NAMES):
            metrics.ignored((f"field{number}", "metadata", "line\nbreak", "x" * 5000))
    named = [line["parameter"] for line in lines]
    assert len(named) == len(set(named)) == MAX_IGNORED_NAMES
    assert {"metadata", OTHER_NAMES, "field0"} <= set(named)
    assert all(len(name) < 101 and name.isprintable() for name in named)
    assert metrics.render().count(b"gateway_ignored_parameters_total{") == MAX_IGNORED_NAMES
