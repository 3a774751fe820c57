"""POST /tokenize and /detokenize, at the root and under /v1."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from gateway.errors import bad_request
from gateway.routes.jobs import encode
from gateway.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.state import gateway_of

router = APIRouter()


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a text, or of a conversation as the chat template renders it."""
    model = gateway_of(request).model_named(body.model)
    special = body.add_special_tokens
    if body.messages is not None:
        if any(message.image_urls() for message in body.messages):
            raise bad_request(
                "images are not tokenised here: how many tokens they take depends on them", "messages"
            )
        messages = [message.for_template() for message in body.messages]
        text = model.render_chat(messages, body.add_generation_prompt, kwargs=body.chat_template_kwargs)
        tokens = await encode(model, text, bool(special))
    else:
        tokens = await encode(model, body.prompt or "", special is not False)
    pieces = [model.tokenizer.piece(token) for token in tokens] if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": model.max_context_length,
        "tokens": tokens,
        "token_strs": pieces,
    }


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, str]:
    """The text of token ids, special tokens included."""
    model = gateway_of(request).model_named(body.model)
    model.check_token_ids(body.tokens, "tokens")
    return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}
