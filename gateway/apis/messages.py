"""Anthropic's Messages: translates a request to a chat request, and builds the message that answers it."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.apis.formats import Output, ResponseFormat, Usage
from gateway.apis.parts import Part, PartList, PartStep, parts_of
from gateway.apis.translation import (
    Context,
    MessageList,
    Translation,
    base64_image,
    function_tool,
    image_part,
    named_choice,
    text_part,
    without_none,
)
from gateway.generation.model import ServedModel
from gateway.parsers.events import Finish, ParsedDelta
from gateway.schemas.common import MAX_LABEL_CHARACTERS
from gateway.schemas.errors import THREAD_UNSUPPORTED, ApiError, anthropic_error, bad_request
from gateway.schemas.messages import (
    AnthropicMessage,
    AnthropicTool,
    Block,
    CacheControl,
    ContentBlock,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    MessagesRequest,
    OtherBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from gateway.transport.streaming import typed_event

# The chat's parameters, with the API's parameter for each.
NAMES = {
    "max_tokens": "max_tokens",
    "messages": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "user": "metadata.user_id",
}
_FIVE_MINUTES_S = 300
# Claude Code's first system block differs from request to request and is meant for its own servers: with
# it no two requests would have a prefix in common.
_BILLING = "x-anthropic-billing-header:"


@dataclass(frozen=True)
class MessagesReply:
    """The data besides the output that a message is made from; filled by `translate`."""

    # The name that was asked for: Claude Code gives thoughts back to a model of the same name only.
    model: str
    context_length: int  # of the model, tokens
    hides_thinking: bool = False
    kept_s: int = 0  # for how long the prefix outlives others, seconds


def translate(body: CountTokensRequest, context: Context) -> Translation:
    """Returns the chat request for a body of either path."""
    if body.thread is not None:
        # Ignoring it would drop a conversation's history. Clients then send all of it.
        raise bad_request(
            "conversations are not kept here: send all messages, without 'thread'",
            "thread",
            THREAD_UNSUPPORTED,
        )
    messages = MessageList()
    for text in _system_texts(body):
        messages.system(text)
    for number, message in enumerate(body.messages):
        _add_message(messages, message, f"messages[{number}]", context)
    request: dict[str, Any] = {
        "model": body.model,
        "messages": messages.finished(),
        **_tools(body, context),
        **_thinking(body, context.model),
        **_format(body),
    }
    last = body.messages[-1]
    if last.role == "assistant" and "tool_calls" not in messages.messages[-1]:
        request |= {"continue_final_message": True, "add_generation_prompt": False}
    kept_s = 0
    if isinstance(body, MessagesRequest):
        kept_s = _kept_s(body)
        request |= _sampling(body) | {"keep_prefix_s": kept_s or None}
    hides = body.thinking is not None and body.thinking.display == "omitted"
    reply = MessagesReply(body.model, context.model.max_context_length, hides, kept_s)
    return Translation(without_none(request), NAMES, reply, fits_limit=True)


def _kept_s(body: MessagesRequest) -> int:
    """Returns the longest time that any `cache_control` asks for, seconds; 0: there is none.

    All of the prompt is kept, not what precedes the mark only: the next request begins with all of it.
    """
    controls = [body.cache_control, *(tool.cache_control for tool in body.tools or ())]
    for blocks in (body.system, *(message.content for message in body.messages)):
        controls += _cache_controls(blocks)
    return max((control.seconds for control in controls if control is not None), default=0)


def _cache_controls(blocks: Any) -> Iterator[CacheControl | None]:
    for block in blocks if isinstance(blocks, list) else ():
        if isinstance(block, Block):
            yield block.cache_control
            yield from _cache_controls(getattr(block, "content", None))


def _system_texts(body: CountTokensRequest) -> list[str]:
    if isinstance(body.system, str):
        return [body.system] if body.system else []
    texts = [block.text for block in body.system or ()]
    return [text for text in texts if text and not text.startswith(_BILLING)]


def _add_message(messages: MessageList, message: AnthropicMessage, place: str, context: Context) -> None:
    content = message.content
    blocks: Sequence[Any] = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
    if message.role == "assistant":
        _add_answer(messages, blocks, place, context)
        return
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            messages.result(block.tool_use_id, _result_parts(block, place, context))
    parts = _parts([one for one in blocks if not isinstance(one, ToolResultBlock)], place, context)
    if message.role == "system":
        messages.system("\n".join(part.get("text", "") for part in parts))
    elif parts or not blocks:
        messages.user(parts)


def _add_answer(messages: MessageList, blocks: Sequence[ContentBlock], place: str, context: Context) -> None:
    messages.new_assistant()
    for block in blocks:
        match block:
            case TextBlock():
                messages.answer(block.text)
            case ThinkingBlock():
                thought = block.thinking or _signed(block.signature or "")
                if thought:
                    messages.reasoning(thought)
            case ToolUseBlock():
                messages.call(block.id, block.name, block.input)
            case _:
                context.leave_out(f"messages[].content[].{block.type}", place)


def _result_parts(block: ToolResultBlock, place: str, context: Context) -> list[dict[str, Any]]:
    content = block.content or ""
    parts = [text_part(content)] if isinstance(content, str) else _parts(content, place, context)
    if block.is_error:  # chat templates have no other place for it
        parts.insert(0, text_part("Error:"))
    return parts


def _parts(blocks: Iterable[Any], place: str, context: Context) -> list[dict[str, Any]]:
    """Returns a user's or a tool result's blocks as a chat's parts."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case TextBlock():
                parts.append(text_part(block.text))
            case ImageBlock():
                parts.append(_image(block, place))
            case DocumentBlock():
                parts.append(text_part(_document(block)))
            case SearchResultBlock():
                texts = [block.title, block.source, *(one.text for one in block.content)]
                parts.append(text_part("\n".join(texts)))
            case OtherBlock():
                context.leave_out(f"messages[].content[].{block.type}", f"{place}.content")
            case _:  # a thought or a call, which are the model's
                raise bad_request(
                    f"a block of type {block.type!r} belongs to the assistant, not into '{place}'", place
                )
    return parts


