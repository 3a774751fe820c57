"""HTTP routes for operators that put the engine to sleep and wake it, under vLLM's and SGLang's names.

They need a key as all other paths do, and no page of another site may send them.
"""

from __future__ import annotations

from typing import Annotated, Any

import grpc
from fastapi import APIRouter, Body, Query, Request

from gateway.app.openapi import refuses
from gateway.app.state import gateway_of
from gateway.schemas.errors import ApiError, bad_request

router = APIRouter()
_PARTS = frozenset({"weights", "kv_cache", "cuda_graph"})


@router.post("/sleep", **refuses(400, 401, 503))
async def sleep(request: Request, level: int = 1, mode: str = "wait") -> dict[str, Any]:
    """Gives back all memory of the engines' devices; experts stay packed in RAM.

    `mode`: `wait` for running requests, or `abort` them. `level`: 1, the only one.
    """
    if level != 1:
        raise bad_request(f"'level' is {level}; allowed is 1: experts stay in RAM", "level")
    if mode not in ("wait", "abort"):
        raise bad_request(f"'mode' is {mode[:40]!r}; allowed are wait and abort", "mode")
    try:
        await gateway_of(request).engine.put_to_sleep(mode == "abort")
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.FAILED_PRECONDITION:
            raise
        raise ApiError(400, error.details() or "the engine cannot sleep", code="cannot_sleep") from None
    return {"success": True, "is_sleeping": True}


@router.post("/wake_up", **refuses(400, 401, 503))
async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> dict[str, Any]:
    """Loads the model again, and answers when that is done.

    `tags`: parts as vLLM has them; only all together can be loaded.
    """
    _check_all(tags, {"weights", "kv_cache"})
    await gateway_of(request).engine.wake_up()
    return {"success": True, "is_sleeping": False}


@router.get("/is_sleeping", **refuses(401))
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Says whether the engine sleeps."""
    return {"is_sleeping": await gateway_of(request).engine.is_sleeping()}


_Tags = Annotated[list[str] | None, Body(embed=True)]


@router.post("/release_memory_occupation", **refuses(400, 401, 503))
async def release_memory_occupation(request: Request, tags: _Tags = None) -> dict[str, Any]:
    """Does what `/sleep` does, in SGLang's shape; `tags`: only all parts together can be given back."""
    _check_all(tags, _PARTS)
    return await sleep(request)


@router.post("/resume_memory_occupation", **refuses(400, 401, 503))
async def resume_memory_occupation(request: Request, tags: _Tags = None) -> dict[str, Any]:
    """Does what `/wake_up` does, in SGLang's shape; `tags`: only all parts together can be loaded."""
    _check_all(tags, _PARTS)
    return await wake_up(request)


def _check_all(tags: list[str] | None, parts: frozenset[str] | set[str]) -> None:
    """Raises ApiError 400 for some of the parts; an engine has all of them in memory or none."""
    if tags and not {"weights", "kv_cache"} <= set(tags) <= parts:
        listed = ", ".join(sorted(parts))
        raise bad_request(f"'tags' are {sorted(tags)}; allowed are none, or all of {listed}", "tags")
