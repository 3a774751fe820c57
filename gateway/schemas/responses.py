"""The body of POST /v1/responses and the items of its input."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Tag, TypeAdapter, model_validator

from gateway.schemas.common import INT64_MAX, INT64_MIN, MAX_LABEL_CHARACTERS, StrictModel, tagged
from gateway.schemas.errors import param_error
from gateway.schemas.requests import MAX_MESSAGES, MAX_PARTS
from moebius.config.request_limits import MAX_LOGPROBS

MAX_TOOLS = 1024
Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)]


class Other(BaseModel):
    """An item, a part or a tool of a kind that is ignored."""

    model_config = ConfigDict(extra="allow")
    type: str | None = None


class TextPart(StrictModel):
    """A text of either side, also of a refusal or a thought."""

    place = "input[].content[]."
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None

    def words(self) -> str:
        """Returns the text, or that of the refusal."""
        return self.refusal if self.refusal is not None else self.text


class ImagePart(StrictModel):
    """An image by its URL, which may hold its bytes."""

    place = "input[].content[]."
    type: Literal["input_image", "image_url"]
    image_url: str | None = None
    detail: str | None = Field(None, max_length=MAX_LABEL_CHARACTERS)
    file_id: str | None = None
    prompt_cache_breakpoint: Any = None


class FilePart(StrictModel):
    """A file, which is not supported."""

    place = "input[].content[]."
    type: Literal["input_file", "input_audio"]


_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_PARTS = {
    **dict.fromkeys(_TEXTS, "a-text"),
    **dict.fromkeys(("input_image", "image_url"), "an-image"),
    **dict.fromkeys(("input_file", "input_audio"), "a-file"),
}
Part = Annotated[
    Annotated[TextPart, Tag("a-text")]
    | Annotated[ImagePart, Tag("an-image")]
    | Annotated[FilePart, Tag("a-file")]
    | Annotated[Other, Tag("an-other")],
    tagged(_PARTS, "a-text"),
]
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


class Item(StrictModel):
    """The fields that all items of an input share."""

    place = "input[]."
    id: Label | None = None
    status: str | None = None


class MessageItem(Item):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    phase: Any = None


class AgentItem(Item):
    """A message from another agent."""

    type: Literal["agent_message"]
    author: Label
    recipient: Any = None
    content: Parts


class CallItem(Item):
    """A call of a function in the history."""

    type: Literal["function_call"]
    call_id: Label
    name: Label
    arguments: str
    namespace: Label | None = None
    caller: Any = None


class CustomCallItem(Item):
    """A call of a custom tool in the history, with text."""

    type: Literal["custom_tool_call"]
    call_id: Label
    name: Label
    input: str
    namespace: Label | None = None
    caller: Any = None


class OutputItem(Item):
    """The result of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Label
    output: str | Parts
    name: Any = None
    namespace: Any = None
    caller: Any = None


class ReasoningItem(Item):
    """A thought of an earlier answer."""

    type: Literal["reasoning"]
    summary: Parts = Field(default_factory=list)
    content: Parts | None = None
    encrypted_content: str | None = None


class CompactionItem(Item):
    """What an earlier conversation was reduced to."""

    type: Literal["compaction", "compaction_summary"]
    encrypted_content: str
    created_by: Any = None