def _image(block: ImageBlock, place: str) -> dict[str, Any]:
    source = block.source
    if source.type == "base64" and source.data is not None and source.media_type is not None:
        return base64_image(source.media_type, source.data)
    if source.type == "url" and source.url is not None:
        return image_part(source.url)
    needs = "'data' and 'media_type'" if source.type == "base64" else "'url'"
    raise bad_request(f"an image's source of type {source.type!r} needs {needs}", f"{place}.content")


def _document(block: DocumentBlock) -> str:
    source = block.source
    content = source.data if source.type == "text" else source.content
    if isinstance(content, list):
        content = "\n".join(one.text for one in content)
    return "\n".join(text for text in (block.title, block.context, content) if text)


def _is_own(tool: AnthropicTool) -> bool:
    """Returns whether the body describes the tool: Anthropic's own tools have a type instead."""
    return tool.type in (None, "custom")


def _tools(body: CountTokensRequest, context: Context) -> dict[str, Any]:
    tools = []
    for number, tool in enumerate(body.tools or ()):
        if not _is_own(tool):
            context.leave_out(f"tools[].{tool.type}", f"tools[{number}].type")
            continue
        if not tool.name:
            raise bad_request(f"missing required parameter: 'tools[{number}].name'", f"tools[{number}].name")
        tools.append(function_tool(tool.name, tool.description, tool.input_schema, tool.strict))
    choice = body.tool_choice
    if not tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise bad_request("'tool_choice' asks for a tool, but there are none to call", "tool_choice")
        return {}
    fields: dict[str, Any] = {"tools": tools}
    if choice is not None:
        names: dict[str, Any] = {"auto": "auto", "none": "none", "any": "required"}
        wanted = choice.name or ""
        fields["tool_choice"] = named_choice(wanted, tools) if choice.type == "tool" else names[choice.type]
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    return fields


def _thinking(body: CountTokensRequest, model: ServedModel) -> dict[str, Any]:
    """Returns the chat's thinking fields; templates name the switch differently, and it defaults to off."""
    asked = body.thinking
    effort = body.output_config.effort if body.output_config is not None else None
    on = asked is not None and asked.type != "disabled"
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": on, "thinking": on}}
    if on and effort is not None:
        fields["reasoning_effort"] = effort
    # The budget is no error for a model that does not think: agents always send one.
    budget = None if asked is None or asked.type != "enabled" else asked.budget_tokens
    if budget is not None and model.reasoning_parser is not None:
        fields["thinking_token_budget"] = budget
    return fields


