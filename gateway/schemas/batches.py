"""The bodies that create batches, and the rules for a line of a batch's input file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.schemas.common import StrictModel

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_CUSTOM_ID = 512
MAX_REQUESTS = 50_000  # of a file
MAX_MESSAGE_REQUESTS = 100_000  # of a batch of Anthropic's API
SHORTEST_LIFE_S, LONGEST_LIFE_S = 3600, 2_592_000
CustomId = Annotated[str, Field(min_length=1, max_length=MAX_CUSTOM_ID)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ExpiresAfter(StrictModel):
    """When a file is deleted."""

    place = "expires_after."
    anchor: Literal["created_at"]
    seconds: int = Field(ge=SHORTEST_LIFE_S, le=LONGEST_LIFE_S)


class BatchRequest(StrictModel):
    """A request for a batch."""

    input_file_id: str = Field(max_length=128, description="File uploaded with purpose batch")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = Field(None, description="Unset: 30 days")


class MessageBatchLine(StrictModel):
    """One request of a batch of messages."""

    place = "requests[]."
    custom_id: CustomId
    params: dict[str, Any] = Field(description="As the body of /v1/messages, without stream")


class MessageBatchRequest(StrictModel):
    """A request for a batch of messages."""

    requests: list[MessageBatchLine] = Field(min_length=1, max_length=MAX_MESSAGE_REQUESTS, fail_fast=True)
