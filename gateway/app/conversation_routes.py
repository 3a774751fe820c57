"""HTTP routes of OpenAI's conversations."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Request

from gateway.apis.conversations import Conversations, no_item
from gateway.app.item_pages import PagingQuery, item_list
from gateway.app.openapi import refuses, takes
from gateway.app.state import gateway_of, responses_of
from gateway.schemas.responses import ConversationRequest

router = APIRouter()


def _conversations(request: Request) -> Conversations:
    return Conversations(responses_of(request))


async def _sent(request: Request) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns items and metadata of a body. Raises ApiError 400, 404."""
    answer = await gateway_of(request).prepare(request, "conversation")
    assert isinstance(answer, bytes)
    value = json.loads(answer)
    return value["items"], value["metadata"]


@router.post("/v1/conversations", **takes(ConversationRequest))
async def create_conversation(request: Request) -> dict[str, Any]:
    """Makes a conversation, which may begin with some items."""
    items, metadata = await _sent(request)
    return await asyncio.to_thread(_conversations(request).create, items, metadata)


@router.get("/v1/conversations/{conversation_id}", **refuses(401, 404, 503))
async def retrieve_conversation(request: Request, conversation_id: str) -> dict[str, Any]:
    """Returns a conversation without its items."""
    return await asyncio.to_thread(_conversations(request).find, conversation_id)


@router.post("/v1/conversations/{conversation_id}", **takes(ConversationRequest))
async def update_conversation(request: Request, conversation_id: str) -> dict[str, Any]:
    """Replaces a conversation's metadata."""
    _, metadata = await _sent(request)
    return await asyncio.to_thread(_conversations(request).update, conversation_id, metadata)


@router.delete("/v1/conversations/{conversation_id}", **refuses(401, 404, 503))
async def delete_conversation(request: Request, conversation_id: str) -> dict[str, Any]:
    """Deletes a conversation; responses in it stay."""
    await asyncio.to_thread(_conversations(request).delete, conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.post("/v1/conversations/{conversation_id}/items", **takes(ConversationRequest))
async def create_items(request: Request, conversation_id: str) -> dict[str, Any]:
    """Adds items to a conversation's end."""
    items, _ = await _sent(request)
    await asyncio.to_thread(_conversations(request).append, conversation_id, items)
    return item_list(items)


@router.get("/v1/conversations/{conversation_id}/items", **refuses(400, 401, 404, 503))
async def list_items(request: Request, conversation_id: str, paging: PagingQuery) -> dict[str, Any]:
    """Lists a conversation's items, newest first."""
    items = await asyncio.to_thread(_conversations(request).items, conversation_id)
    return paging.page(items, "conversation")


async def _item(request: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
    items = await asyncio.to_thread(_conversations(request).items, conversation_id)
    found = next((item for item in items if item["id"] == item_id), None)
    if found is None:
        raise no_item(item_id)
    return found


@router.get("/v1/conversations/{conversation_id}/items/{item_id}", **refuses(401, 404, 503))
async def retrieve_item(request: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
    """Returns one item."""
    return await _item(request, conversation_id, item_id)


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}", **refuses(401, 404, 503))
async def delete_item(request: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
    """Deletes one item. Returns the conversation."""
    conversations = _conversations(request)
    await asyncio.to_thread(conversations.delete_item, conversation_id, item_id)
    return await asyncio.to_thread(conversations.find, conversation_id)
