"""OpenAI's Responses: translates a request to a chat request."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gateway.apis.conversations import MOST_ITEMS, Conversations
from gateway.apis.stored_responses import not_found
from gateway.apis.translation import (
    Context,
    MessageList,
    Translation,
    function_tool,
    image_part,
    text_part,
    without_none,
)
from gateway.schemas.errors import bad_request
from gateway.schemas.responses import (
    ITEMS,
    AgentItem,
    CallItem,
    CompactionItem,
    CompactRequest,
    ConversationRequest,
    CustomCallItem,
    CustomTool,
    FilePart,
    FunctionTool,
    ImagePart,
    MessageItem,
    NamespaceTool,
    OutputItem,
    ReasoningItem,
    ReferenceItem,
    ResponsesRequest,
    TextPart,
    ToolsItem,
)

# The chat's parameters, with the API's parameter for each.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
INPUT = "input"  # the one parameter of the function that stands for a custom tool
# Prefixes of what `encrypted_content` holds, which clients return as it is.
_THOUGHT, _SUMMARY = "thought:", "summary:"


@dataclass(frozen=True)
class ToolName:
    """The client's name and kind of a function of the chat; filled by `_ToolList`."""

    kind: str  # function or custom
    name: str
    namespace: str | None = None


@dataclass(frozen=True)
class ResponsesReply:
    """The data besides the output that a response is made from; filled by `translate`."""

    response_id: str
    fields: dict[str, Any]  # of the request, which the response repeats
    tools: Mapping[str, ToolName]
    summarises: bool = False  # thoughts are shown as summaries
    encrypts: bool = False  # thoughts come with `encrypted_content`
    input_items: bytes | None = None  # JSON of the items before, to be stored; None: not stored
    is_background: bool = False  # the client does not wait for the answer
    wants_stream: bool = False  # of a background response: the client reads its events as they come
    conversation: str = ""  # id of the one that gets `new_items` and the output; empty: none
    new_items: bytes = b""  # JSON of the items that were sent


def translate(body: ResponsesRequest, context: Context) -> Translation:
    """Returns the chat request for a Responses request.

    Raises:
        ApiError: 400 for what cannot be done; 404 for responses and items that are not stored.
    """
    _check_possible(body)
    before, sent = all_items(body, context)
    items = before + sent
    tools = _ToolList(context)
    tools.add(body.tools or (), "tools")
    for item in items:
        if isinstance(item, ToolsItem):
            tools.add(item.tools, "input")
    messages = messages_of(items, body.instructions, context)
    stores = body.store is not False and context.responses is not None and context.responses.keeps
    if body.background and not stores:
        message = "'background' needs a stored response: 'store' is false, or the server stores none"
        raise bad_request(message, "background", "unsupported_parameter")
    conversation = _conversation_id(body)
    reply = ResponsesReply(
        response_id=f"resp_{uuid.uuid4().hex}",
        fields=_repeated(body, stores),
        tools=tools.names,
        summarises=_wants_summary(body),
        encrypts="reasoning.encrypted_content" in (body.include or ()),
        input_items=_json(listed_items(items)) if stores else None,
        is_background=bool(body.background),
        wants_stream=bool(body.stream),
        conversation=conversation,
        new_items=_json(listed_items(sent)) if conversation else b"",
    )
    request = {
        "model": body.model,
        "messages": messages.finished(),
        **_sampling(body),
        "stream": True if body.background else body.stream,  # events are kept for later requests
        **tools.fields(body),
        **_format(body),
    }
    return Translation(without_none(request), NAMES, reply, texts=tools.texts)


def _check_possible(body: ResponsesRequest) -> None:
    """Raises ApiError 400 for fields that change the answer and are not implemented."""
    if body.prompt:
        raise bad_request(
            "'prompt' is not supported: send the input itself", "prompt", "unsupported_parameter"
        )
    if body.conversation is not None and body.previous_response_id is not None:
        message = "'conversation' and 'previous_response_id' exclude each other"
        raise bad_request(message, "conversation", "mutually_exclusive_parameters")


def _conversation_id(body: ResponsesRequest) -> str:
    given = body.conversation
    return "" if given is None else given if isinstance(given, str) else given.id


