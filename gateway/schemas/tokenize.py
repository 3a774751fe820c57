"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from gateway.schemas.chat import Messages, TemplateKwargs
from gateway.schemas.common import MAX_LABEL_CHARACTERS, StrictModel, TokenId
from gateway.validation import param_error

MAX_TOKENS = 2**20  # to turn into text


class TokenizeRequest(StrictModel):
    """Text or a conversation to count or tokenise; exactly one of `prompt` and `messages`."""

    model: str | None = Field(None, max_length=MAX_LABEL_CHARACTERS)
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None, description="Unset: true for `prompt`, false for `messages`"
    )
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateKwargs | None = None
    parse_special: bool | None = Field(
        None,
        description="Whether control tokens spelled in the text are control tokens; unset: true for "
        "`prompt`, false for `messages`",
    )
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise param_error("prompt", "send exactly one of 'prompt' and 'messages'")
        return self


class DetokenizeRequest(StrictModel):
    """Token ids to turn into text."""

    model: str | None = Field(None, max_length=MAX_LABEL_CHARACTERS)
    tokens: list[TokenId] = Field(max_length=MAX_TOKENS, fail_fast=True)
