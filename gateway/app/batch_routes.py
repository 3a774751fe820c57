"""HTTP routes of OpenAI's batches."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from gateway.app.file_routes import ids_after, no_file, paged, store_of
from gateway.app.openapi import refuses, takes
from gateway.app.state import gateway_of
from gateway.batches.batch import WINDOW_S, Batch
from gateway.batches.files import storing
from gateway.batches.store import BatchStore, new_batch_id
from gateway.schemas.batches import LONGEST_LIFE_S, BatchRequest
from gateway.schemas.errors import ApiError, bad_request
from gateway.transport.keys import owner_of

router = APIRouter()


def _shown(store: BatchStore, batch: Batch) -> dict[str, Any]:
    return batch.as_openai(store.cancelling_at(batch))


@router.post("/v1/batches", **takes(BatchRequest))
async def create_batch(request: Request) -> dict[str, Any]:
    """Makes a batch of an uploaded file; its lines are checked and computed beside other requests."""
    store, (owner, key_name) = store_of(request), owner_of(request.scope)
    answer = await gateway_of(request).prepare(request, "batch")
    assert isinstance(answer, bytes)
    fields = json.loads(answer)
    file_id = fields["input_file_id"]
    expires = fields["output_expires_after"]
    now = int(time.time())
    batch = Batch(
        id=new_batch_id("openai"),
        api="openai",
        endpoint=fields["endpoint"],
        owner=owner,
        key_name=key_name,
        created_at=now,
        expires_at=now + WINDOW_S,
        input_file_id=file_id,
        metadata=fields["metadata"],
        output_life_s=LONGEST_LIFE_S if expires is None else expires["seconds"],
    )

    def make() -> dict[str, Any]:
        facts = store.files.find(owner, file_id)
        if facts is None:
            raise no_file(file_id, "input_file_id")
        if facts["purpose"] != "batch":
            message = f"the file has the purpose {facts['purpose']!r}; a batch needs one of purpose 'batch'"
            raise bad_request(message, "input_file_id", "invalid_purpose")
        source = store.files.data(owner, file_id)

        def link(path: Path) -> None:
            os.link(source, path)

        store.make(batch, link)
        return _shown(store, batch)

    with storing():
        return await asyncio.to_thread(make)


@router.get("/v1/batches", **refuses(400, 401, 404))
async def list_batches(
    request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> dict[str, Any]:
    """Lists this client's batches, newest first."""
    store, (owner, _) = store_of(request), owner_of(request.scope)

    def found() -> Iterator[dict[str, Any]]:
        for batch_id in ids_after(store.ids(owner, "openai"), after):
            if (batch := store.find(owner, batch_id, "openai")) is not None:
                yield _shown(store, batch)

    with storing():
        return await asyncio.to_thread(lambda: paged(found(), limit))


def _existing(store: BatchStore, owner: str, batch_id: str) -> Batch:
    batch = store.find(owner, batch_id, "openai")
    if batch is None:
        message = f"No batch found with id {batch_id[:100]!r}."
        raise ApiError(404, message, param="batch_id", code="batch_not_found")
    return batch


@router.get("/v1/batches/{batch_id}", **refuses(401, 404))
async def retrieve_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Returns a batch as it is now."""
    store, (owner, _) = store_of(request), owner_of(request.scope)
    with storing():
        return await asyncio.to_thread(lambda: _shown(store, _existing(store, owner, batch_id)))


@router.post("/v1/batches/{batch_id}/cancel", **refuses(400, 401, 404))
async def cancel_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Cancels a batch: requests that run are finished, no further ones are started."""
    store, (owner, _) = store_of(request), owner_of(request.scope)

    def cancel() -> dict[str, Any]:
        batch = _existing(store, owner, batch_id)
        if batch.is_finished:
            message = f"Cannot cancel a batch with status '{batch.status}'."
            raise bad_request(message, "batch_id", "invalid_batch_status")
        store.cancel(batch)
        return _shown(store, batch)

    with storing():
        return await asyncio.to_thread(cancel)
