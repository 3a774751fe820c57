"""Adds to the OpenAPI document what the framework cannot see: bodies, and errors in their actual shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.schemas.common import NEUTRAL_VALUES, GenerationFields
from gateway.schemas.errors import MESSAGES_PATH, OLLAMA_PATH

_SCHEMAS = "#/components/schemas/"
_REFUSALS = {
    400: "The request cannot be done as it is; `param` names the field at fault",
    401: "The API key is missing or wrong",
    404: "The model does not exist",
    413: "The body is too large",
    415: "The body is compressed",
    429: "Too many requests; `Retry-After` says when to retry",
    500: "The server failed",
    502: "The engine ended the call too early",
    503: "The server is not ready, or stops",
    504: "The engine did not answer in time",
}
# Refusals of single routes.
_OF_SOME_ROUTES = {501: "The server was started without the option that this needs"}
_OVERLOADED = 529  # Anthropic's, where other APIs have 503


class ErrorDetails(BaseModel):
    """The description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every answer with a status of 400 or above."""

    error: ErrorDetails


def _refusal(description: str) -> dict[str, Any]:
    """Returns a response of the document. Given the model itself, the framework would make a validator of it
    for each of hundreds of responses.
    """
    shape = {"$ref": _SCHEMAS + ErrorResponse.__name__}
    return {"description": description, "content": {"application/json": {"schema": shape}}}


def refuses(*statuses: int) -> dict[str, Any]:
    """Returns a route decorator's arguments for these refusals."""
    return {"responses": {status: _refusal((_REFUSALS | _OF_SOME_ROUTES)[status]) for status in statuses}}


def takes(*schemas: type[BaseModel]) -> dict[str, Any]:
    """Returns a route decorator's arguments for a body of one of these schemas, with its refusals."""
    references = [{"$ref": f"{_SCHEMAS}{schema.__name__}"} for schema in schemas]
    described = references[0] if len(references) == 1 else {"anyOf": references}
    body = {"required": True, "content": {"application/json": {"schema": described}}}
    refusals = {status: _refusal(words) for status, words in _REFUSALS.items()}
    return {"openapi_extra": {"requestBody": body}, "responses": refusals}


def install_openapi(app: FastAPI, schemas: Sequence[type[BaseModel]], strict: bool = False) -> None:
    """Makes `app.openapi` describe `schemas`, which routes name with `takes`.

    `strict`: unknown fields are refused.
    """
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = describe()
            all_schemas: list[type[BaseModel]] = [ErrorResponse, *schemas]
            modes: list[tuple[type[BaseModel], Any]] = [(schema, "validation") for schema in all_schemas]
            _, described = models_json_schema(modes, ref_template=_SCHEMAS + "{model}")
            components = document["components"]["schemas"]
            components.update(described["$defs"])
            components.update(_ERROR_SHAPES)
            for schema in schemas:
                if issubclass(schema, GenerationFields):
                    _add_unsupported(components[schema.__name__]["properties"])
            if not strict:
                _allow_unknown(components)
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    _describe_responses(path, operation, components)
            components.pop("HTTPValidationError", None)
            components.pop("ValidationError", None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


_TEXT = {"type": "string"}
# Error shapes other than OpenAI's, by API.
_ERROR_SHAPES: dict[str, Any] = {
    "AnthropicErrorResponse": {
        "type": "object",
        "description": "Every answer of the Messages API with a status of 400 or above.",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _TEXT, "message": _TEXT},
            },
            "request_id": _TEXT,
        },
    },
    "OllamaErrorResponse": {
        "type": "object",
        "description": "Every answer of Ollama's API with a status of 400 or above.",
        "required": ["error"],
        "properties": {"error": _TEXT},
    },
}


def _describe_responses(path: str, operation: dict[str, Any], components: dict[str, Any]) -> None:
    """Sets media types of streams, and errors in the shape of the path's API."""
    responses = operation["responses"]
    responses.pop("422", None)  # declared by the framework; here its refusals are 400
    shape = ""
    if path.startswith(MESSAGES_PATH):
        shape = "AnthropicErrorResponse"
        if "503" in responses:
            responses[str(_OVERLOADED)] = responses.pop("503")
    elif path.startswith(OLLAMA_PATH):
        shape = "OllamaErrorResponse"
    for status, response in responses.items():
        if shape and int(status) >= 400:
            response["content"] = {"application/json": {"schema": {"$ref": _SCHEMAS + shape}}}
    if "requestBody" not in operation or "200" not in responses:
        return
    described = operation["requestBody"]["content"].get("application/json", {"schema": {}})["schema"]
    references = [one["$ref"] for one in described.get("anyOf", [described]) if "$ref" in one]
    bodies = [components.get(reference.removeprefix(_SCHEMAS), {}) for reference in references]
    if any("stream" in body.get("properties", {}) for body in bodies):
        streams = "application/x-ndjson" if shape == "OllamaErrorResponse" else "text/event-stream"
        responses["200"]["content"][streams] = {}


def _add_unsupported(properties: dict[str, Any]) -> None:
    """Adds fields that are known and accepted only with a neutral value."""
    for name, values in NEUTRAL_VALUES.items():
        properties.setdefault(name, {"enum": [*values, None], "description": "Not supported"})


def _allow_unknown(value: Any) -> None:
    """Allows unknown fields of requests, which are ignored, not refused."""
    if isinstance(value, dict):
        if value.get("additionalProperties") is False:
            del value["additionalProperties"]
        for part in value.values():
            _allow_unknown(part)
    elif isinstance(value, list):
        for part in value:
            _allow_unknown(part)
