"""POST /tokenize and /detokenize, at the root and under /v1."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gateway.openapi import takes
from gateway.prompts.contract import Kind
from gateway.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.state import gateway_of

router = APIRouter()


@router.post("/tokenize", **takes(TokenizeRequest))
@router.post("/v1/tokenize", **takes(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation as the chat template renders it."""
    return await _answered(request, "tokenize")


@router.post("/detokenize", **takes(DetokenizeRequest))
@router.post("/v1/detokenize", **takes(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    return await _answered(request, "detokenize")


async def _answered(request: Request, kind: Kind) -> Response:
    answer = await gateway_of(request).prepare(request, kind)
    assert isinstance(answer, bytes)
    return Response(answer, media_type="application/json")
