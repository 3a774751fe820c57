"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from gateway.openapi import refuses
from gateway.state import gateway_of

router = APIRouter()


@router.get("/v1/models", **refuses(401, 503))
async def list_models(request: Request) -> dict[str, Any]:
    """The one served model."""
    return {"object": "list", "data": [gateway_of(request).model().card()]}


@router.get("/v1/models/{model_id:path}", **refuses(401, 404, 503))
async def retrieve_model(request: Request, model_id: str) -> dict[str, Any]:
    """The served model when it has this id; names may contain slashes."""
    return gateway_of(request).model_named(model_id).card()
