"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from gateway.schemas.chat import ChatMessage
from gateway.schemas.common import StrictModel
from gateway.validation import param_error


class TokenizeRequest(StrictModel):
    """Text or a conversation to count or tokenise; exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Unset: true for `prompt`, false for `messages`"
    )
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise param_error("prompt", "send exactly one of 'prompt' and 'messages'")
        return self


class DetokenizeRequest(StrictModel):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
