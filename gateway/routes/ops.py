"""What operators and load balancers ask: liveness, readiness, metrics, version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.draining import shutting_down
from gateway.errors import ApiError
from gateway.openapi import refuses
from gateway.state import gateway_of
from moebius import __version__

router = APIRouter()


@router.get("/health", response_class=Response)
async def health() -> Response:
    """200 with an empty body while this process answers; says nothing of the engine."""
    return Response(status_code=200)


@router.get("/ready", **refuses(503))
async def ready(request: Request) -> dict[str, Any]:
    """200 when a request sent now would be answered; 503 with the reason otherwise.

    That is: the model is known, this server is not shutting down, and the engine's health is SERVING, which
    it is not while it waits for lost expert servers.
    """
    gateway = gateway_of(request)
    if gateway.drain.has_begun:
        raise shutting_down()
    model = gateway.model()
    if not await gateway.engine.is_serving():
        raise ApiError(
            503,
            "the engine is not serving: it is starting, stopping, gone, or waiting for its expert servers",
            code="engine_unavailable",
            retry_after_s=2,
        )
    return {"status": "ready", "model": model.name, "in_flight": gateway.admission.in_flight}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(gateway_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of this software."""
    return {"version": __version__}
