"""Requests drawn from the OpenAPI document by schemathesis, and what their answers have to keep to."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.helpers.fake_engine import MODEL, FakeEngine, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer


@contextlib.contextmanager
def described_gateway(directory: Path, **gateway: Any) -> Iterator[tuple[str, Any]]:
    """URL and schemathesis' reading of the document of a gateway whose engine is scripted."""
    import schemathesis  # takes seconds, which every worker would spend that only collects the tests

    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    address = f"unix:{directory}/engine.sock"
    with (
        serving(FakeEngine(directory, tokenizer), address),
        running_gateway(gateway_config(address, **gateway)) as url,
    ):
        yield url, schemathesis.openapi.from_url(f"{url}/openapi.json")


def operations(schema: Any) -> list[Any]:
    """Returns all operations of a document."""
    return [result.ok() for result in schema.get_all_operations()]


def try_operation(operation: Any, url: str, cases: int, seed: int | None = None) -> Counter[int]:
    """Sends a number of requests of one operation; returns how many were answered with which status.

    Raises what a check raises: a status of 500 or above, or an answer that the document does not have.
    `seed` None: the same requests every time.
    """
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    checked = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.response_headers_conformance,
    ]
    statuses: Counter[int] = Counter()

    @given(case=operation.as_strategy())
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=seed is None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL  # another is a 404 before anything else is looked at
        response = case.call(base_url=url, timeout=60)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=checked)

    (send if seed is None else hypothesis.seed(seed)(send))()
    return statuses
