"""The OpenAPI document: bodies that are read by processes of their own, and errors as they really look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_SCHEMAS = "#/components/schemas/"
_REFUSALS = {
    400: "The request can not be done as it is; `param` names the field at fault",
    401: "The API key is missing or wrong",
    404: "The model does not exist",
    413: "The body is too large",
    429: "Too many requests; `Retry-After` says when to come back",
    500: "The server failed",
    503: "The server is not ready, or stops",
}


class ErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer with a status of 400 or above."""

    error: ErrorDetails


def refuses(*statuses: int) -> dict[str, Any]:
    """What a route's decorator says of these refusals."""
    shapes = {status: {"model": ErrorResponse, "description": _REFUSALS[status]} for status in statuses}
    return {"responses": shapes}


def takes(schema: type[BaseModel]) -> dict[str, Any]:
    """What a route's decorator says of a body of this schema and of the refusals it can meet."""
    reference = {"$ref": f"{_SCHEMAS}{schema.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": reference}}}
    refusals = {status: {"model": ErrorResponse, "description": words} for status, words in _REFUSALS.items()}
    return {"openapi_extra": {"requestBody": body}, "responses": refusals}


def install_openapi(app: FastAPI, schemas: Sequence[type[BaseModel]]) -> None:
    """Makes `app.openapi` describe `schemas`, which its routes name by `takes`."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = describe()
            modes: list[tuple[type[BaseModel], Any]] = [(schema, "validation") for schema in schemas]
            _, described = models_json_schema(modes, ref_template=_SCHEMAS + "{model}")
            components = document["components"]["schemas"]
            components.update(described["$defs"])
            # Promised by the framework; its own refusals are 400 here.
            for operation in (one for path in document["paths"].values() for one in path.values()):
                operation["responses"].pop("422", None)
            components.pop("HTTPValidationError", None)
            components.pop("ValidationError", None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
