"""HTTP routes of Anthropic's batches of messages."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import IO, Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from gateway.apis.batch_lines import MESSAGES
from gateway.app.file_routes import store_of
from gateway.app.large_message_batch import is_large, received_lines
from gateway.app.openapi import refuses, takes
from gateway.app.state import gateway_of
from gateway.batches.batch import WINDOW_S, Batch
from gateway.batches.files import storing
from gateway.batches.store import ERRORS, OUTPUT, BatchStore, new_batch_id
from gateway.schemas.batches import MessageBatchRequest
from gateway.schemas.errors import ApiError, bad_request
from gateway.transport.keys import owner_of

router = APIRouter()
_BLOCK = 2**18


def _shown(request: Request, store: BatchStore, batch: Batch) -> dict[str, Any]:
    return batch.as_anthropic(store.cancelling_at(batch), str(request.base_url).rstrip("/"))


@router.post("/v1/messages/batches", **takes(MessageBatchRequest))
async def create_message_batch(request: Request) -> dict[str, Any]:
    """Makes a batch of requests for messages, which are computed beside other requests."""
    store, gateway = store_of(request), gateway_of(request)
    if is_large(request, gateway):
        with storing():
            async with received_lines(request, gateway, store.files) as (lines, count):
                return await asyncio.to_thread(_make, request, store, lines, count)
    checked = await gateway.prepare(request, "message_batch")
    assert isinstance(checked, bytes)
    with storing():
        await asyncio.to_thread(store.files.check_room, len(checked))
        return await asyncio.to_thread(_make, request, store, BytesIO(checked), checked.count(b"\n"))


def _make(request: Request, store: BatchStore, lines: IO[bytes], count: int) -> dict[str, Any]:
    """Stores a batch of requests as lines of an input file; returns it as clients see it."""
    owner, key_name = owner_of(request.scope)
    now = int(time.time())
    batch = Batch(
        id=new_batch_id("anthropic"),
        api="anthropic",
        endpoint=MESSAGES,
        owner=owner,
        key_name=key_name,
        created_at=now,
        expires_at=now + WINDOW_S,
        total=count,
    )

    def fill(path: Path) -> None:
        with path.open("wb") as file:
            shutil.copyfileobj(lines, file)

    store.make(batch, fill)
    return _shown(request, store, batch)


@router.get("/v1/messages/batches", **refuses(400, 401, 404))
async def list_message_batches(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    before_id: str | None = None,
    after_id: str | None = None,
) -> dict[str, Any]:
    """Lists this client's batches of messages, newest first."""
    store, (owner, _) = store_of(request), owner_of(request.scope)

    def listed() -> dict[str, Any]:
        ids = store.ids(owner, "anthropic")
        for name, cursor in (("after_id", after_id), ("before_id", before_id)):
            if cursor is not None and cursor not in ids:
                raise bad_request(f"'{name}' names no batch that was listed: {cursor[:100]!r}", name)
        start = 0 if after_id is None else ids.index(after_id) + 1
        wanted, has_more = ids[start : start + limit], len(ids) > start + limit
        if before_id is not None:
            end = ids.index(before_id)
            wanted, has_more = ids[max(0, end - limit) : end], end > limit
        found = [store.find(owner, batch_id, "anthropic") for batch_id in wanted]
        page = [_shown(request, store, batch) for batch in found if batch is not None]
        ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return {"data": page, "has_more": has_more, "first_id": ends[0], "last_id": ends[1]}

    with storing():
        return await asyncio.to_thread(listed)


def _existing(store: BatchStore, owner: str, batch_id: str) -> Batch:
    batch = store.find(owner, batch_id, "anthropic")
    if batch is None:
        raise ApiError(404, f"there is no message batch {batch_id[:100]!r}", code="batch_not_found")
    return batch


@router.get("/v1/messages/batches/{batch_id}", **refuses(401, 404))
async def retrieve_message_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Returns a batch as it is now."""
    store, (owner, _) = store_of(request), owner_of(request.scope)
    with storing():
        return await asyncio.to_thread(lambda: _shown(request, store, _existing(store, owner, batch_id)))


@router.post("/v1/messages/batches/{batch_id}/cancel", **refuses(400, 401, 404))
async def cancel_message_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Cancels a batch: requests that run are finished, no further ones are started."""
    store, (owner, _) = store_of(request), owner_of(request.scope)

    def cancel() -> dict[str, Any]:
        batch = _existing(store, owner, batch_id)
        if batch.is_finished:
            raise bad_request("the batch has ended: it cannot be cancelled any more", "batch_id")
        store.cancel(batch)
        return _shown(request, store, batch)

    with storing():
        return await asyncio.to_thread(cancel)


@router.get("/v1/messages/batches/{batch_id}/results", **refuses(400, 401, 404))
async def message_batch_results(request: Request, batch_id: str) -> Response:
    """Returns a line of JSON for each request of a batch that has ended."""
    store, (owner, _) = store_of(request), owner_of(request.scope)
    with storing():
        batch = await asyncio.to_thread(_existing, store, owner, batch_id)
    if not batch.is_finished:
        raise bad_request("the batch has not ended: its results are not available yet", "batch_id")
    paths = [store.path(batch) / name for name in (OUTPUT, ERRORS)]
    return StreamingResponse(_contents(paths), media_type="application/x-jsonl")


def _contents(paths: list[Path]) -> Iterator[bytes]:
    """Yields the bytes of files one after the other; the framework reads it in threads."""
    for path in paths:
        if path.exists():
            with path.open("rb") as file:
                while block := file.read(_BLOCK):
                    yield block


@router.delete("/v1/messages/batches/{batch_id}", **refuses(400, 401, 404))
async def delete_message_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Deletes a batch that has ended, with its results."""
    store, (owner, _) = store_of(request), owner_of(request.scope)

    def delete() -> dict[str, Any]:
        batch = _existing(store, owner, batch_id)
        if not batch.is_finished:
            raise bad_request("the batch has not ended: cancel it first", "batch_id")
        store.delete(batch)
        return {"id": batch_id, "type": "message_batch_deleted"}

    with storing():
        return await asyncio.to_thread(delete)