def messages_of(items: Iterable[Any], instructions: str | None, context: Context) -> MessageList:
    """Returns a chat's messages for the items of a conversation. Raises ApiError 400 if there are none."""
    messages = MessageList()
    if instructions:
        messages.system(instructions)
    for number, item in enumerate(items):
        _add_item(messages, item, f"input[{number}]", context)
    if not messages.messages:
        raise bad_request("'input' has no message", "input")
    return messages


def translate_items(body: ConversationRequest, context: Context) -> Translation:
    """Returns the items of a request about a conversation, each with an id, and what is noted of it."""
    items = body.items or []
    if len(items) > MOST_ITEMS:
        raise bad_request(f"'items' has {len(items)} items; at most {MOST_ITEMS} are allowed", "items")
    resolved = [_referenced(one.id, context) if isinstance(one, ReferenceItem) else one for one in items]
    return Translation({}, answer={"items": listed_items(resolved), "metadata": body.metadata or {}})


def _wants_summary(body: ResponsesRequest) -> bool:
    reasoning = body.reasoning
    asked = None if reasoning is None else reasoning.summary or reasoning.generate_summary
    return asked not in (None, "none")


def all_items(body: ResponsesRequest | CompactRequest, context: Context) -> tuple[list[Any], list[Any]]:
    """Returns the conversation's items: stored ones, and those sent, with references resolved."""
    sent = body.input or []
    if isinstance(sent, str):
        sent = [MessageItem(role="user", content=sent)]
    before: list[Any] = []
    if body.previous_response_id is not None:
        before = _former_items(body.previous_response_id, context)
    elif isinstance(body, ResponsesRequest) and body.conversation is not None:
        if context.responses is None:
            raise not_found("conversation", "", "conversation", "conversation_not_found")
        before = _read_items(Conversations(context.responses).items(_conversation_id(body)))
    return before, [
        _referenced(item.id, context) if isinstance(item, ReferenceItem) else item for item in sent
    ]


def _former_items(response_id: str, context: Context) -> list[Any]:
    """Returns the conversation up to the end of a stored response. Raises ApiError 404 when it is gone."""
    found = None if context.responses is None else context.responses.find(response_id)
    if found is None:
        raise not_found(
            "previous response", response_id, "previous_response_id", "previous_response_not_found"
        )
    return _read_items(found.items())


def _referenced(item_id: str, context: Context) -> Any:
    """Returns the output item with this id, which contains its response's id."""
    response_id = f"resp_{item_id.partition('_')[2].partition('_')[0]}"
    found = None if context.responses is None else context.responses.find(response_id)
    items = [] if found is None else [item for item in found.response["output"] if item["id"] == item_id]
    if not items:
        raise not_found("item", item_id, "input", "item_not_found")
    return _read_items(items)[0]


def _read_items(items: list[dict[str, Any]]) -> list[Any]:
    try:
        return ITEMS.validate_python(items)
    except ValidationError as error:  # written by another version
        message = f"a stored response cannot be read: {error.error_count()} errors"
        raise bad_request(message, "input") from None


def _json(items: list[dict[str, Any]]) -> bytes:
    return json.dumps(items, ensure_ascii=False).encode()


