"""Reads the requests of batches, in prompt processes: large files must not delay other requests."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from gateway.apis.translation import Context, Translation
from gateway.generation.model import ServedModel
from gateway.schemas.batches import MAX_CUSTOM_ID, BatchRequest, MessageBatchRequest
from gateway.schemas.common import JsonError, parse_json
from gateway.schemas.errors import ApiError, bad_request

MESSAGES = "/v1/messages"
_SYNCHRONOUS = ("stream", "background")  # fields of a body that a batch cannot have


def translate_batch(body: BatchRequest, _context: Context) -> Translation:
    """Returns the checked fields of a batch's request."""
    return Translation({}, answer=body.model_dump())


def read_lines(data: bytes | bytearray, model: ServedModel) -> bytes:
    """Returns what some lines of an input file say, two lines for each: facts, and the body as JSON.

    Facts are `{"custom_id", "error"}`, where `error` is null or has OpenAI's code, message and param.
    `data` is a line with the endpoint as JSON, and whether bodies are wanted, before the lines.
    """
    head, *lines = bytes(data).split(b"\n")
    endpoint, wants_bodies = json.loads(head)
    pieces: list[str] = []
    for line in lines:
        if not line.strip():
            continue
        custom_id, body, error = "", None, None
        try:
            custom_id, body = _checked_line(line, endpoint, model)
        except ApiError as refusal:
            error = {"code": refusal.code, "message": refusal.message, "param": refusal.param}
        pieces.append(json.dumps({"custom_id": custom_id, "error": error}))
        pieces.append(json.dumps(body, ensure_ascii=False) if wants_bodies else "")
    return "\n".join(pieces).encode()


def _checked_line(line: bytes, endpoint: str, model: ServedModel) -> tuple[str, dict[str, Any]]:
    """Returns id and body of a line. Raises ApiError whose code is OpenAI's."""
    try:
        value = parse_json(line)
    except JsonError as error:
        message = f"This line is not parseable as valid JSON: {error.message}"
        raise bad_request(message, None, "invalid_json_line") from None
    if not isinstance(value, dict):
        raise bad_request("This line is not a JSON object.", None, "invalid_json_line")
    for name in ("custom_id", "method", "url", "body"):
        if value.get(name) is None:
            message = f"Missing required parameter: '{name}'."
            raise bad_request(message, name, "missing_required_parameter")
    custom_id, body = value["custom_id"], value["body"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        raise bad_request(f"'custom_id' must be a text of 1 to {MAX_CUSTOM_ID} characters.", "custom_id")
    if value["method"] != "POST":
        raise bad_request("'method' must be 'POST'.", "method", "invalid_method")
    if value["url"] != endpoint:
        message = f"The URL of this request is not the batch's endpoint, {endpoint}."
        raise bad_request(message, "url", "invalid_url")
    if not isinstance(body, dict):
        raise bad_request("'body' must be a JSON object.", "body")
    for name in _SYNCHRONOUS:
        if body.get(name):
            raise bad_request(f"'{name}' is not possible in a batch.", f"body.{name}")
    # A message's model is judged with its request, which alone is then wrong, as in Anthropic's batches.
    if body.get("model") is not None and endpoint != MESSAGES:
        _check_model(body["model"], model)
    return custom_id, body


def _check_model(name: Any, model: ServedModel) -> None:
    try:
        model.check_name(str(name))
    except ApiError as error:
        raise bad_request(error.message, "body.model", "model_not_found") from None


def repeated_id(custom_id: str) -> ApiError:
    """Returns the refusal of a batch of messages two of whose requests have this id."""
    message = f"'requests' has the custom_id {custom_id[:100]!r} more than once: it must be unique"
    return bad_request(message, "requests", "duplicate_custom_id")


def read_messages(value: MessageBatchRequest) -> bytes:
    """Returns the requests of a batch of messages as lines of an input file. Raises ApiError 400."""
    counts = Counter(line.custom_id for line in value.requests)
    doubled = next((name for name, count in counts.items() if count > 1), None)
    if doubled is not None:
        raise repeated_id(doubled)
    for number, line in enumerate(value.requests):
        if line.params.get("stream"):
            place = f"requests[{number}].params.stream"
            raise bad_request(f"'{place}' is not possible in a batch", place)
    lines = (
        {"custom_id": line.custom_id, "method": "POST", "url": MESSAGES, "body": line.params}
        for line in value.requests
    )
    return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines).encode()
