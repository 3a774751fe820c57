"""The bodies of POST /v1/messages and /v1/messages/count_tokens, Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Tag

from gateway.schemas.common import MAX_LABEL_CHARACTERS, StrictModel, tagged
from gateway.schemas.requests import MAX_MESSAGES, MAX_PARTS

MAX_TOOLS = 1024


class CacheControl(StrictModel):
    """How long the request's prefix is kept at least; prefixes are cached without it, too."""

    place = "cache_control."
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = Field(None, description="5 minutes unless set")

    @property
    def seconds(self) -> int:
        """The time to live."""
        return 3600 if self.ttl == "1h" else 300


class Block(StrictModel):
    """The fields that all blocks have."""

    cache_control: CacheControl | None = None


class TextBlock(Block):
    """A text block; citations are ignored."""

    place = "content[]."
    type: Literal["text"]
    text: str
    citations: Any = None


class ImageSource(StrictModel):
    """The bytes of an image, or its URL."""

    place = "content[].source."
    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Block):
    """An image."""

    place = "content[]."
    type: Literal["image"]
    source: ImageSource


class DocumentSource(StrictModel):
    """The text of a document; other kinds of documents are not supported."""

    place = "content[].source."
    type: Literal["text", "content"]
    media_type: str | None = None
    data: str | None = None
    content: str | list[TextBlock] | None = None


class DocumentBlock(Block):
    """A document, read as text."""

    place = "content[]."
    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: Any = None


class SearchResultBlock(Block):
    """A search result, read as text."""

    place = "content[]."
    type: Literal["search_result"]
    title: str
    source: str
    content: Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]
    citations: Any = None


class ThinkingBlock(Block):
    """A thought of an earlier answer; that of a hidden one is in its signature."""

    place = "content[]."
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    """A tool the model called."""

    place = "content[]."
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)
    caller: Any = None


class OtherBlock(BaseModel):
    """A block of a kind that has no effect here, such as the results of Anthropic's own tools."""

    type: str


_RESULTS = {kind: f"a-{kind}" for kind in ("text", "image", "document", "search_result")}
_BLOCKS = {**_RESULTS, **{kind: f"a-{kind}" for kind in ("thinking", "tool_use", "tool_result")}}

ResultBlock = Annotated[
    Annotated[TextBlock, Tag("a-text")]
    | Annotated[ImageBlock, Tag("a-image")]
    | Annotated[DocumentBlock, Tag("a-document")]
    | Annotated[SearchResultBlock, Tag("a-search_result")]
    | Annotated[OtherBlock, Tag("an-other")],
    tagged(_RESULTS, "a-text"),
]


class ToolResultBlock(Block):
    """The result of a tool call, or its error."""

    place = "content[]."
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    is_error: bool | None = None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("a-text")]
    | Annotated[ImageBlock, Tag("a-image")]
    | Annotated[DocumentBlock, Tag("a-document")]
    | Annotated[SearchResultBlock, Tag("a-search_result")]
    | Annotated[ThinkingBlock, Tag("a-thinking")]
    | Annotated[ToolUseBlock, Tag("a-tool_use")]
    | Annotated[ToolResultBlock, Tag("a-tool_result")]
    | Annotated[OtherBlock, Tag("an-other")],
    tagged(_BLOCKS, "a-text"),
]


class AnthropicMessage(StrictModel):
    """One turn of the conversation."""

    place = "messages[]."
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class Thinking(StrictModel):
    """Whether the model thinks before it answers, and how long."""

    place = "thinking."
    type: str = Field(max_length=MAX_LABEL_CHARACTERS, description="All but disabled: it may think")
    budget_tokens: int | None = Field(None, ge=1, le=2**31)
    display: str | None = Field(None, description="omitted: thoughts come back in signatures only")


class AnthropicTool(StrictModel):
    """A tool; one whose `type` is not custom is Anthropic's own and ignored."""

    place = "tools[]."
    type: str | None = None
    name: str = Field("", max_length=MAX_LABEL_CHARACTERS)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    defer_loading: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None
    allowed_callers: Any = None


class ToolChoice(StrictModel):
    """Whether tools are called; `name` is that of the tool for type tool."""

    place = "tool_choice."
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, max_length=MAX_LABEL_CHARACTERS)
    disable_parallel_tool_use: bool | None = None


class OutputFormat(StrictModel):
    """The JSON schema that the answer must satisfy."""

    place = "output_config.format."
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """How the answer is generated."""

    place = "output_config."
    effort: str | None = Field(None, max_length=MAX_LABEL_CHARACTERS)
    format: OutputFormat | None = None


class RequestMetadata(StrictModel):
    """The end user of the request."""

    place = "metadata."
    user_id: str | None = None


class CountTokensRequest(StrictModel):
    """The fields that make the prompt."""

    model: str = Field(max_length=MAX_LABEL_CHARACTERS)
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    thinking: Thinking | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="As in `output_config`, its older place")
    thread: Any = Field(None, description="Not supported, 400: the server stores no conversations")


class MessagesRequest(CountTokensRequest):
    """A request for the next message; unknown fields have no effect and are counted."""

    max_tokens: int = Field(
        ge=1, le=2**31, description="Most output tokens; reduced to what fits in the context"
    )
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    top_p: float | None = Field(None, ge=0, le=1)
    metadata: RequestMetadata | None = None
    cache_control: CacheControl | None = Field(None, description="As in a block")
    service_tier: Any = Field(None, description="No effect")