def listed_items(items: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns the items as clients get them, each with an id."""
    listed = []
    for item in items:
        value = item.model_dump(exclude_none=True, by_alias=True)
        if value.get("type") == "message" and isinstance(value["content"], str):
            kind = "output_text" if value["role"] == "assistant" else "input_text"
            value["content"] = [{"type": kind, "text": value["content"]}]
        value.setdefault("id", f"item_{uuid.uuid4().hex}")
        listed.append(value)
    return listed


def _add_item(messages: MessageList, item: Any, place: str, context: Context) -> None:
    match item:
        case MessageItem():
            _add_message(messages, item, place, context)
        case AgentItem():
            parts = _parts(item.content, f"{place}.content", context)
            if parts:
                messages.user([text_part(f"[{item.author}]"), *parts])
        case ReasoningItem():
            thought = _thought(item)
            if thought:
                messages.reasoning(thought)
        case CallItem():
            messages.call(item.call_id, _function_name(item.name, item.namespace), item.arguments)
        case CustomCallItem():
            name = _function_name(item.name, item.namespace)
            messages.call(item.call_id, name, {INPUT: item.input})
        case OutputItem():
            messages.result(item.call_id, _parts(item.output, place, context))
        case CompactionItem():
            summary = _decrypted(item.encrypted_content, _SUMMARY)
            if summary is None:
                context.leave_out("input[].compaction", place)
            else:
                messages.user([text_part(f"{_SUMMARY_OF}\n\n{summary}")])
        case ToolsItem():
            pass  # taken together with the request's tools
        case _:
            context.leave_out(f"input[].{item.type}", place)


_SUMMARY_OF = "The conversation before this point was reduced to this summary:"


def _add_message(messages: MessageList, item: MessageItem, place: str, context: Context) -> None:
    parts = _parts(item.content, f"{place}.content", context)
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    if item.role == "user":
        messages.user(parts)
    elif item.role == "assistant":
        messages.answer(text)
    elif text:
        messages.system(text, item.role)


def _parts(content: str | list[Any], place: str, context: Context) -> list[dict[str, Any]]:
    """Returns text and images as a chat's parts. Raises ApiError 400 for files."""
    if isinstance(content, str):
        return [text_part(content)]
    parts: list[dict[str, Any]] = []
    for part in content:
        match part:
            case TextPart():
                parts.append(text_part(part.words()))
            case ImagePart() if part.image_url is not None:
                parts.append(image_part(part.image_url, part.detail))
            case ImagePart() | FilePart():
                raise bad_request(
                    f"'{place}' has a part of type {part.type!r} that cannot be read: send images by "
                    "'image_url', files as text",
                    place,
                    "unsupported_parameter",
                )
            case _:
                context.leave_out(f"input[].content[].{part.type}", place)
    return parts


def encrypted(thought: str) -> str:
    """Returns a thought as `encrypted_content`; it is encoded, not secret."""
    return base64.b64encode(f"{_THOUGHT}{thought}".encode()).decode()


def encrypted_summary(summary: str) -> str:
    """Returns the summary of a conversation as `encrypted_content`; it is encoded, not secret."""
    return base64.b64encode(f"{_SUMMARY}{summary}".encode()).decode()


def _decrypted(content: str | None, kind: str) -> str | None:
    """Returns the text of this kind in `encrypted_content`; None: another server's, or of another kind."""
    try:
        decoded = base64.b64decode(content or "", validate=True).decode()
    except ValueError:
        return None
    return decoded.removeprefix(kind) if decoded.startswith(kind) else None


def _thought(item: ReasoningItem) -> str:
    """Returns the text of an earlier thought, from whichever field has it."""
    thought = _decrypted(item.encrypted_content, _THOUGHT)
    if thought is not None:
        return thought
    parts = item.content or item.summary
    return "\n".join(part.words() for part in parts if isinstance(part, TextPart))


def _function_name(name: str, namespace: str | None) -> str:
    """Returns a tool's name in the chat; the namespace is a part of it, to keep names apart."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


class _ToolList:
    """Collects the tools that the model can call, as the chat API has them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tools: list[dict[str, Any]] = []
        self.names: dict[str, ToolName] = {}
        self.texts: dict[str, tuple[str, str]] = {}

    def add(self, tools: Iterable[Any], param: str, namespace: NamespaceTool | None = None) -> None:
        """Adds tools; those that OpenAI's servers run themselves are ignored."""
        prefix = None if namespace is None else namespace.name
        for tool in tools:
            match tool:
                case FunctionTool():
                    self._take("function", tool, tool.description, tool.parameters, prefix, tool.strict)
                case CustomTool():
                    self._take("custom", tool, _described(tool), _INPUT_SCHEMA, prefix)
                    if tool.format is not None and tool.format.type == "grammar":
                        name = _function_name(tool.name, prefix)
                        self.texts[name] = (str(tool.format.syntax), str(tool.format.definition))
                case NamespaceTool():
                    self.add(tool.tools, param, tool)
                case _:
                    self._context.leave_out(f"tools[].{tool.type}", param)

    def _take(
        self,
        kind: str,
        tool: FunctionTool | CustomTool,
        description: str | None,
        schema: Mapping[str, Any] | None,
        namespace: str | None,
        strict: bool | None = None,
    ) -> None:
        name = _function_name(tool.name, namespace)
        self.names[name] = ToolName(kind, tool.name, namespace)
        self._tools.append(function_tool(name, description, schema, strict))

    def fields(self, body: ResponsesRequest) -> dict[str, Any]:
        """Returns the chat's fields about tools.

        Raises:
            ApiError: 400; the choice is of a tool that cannot be called.
        """
        choice = body.tool_choice
        wanted = None if choice is None else self._choice(choice)
        if not self._tools:
            if wanted not in (None, "auto", "none"):
                raise bad_request("'tool_choice' asks for a tool, but there are none to call", "tool_choice")
            return {}
        return without_none(
            {"tools": self._tools, "tool_choice": wanted, "parallel_tool_calls": body.parallel_tool_calls}
        )

    def _choice(self, choice: str | dict[str, Any]) -> Any:
        if isinstance(choice, str):
            return choice
        kind, listed = choice.get("type"), choice.get("tools")
        if kind in ("function", "custom"):
            return self._named(choice)
        if kind == "allowed_tools" and isinstance(listed, list):
            allowed = [
                self._named(tool)
                for tool in listed
                if isinstance(tool, dict) and tool.get("type") in ("function", "custom")
            ]
            mode = choice.get("mode", "auto")
            return {"type": kind, "allowed_tools": {"mode": mode, "tools": allowed}} if allowed else "none"
        raise bad_request(
            f"'tool_choice' of type {str(kind)[:100]!r} is not supported: it is auto, required, none, or an "
            "object of type function, custom or allowed_tools",
            "tool_choice",
            "unsupported_parameter",
        )

    def _named(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        name, namespace = choice.get("name"), choice.get("namespace")
        joined = _function_name(str(name), namespace if isinstance(namespace, str) else None)
        if joined not in self.names:
            raise bad_request(
                f"'tool_choice' names the tool {joined[:100]!r}, which is not one of 'tools'", "tool_choice"
            )
        return {"type": "function", "function": {"name": joined}}


_INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


def _described(tool: CustomTool) -> str:
    """Returns the prompt's description of a tool that takes text."""
    given = tool.format
    words = [tool.description or "", f"The tool takes free text, which goes into {INPUT!r}."]
    if given is not None and given.type == "grammar":
        words.append(f"The text follows this grammar ({given.syntax}):\n{given.definition}")
    return "\n\n".join(word for word in words if word)


def _sampling(body: ResponsesRequest) -> dict[str, Any]:
    names = (
        "temperature",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "chat_template_kwargs",
        "priority",
        "cache_salt",
        "keep_prefix_s",
        "prompt_cache_retention",
        "stream",
        "user",
    )
    wants_logprobs = "message.output_text.logprobs" in (body.include or ()) or body.top_logprobs
    return {
        **{name: getattr(body, name) for name in names},
        "top_p": body.top_p or None,  # 0 means greedy; the chat API does not accept it
        "max_tokens": body.max_output_tokens,
        "logprobs": True if wants_logprobs else None,
        "top_logprobs": body.top_logprobs or None,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }


def _format(body: ResponsesRequest) -> dict[str, Any]:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    schema = {
        "name": wanted.name or "answer",
        "description": wanted.description,
        "schema": wanted.schema_,
        "strict": wanted.strict,
    }
    return {"response_format": {"type": "json_schema", "json_schema": without_none(schema)}}


def _repeated(body: ResponsesRequest, stores: bool) -> dict[str, Any]:
    """Returns the request's fields that the response repeats."""

    def dumped(value: Any) -> Any:
        return value.model_dump(exclude_none=True, by_alias=True)

    text = {"format": {"type": "text"}} if body.text is None else dumped(body.text)
    text.setdefault("format", {"type": "text"})
    reasoning = body.reasoning
    return {
        "background": bool(body.background),
        "conversation": {"id": _conversation_id(body)} if body.conversation is not None else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier or "default",
        "store": stores,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": text,
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [dumped(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
