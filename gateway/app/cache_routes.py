"""HTTP routes of the prefix cache: what its tiers hold, and dropping it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from gateway.app.openapi import refuses
from gateway.app.state import gateway_of, num_replicas
from gateway.web.live import cache_tiers

router = APIRouter()


@router.get("/v1/cache", **refuses(400, 401, 503))
async def cache(request: Request, replica: Annotated[int, Query(ge=0)] = 0) -> dict[str, Any]:
    """Returns what each tier of an engine's prefix cache holds, in tokens and bytes, and has given back.

    `replica`: which of several engines, from 0.
    """
    gateway = gateway_of(request)
    count = num_replicas(gateway, replica)
    tiers = cache_tiers(await gateway.engine.live(replica))
    return {"object": "cache", "replica": replica, "replicas": count, "tiers": tiers}


@router.delete("/v1/cache", **refuses(401, 503))
@router.get("/flush_cache", **refuses(401, 503))
@router.post("/flush_cache", **refuses(401, 503))
async def flush_cache(request: Request) -> dict[str, Any]:
    """Drops all cached prefixes that no request holds, on all tiers of all engines."""
    return {"success": True, "freed_tokens": await gateway_of(request).engine.flush_cache()}


@router.post("/reset_prefix_cache", response_class=Response, **refuses(401, 503))
async def reset_prefix_cache(request: Request) -> Response:
    """Drops cached prefixes, on vLLM's path."""
    await gateway_of(request).engine.flush_cache()
    return Response(status_code=200)