def _format(body: CountTokensRequest) -> dict[str, Any]:
    wanted = body.output_format or (body.output_config.format if body.output_config is not None else None)
    if wanted is None:
        return {}
    schema = {"name": "answer", "schema": wanted.schema_, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    user = body.metadata.user_id if body.metadata is not None else None
    return {
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p or None,  # 0 means greedy; the chat API does not accept it
        "stop": body.stop_sequences or None,
        "stream": body.stream,
        "user": None if user is None else user[:MAX_LABEL_CHARACTERS],
    }


# Signatures prove nothing here. Clients require one, and send back what it holds.
_SHOWN = "shown:"
_HIDDEN = "hidden:"


def signature(thought: str, hidden: bool = False) -> str:
    """Returns the signature of a thought; that of a hidden one contains the thought itself."""
    if hidden:
        return _HIDDEN + base64.b64encode(thought.encode()).decode()
    return _SHOWN + hashlib.sha256(thought.encode()).hexdigest()[:16]


def _signed(text: str) -> str:
    """Returns the thought in a hidden thought's signature, or an empty string if there is none."""
    if not text.startswith(_HIDDEN):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_HIDDEN), validate=True).decode()
    except ValueError:  # another server's
        return ""


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat(ResponseFormat):
    """Builds one message of content blocks, or the events that stream it."""

    operation = "chat"
    keep_alive = typed_event("ping", {})

    def __init__(self, request_id: str, reply: MessagesReply) -> None:
        """`request_id` is named in errors."""
        self.id = f"msg_{uuid.uuid4().hex}"
        self._request_id = request_id
        self._reply = reply
        self._parts = PartList()
        self._finish: Finish | None = None
        self._has_begun = False

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Returns the whole message."""
        blocks = [self._block(part) for part in parts_of(outputs[0])]
        return self._message(blocks, self._ending(outputs[0].finish, usage), usage)

    def stream_delta(self, delta: ParsedDelta, usage: Callable[[], Usage]) -> bytes:
        """Returns the message's start before the first content, then the events of its blocks."""
        data = b"" if self._has_begun else self._opening(usage())
        self._finish = delta.finish or self._finish
        steps = self._parts.feed(delta.events)
        return data + b"".join(map(self._step, steps))

    def stream_end(self, usage: Usage) -> bytes:
        """Returns the events that end the last block and the message."""
        data = b"" if self._has_begun else self._opening(usage)
        data += b"".join(map(self._step, self._parts.end()))
        data += typed_event(
            "message_delta", {"delta": self._ending(self._finish, usage), "usage": self._usage(usage)}
        )
        return data + typed_event("message_stop", {})

    def stream_failure(self, error: ApiError) -> bytes:
        """Returns the error event, which is the last one."""
        _, body = anthropic_error(error, self._request_id)
        return typed_event("error", {key: value for key, value in body.items() if key != "type"})

    def _opening(self, usage: Usage) -> bytes:
        self._has_begun = True
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return typed_event("message_start", {"message": message}) + self.keep_alive

    def _message(self, blocks: list[dict[str, Any]], ending: dict[str, Any], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._reply.model,
            "content": blocks,
            **ending,
            "usage": self._usage(usage),
        }

    def _ending(self, finish: Finish | None, usage: Usage) -> dict[str, Any]:
        """Returns the stop reason, and the stop sequence if there was one."""
        reason = "stop" if finish is None else finish.reason
        if finish is not None and reason == "stop" and isinstance(finish.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_reason}
        ending = _STOP_REASONS.get(reason, "end_turn")
        if reason == "length" and self._is_full(usage):
            ending = "model_context_window_exceeded"
        return {"stop_reason": ending, "stop_sequence": None}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """Returns token counts; Anthropic counts prompt tokens that were in the cache, and that are kept in
        it, apart from the others."""
        kept_s, computed = self._reply.kept_s, usage.prompt_tokens - usage.cached_tokens
        by_time = {
            "ephemeral_5m_input_tokens": computed if 0 < kept_s <= _FIVE_MINUTES_S else 0,
            "ephemeral_1h_input_tokens": computed if kept_s > _FIVE_MINUTES_S else 0,
        }
        return {
            "input_tokens": 0 if kept_s else computed,
            "cache_creation_input_tokens": computed if kept_s else 0,
            "cache_creation": by_time,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }

    def _is_full(self, usage: Usage) -> bool:
        return usage.prompt_tokens + usage.completion_tokens >= self._reply.context_length

    def _block(self, part: Part) -> dict[str, Any]:
        """Returns a complete content block."""
        block = _opened(part)
        if part.kind == "tool_call":
            block["input"] = part.arguments()
        elif part.kind == "content":
            block["text"] = part.text
        else:
            block["thinking"] = "" if self._reply.hides_thinking else part.text
            block["signature"] = signature(part.text, self._reply.hides_thinking)
        return block

    def _step(self, step: PartStep) -> bytes:
        part, index = step.part, step.part.number
        if step.what == "start":
            return typed_event("content_block_start", {"index": index, "content_block": _opened(part)})
        hidden = part.kind == "reasoning" and self._reply.hides_thinking
        if step.what == "text":
            kind, name = _DELTAS[part.kind]
            delta = {"type": kind, name: step.text}
            return b"" if hidden else typed_event("content_block_delta", {"index": index, "delta": delta})
        data = b""
        if part.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": signature(part.text, hidden)}
            data = typed_event("content_block_delta", {"index": index, "delta": delta})
        return data + typed_event("content_block_stop", {"index": index})


def _opened(part: Part) -> dict[str, Any]:
    """Returns the content block as it is when it begins."""
    if part.kind == "tool_call":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "tool_call": ("input_json_delta", "partial_json"),
}
