"""Guards that the OpenAPI document tells the truth: what it describes is taken, and answered as it says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from gateway.app.application import create_app
from gateway.schemas.common import NEUTRAL_VALUES
from tests.helpers.gateway_server import gateway_config
from tests.helpers.openapi_cases import described_gateway, operations, try_operation


def document(**gateway: Any) -> dict[str, Any]:
    """Returns the document of a gateway with these settings."""
    described: dict[str, Any] = create_app(gateway_config("unix:/nowhere", **gateway)).openapi()
    return described


def test_answers_are_as_the_document_says(tmp_path: Path) -> None:
    """Requests drawn from every operation: status, media type and shape are documented, and none is a 500.

    The full run is `python -m tests.tools.try_openapi`.
    """
    statuses: Counter[int] = Counter()
    directories = {"batch_dir": str(tmp_path / "batches"), "slot_save_path": str(tmp_path / "slots")}
    with described_gateway(tmp_path, **directories) as (url, schema):
        for operation in operations(schema):
            statuses += try_operation(operation, url, 4)
    assert statuses[200] > 20, "some must get behind the validation"
    assert statuses[400] > 5


def test_streams_errors_and_unsupported_fields_are_described() -> None:
    """No 422; streams by their media type; each API's own errors; fields that pass only when neutral."""
    found = document()
    for path, operations_ in found["paths"].items():
        for operation in operations_.values():
            assert "422" not in operation["responses"], path
    chat = found["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(chat["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"400", "404", "413", "429", "502", "503", "504"} <= set(chat)
    assert set(found["paths"]["/tokenize"]["post"]["responses"]["200"]["content"]) == {"application/json"}
    messages = found["paths"]["/v1/messages"]["post"]["responses"]
    reference = messages["400"]["content"]["application/json"]["schema"]["$ref"]
    assert reference.endswith("/AnthropicErrorResponse")
    assert ("529" in messages, "503" in messages) == (True, False)
    fields = found["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["use_beam_search"]["enum"] == [*NEUTRAL_VALUES["use_beam_search"], None]
    assert "additionalProperties" not in found["components"]["schemas"]["CompletionRequest"]
    strict = document(strict_parameters=True)["components"]["schemas"]
    assert strict["CompletionRequest"]["additionalProperties"] is False
