"""The body of POST /v2/chat, Cohere's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from gateway.schemas.common import INT64_MAX, INT64_MIN, MAX_LABEL_CHARACTERS, StrictModel
from gateway.schemas.requests import MAX_MESSAGES, MAX_PARTS

Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)]
MAX_TOOLS = 1024
MAX_DOCUMENTS = 2048


class CohereImage(StrictModel):
    """An image by its address or as a data URL."""

    place = "messages[].content[].image_url."
    url: str
    detail: Label | None = None


class CohereDocument(StrictModel):
    """What a tool has found."""

    place = "messages[].content[].document."
    id: Label | None = None
    data: str | dict[str, Any]


class CoherePart(StrictModel):
    """A part of a message; the field of its type has what it holds."""

    place = "messages[].content[]."
    type: Literal["text", "thinking", "image_url", "document"]
    text: str | None = None
    thinking: str | None = None
    image_url: CohereImage | None = None
    document: CohereDocument | None = None


class CohereFunction(StrictModel):
    """A function that the model called."""

    place = "messages[].tool_calls[].function."
    name: Label
    arguments: str = "{}"


class CohereCall(StrictModel):
    """A tool call of an earlier answer."""

    place = "messages[].tool_calls[]."
    id: Label
    type: Literal["function"] = "function"
    function: CohereFunction


class CohereMessage(StrictModel):
    """One message of the conversation."""

    place = "messages[]."
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[CoherePart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tool_calls: list[CohereCall] | None = Field(None, max_length=MAX_PARTS, fail_fast=True)
    tool_call_id: Label | None = None
    tool_plan: str | None = Field(None, description="What was thought before the calls")
    citations: Any = Field(None, description="No effect")


class CohereThinking(StrictModel):
    """Whether the model thinks."""

    place = "thinking."
    type: Literal["enabled", "disabled"]
    token_budget: int | None = Field(None, ge=1, le=2**31)


class CohereResponseFormat(StrictModel):
    """Text, or JSON."""

    place = "response_format."
    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = Field(None, validation_alias=AliasChoices("json_schema", "schema"))


class CohereChatRequest(StrictModel):
    """A request for the next message."""

    model: Label = Field(description="Name as in /v1/models")
    messages: list[CohereMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS, description="As in OpenAI's chats")
    strict_tools: bool | None = Field(None, description="Calls satisfy the tools' schemas")
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: list[str | dict[str, Any]] | None = Field(
        None, max_length=MAX_DOCUMENTS, description="Passed to the chat template"
    )
    response_format: CohereResponseFormat | None = None
    thinking: CohereThinking | None = None
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0)
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: int | None = Field(None, ge=0, description="Draw from the likeliest tokens; 0: from all")
    p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    citation_options: Any = Field(None, description="No effect: nothing is cited")
    safety_mode: Any = Field(None, description="No effect: the model's own training decides")
    priority: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