class ReferenceItem(Item):
    """A reference to an item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: Label


class FunctionTool(StrictModel):
    """A function that the model may call."""

    place = "tools[]."
    type: Literal["function"]
    name: Label
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Any = None
    output_schema: Any = None
    allowed_callers: Any = None


class CustomFormat(StrictModel):
    """The format of the text for a custom tool."""

    place = "tools[].format."
    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "grammar" and (self.syntax is None or self.definition is None):
            raise param_error(
                "tools", "a custom tool's 'format' of type 'grammar' needs 'syntax' and 'definition'"
            )
        return self


class CustomTool(StrictModel):
    """A tool that takes text; its grammar is enforced, and shown to the model."""

    place = "tools[]."
    type: Literal["custom"]
    name: Label
    description: str | None = None
    format: CustomFormat | None = None
    defer_loading: Any = None
    allowed_callers: Any = None


class NamespaceTool(StrictModel):
    """Tools whose names share a prefix."""

    place = "tools[]."
    type: Literal["namespace"]
    name: Label
    description: str | None = None
    tools: Annotated[list[OwnTool], Field(max_length=MAX_TOOLS)]


OwnTool = Annotated[
    Annotated[FunctionTool, Tag("a-function")]
    | Annotated[CustomTool, Tag("a-custom")]
    | Annotated[Other, Tag("an-other")],
    tagged({"function": "a-function", "custom": "a-custom"}, "a-function"),
]
AnyTool = Annotated[
    Annotated[FunctionTool, Tag("a-function")]
    | Annotated[CustomTool, Tag("a-custom")]
    | Annotated[NamespaceTool, Tag("a-namespace")]
    | Annotated[Other, Tag("an-other")],
    tagged({"function": "a-function", "custom": "a-custom", "namespace": "a-namespace"}, "a-function"),
]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
NamespaceTool.model_rebuild()


class ToolsItem(Item):
    """Further tools, sent as an item of the input."""

    type: Literal["additional_tools"]
    role: Any = None
    tools: Tools


_ITEMS = {
    "message": "a-message",
    "agent_message": "an-agent",
    "function_call": "a-call",
    "custom_tool_call": "a-custom",
    "function_call_output": "an-output",
    "custom_tool_call_output": "an-output",
    "reasoning": "a-thought",
    "item_reference": "a-reference",
    "compaction": "a-compaction",
    "compaction_summary": "a-compaction",
    "additional_tools": "a-list",
}


def _untyped(value: dict[str, Any]) -> str:
    """Returns the type of an item without one: a reference has nothing but an id, all else is a message."""
    return "a-reference" if "id" in value and "role" not in value else "a-message"


AnyItem = Annotated[
    Annotated[MessageItem, Tag("a-message")]
    | Annotated[AgentItem, Tag("an-agent")]
    | Annotated[CallItem, Tag("a-call")]
    | Annotated[CustomCallItem, Tag("a-custom")]
    | Annotated[OutputItem, Tag("an-output")]
    | Annotated[ReasoningItem, Tag("a-thought")]
    | Annotated[ReferenceItem, Tag("a-reference")]
    | Annotated[CompactionItem, Tag("a-compaction")]
    | Annotated[ToolsItem, Tag("a-list")]
    | Annotated[Other, Tag("an-other")],
    tagged(_ITEMS, _untyped),
]
Items = Annotated[list[AnyItem], Field(max_length=MAX_MESSAGES, fail_fast=True)]
ITEMS: TypeAdapter[list[Any]] = TypeAdapter(Items, config=ConfigDict(defer_build=True))


class Reasoning(StrictModel):
    """How much the model thinks, and where its thought is shown."""

    place = "reasoning."
    effort: Label | None = None
    summary: Label | None = Field(None, description="Set: the thought is given as a summary, not as content")
    generate_summary: Label | None = None
    context: Any = None


class TextFormat(StrictModel):
    """The format that the answer must have."""

    place = "text.format."
    type: Literal["text", "json_object", "json_schema"]
    name: Label | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class Text(StrictModel):
    """The answer's format."""

    place = "text."
    format: TextFormat | None = None
    verbosity: Any = Field(None, description="No effect")


class ConversationReference(StrictModel):
    """A conversation by its id."""

    place = "conversation."
    id: Label


class ConversationRequest(StrictModel):
    """Items of a conversation, or what is noted of it."""

    items: Items | None = Field(None, description="Unset: none")
    metadata: dict[str, str] | None = Field(None, max_length=16)


class CompactRequest(StrictModel):
    """A request for a shorter conversation that means the same."""

    model: Label | None = None
    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: Label | None = None
    prompt_cache_key: Label | None = Field(None, description="No effect")


class ResponsesRequest(StrictModel):
    """A request for a response; unknown fields have no effect and are counted."""

    model: Label | None = None
    input: str | Items = Field(description="Text, or items: messages, calls and their results, thoughts")
    instructions: str | None = None
    previous_response_id: Label | None = Field(None, description="Id of a stored response to continue")
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    text: Text | None = None
    reasoning: Reasoning | None = None
    include: list[Label] | None = Field(None, max_length=100)
    store: bool | None = Field(None, description="Unset: true")
    stream: bool | None = None
    stream_options: dict[str, Any] | None = Field(None, description="No effect")
    background: bool | None = Field(None, description="True: answered at once, generated afterwards")
    conversation: Label | ConversationReference | None = Field(
        None, description="Id of a conversation, whose items precede the input; it gets input and output"
    )
    prompt: Any = Field(None, description="Only unset: the server has no stored prompts")
    metadata: dict[str, str] | None = Field(None, max_length=16)
    truncation: Label | None = Field(None, description="No effect: too long inputs are refused")
    max_tool_calls: int | None = Field(None, ge=0, description="No effect: the server calls no tools")
    service_tier: Label | None = Field(None, description="No effect")
    user: Label | None = None
    safety_identifier: Label | None = Field(None, description="No effect")
    prompt_cache_key: Label | None = Field(None, description="No effect: equal prefixes are found by content")
    # As other servers offer them.
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    keep_prefix_s: float | None = None
    prompt_cache_retention: Label | None = Field(None, description="As in chats")


class InputTokensRequest(ResponsesRequest):
    """A request whose input tokens are counted; nothing is stored."""

    input: str | Items = Field(default_factory=list, description="As of a response")
    store: bool | None = Field(False, description="No effect: nothing is stored")
