"""HTTP routes of OpenAI's Responses."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from gateway.apis.compaction import CompactFormat
from gateway.apis.response_events import UNFINISHED, ResponseEvents, lost
from gateway.apis.responses_format import ResponsesFormat
from gateway.apis.stored_responses import StoredResponse, not_found
from gateway.app.background import events_after
from gateway.app.item_pages import PagingQuery
from gateway.app.openapi import refuses, takes
from gateway.app.serving import answered, respond
from gateway.app.state import gateway_of, responses_of
from gateway.schemas.errors import ApiError, bad_request
from gateway.schemas.responses import CompactRequest, InputTokensRequest, ResponsesRequest
from gateway.transport.streaming import EventStream

router = APIRouter()
_CANCEL_S = 5.0  # longest wait for the process that generates a response to end it
_LOOK_S = 0.05


@router.post("/v1/responses", **takes(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """Answers OpenAI's Responses: generates items, whole or as a stream of events, or in the background."""
    gateway = gateway_of(request)
    prepared = await gateway.generation(request, "responses")
    model, reply = gateway.model(), prepared.reply
    form = ResponsesFormat(model.name, model.tokenizer, prepared.logprobs, reply, responses_of(request))
    if not reply.is_background:
        return await respond(request, prepared, form)
    if prepared.images:
        raise bad_request(
            "images are not supported together with 'background'", "background", "unsupported_parameter"
        )
    queued = await request.app.state.background.start(request, prepared, form)
    return _event_stream(request, queued["id"], -1) if reply.wants_stream else JSONResponse(queued)


@router.post("/v1/responses/compact", **takes(CompactRequest))
async def compact_conversation(request: Request) -> Response:
    """Reduces a conversation to its user's messages and a summary, which later requests may send instead."""
    prepared = await gateway_of(request).generation(request, "compact")
    return await respond(request, prepared, CompactFormat(prepared.reply))


@router.post("/v1/responses/input_tokens", **takes(InputTokensRequest))
async def count_input_tokens(request: Request) -> Response:
    """Counts the tokens that a response's input would have; each image counts as one."""
    return await answered(request, "input_tokens")


def _event_stream(request: Request, response_id: str, after: int) -> Response:
    gateway = gateway_of(request)

    async def closed() -> None:
        """Nothing is to be released: the response goes on without its readers."""

    events = events_after(ResponseEvents(responses_of(request)), response_id, after)
    return EventStream(events, gateway.config.gateway.sse_keepalive_s, closed)


async def _stored(request: Request, response_id: str) -> StoredResponse:
    """Returns a stored response. Raises ApiError 404 when it is gone."""
    store = responses_of(request)
    found = await asyncio.to_thread(store.find, response_id)
    if found is None:
        raise not_found("response", response_id, "response_id", "response_not_found")
    if found.response["status"] in UNFINISHED:
        try:
            is_lost = await asyncio.to_thread(ResponseEvents(store).is_lost, response_id)
            # It may have ended in between.
            found = await asyncio.to_thread(store.find, response_id) or found
        except sqlite3.Error as error:
            raise ApiError(503, f"stored responses cannot be read: {error}", retry_after_s=1) from error
        if is_lost and found.response["status"] in UNFINISHED:
            return StoredResponse(lost(found.response), found.input)
    return found


@router.get("/v1/responses/{response_id}", **refuses(400, 401, 404, 503))
async def retrieve_response(
    request: Request,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1, le=2**31)] = -1,
) -> Response:
    """Returns a stored response, or of a background response the events behind `starting_after`."""
    found = (await _stored(request, response_id)).response
    if not stream:
        return JSONResponse(found)
    if not found.get("background"):
        message = "only background responses can be streamed again"
        raise bad_request(message, "stream", "unsupported_parameter")
    return _event_stream(request, response_id, starting_after)


@router.delete("/v1/responses/{response_id}", **refuses(401, 404))
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    """Deletes a stored response; one that is generated in the background ends."""
    if not await asyncio.to_thread(responses_of(request).delete, response_id):
        raise not_found("response", response_id, "response_id", "response_not_found")
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", **refuses(400, 401, 404, 503))
async def cancel_response(request: Request, response_id: str) -> JSONResponse:
    """Cancels a background response; one that has ended is returned as it is. Others end with their
    connection."""
    found = (await _stored(request, response_id)).response
    if not found.get("background"):
        raise bad_request(
            "Cannot cancel a synchronous response. Close its connection to end it",
            "response_id",
            "unsupported_operation",
        )
    end = time.monotonic() + _CANCEL_S
    if found["status"] in UNFINISHED:
        await asyncio.to_thread(ResponseEvents(responses_of(request)).cancel, response_id)
    while found["status"] in UNFINISHED and time.monotonic() < end:
        await asyncio.sleep(_LOOK_S)
        found = (await _stored(request, response_id)).response
    return JSONResponse(found)


@router.get("/v1/responses/{response_id}/input_items", **refuses(400, 401, 404))
async def list_input_items(request: Request, response_id: str, paging: PagingQuery) -> dict[str, Any]:
    """Lists the items before a stored response's output, earlier responses included, newest first."""
    items = (await _stored(request, response_id)).input
    return paging.page(items, "response")
