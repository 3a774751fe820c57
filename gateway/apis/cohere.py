"""Cohere's chat: the translation of its requests, its message, and the events that stream it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from gateway.apis.formats import Output, ResponseFormat, Usage
from gateway.apis.parts import Part, PartList, PartStep, parts_of
from gateway.apis.translation import (
    Context,
    MessageList,
    Translation,
    image_part,
    text_part,
    without_none,
)
from gateway.parsers.events import Finish, ParsedDelta
from gateway.schemas.cohere import CohereChatRequest, CohereMessage, CoherePart
from gateway.schemas.errors import ApiError, bad_request
from gateway.transport.streaming import typed_event

_NAMES = {
    "stop": "stop_sequences",
    "top_k": "k",
    "top_p": "p",
    "thinking_token_budget": "thinking.token_budget",
}
_CHOICES = {"REQUIRED": "required", "NONE": "none"}
_REASONS = {"stop": "COMPLETE", "length": "MAX_TOKENS", "tool_calls": "TOOL_CALL"}


def translate(body: CohereChatRequest, context: Context) -> Translation:
    """Returns the chat request for Cohere's chat.

    Raises:
        ApiError: 400; a part or a tool's result lacks what its type needs.
    """
    messages = MessageList()
    for number, message in enumerate(body.messages):
        _add_message(messages, message, f"messages[{number}]")
    request = {
        "model": body.model,
        "messages": messages.finished(),
        "tools": _tools(body),
        "tool_choice": _CHOICES[body.tool_choice] if body.tool_choice is not None else None,
        "documents": [_document(one) for one in body.documents] if body.documents else None,
        "response_format": _response_format(body),
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "temperature": body.temperature,
        "seed": body.seed,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "top_k": body.k or None,
        "top_p": body.p,
        "stream": body.stream,
        "priority": body.priority,
        **_thinking(body, context),
    }
    return Translation(without_none(request), _NAMES, fits_limit=True)


def _add_message(messages: MessageList, message: CohereMessage, place: str) -> None:
    parts = _parts(message, place)
    if message.role == "tool":
        if message.tool_call_id is None:
            raise bad_request(f"{place} needs 'tool_call_id'", f"{place}.tool_call_id")
        messages.result(message.tool_call_id, parts)
    elif message.role == "user":
        messages.user(parts)
    elif message.role == "assistant":
        thought = [message.tool_plan or "", *(part["thinking"] for part in parts if "thinking" in part)]
        if any(thought):
            messages.reasoning("\n".join(filter(None, thought)))
        for part in parts:
            if "text" in part:
                messages.answer(part["text"])
        for call in message.tool_calls or ():
            messages.call(call.id, call.function.name, call.function.arguments)
    else:
        messages.system("\n".join(part["text"] for part in parts if "text" in part))


def _parts(message: CohereMessage, place: str) -> list[dict[str, Any]]:
    """Returns the parts of a message as a chat has them; thoughts as objects with `thinking`."""
    if message.content is None or isinstance(message.content, str):
        return [text_part(message.content)] if message.content else []
    return [_part(part, f"{place}.content[{at}]") for at, part in enumerate(message.content)]


def _part(part: CoherePart, place: str) -> dict[str, Any]:
    held = getattr(part, part.type)
    if held is None:
        raise bad_request(f"{place} of type {part.type!r} needs {part.type!r}", f"{place}.{part.type}")
    if part.type == "image_url":
        return image_part(held.url, held.detail)
    if part.type == "document":
        return text_part(held.data if isinstance(held.data, str) else json.dumps(held.data))
    return text_part(held) if part.type == "text" else {"type": "thinking", "thinking": held}


def _tools(body: CohereChatRequest) -> list[dict[str, Any]] | None:
    if not body.strict_tools:
        return body.tools or None
    return [
        {**tool, "function": {**tool["function"], "strict": True}}
        if isinstance(tool.get("function"), dict)
        else tool
        for tool in body.tools or ()
    ] or None


def _document(document: str | dict[str, Any]) -> dict[str, Any]:
    """Returns a document as chat templates take them."""
    if isinstance(document, str):
        return {"text": document}
    data = document.get("data")
    return {**document, **(data if isinstance(data, dict) else {"text": data})} if data else document


def _response_format(body: CohereChatRequest) -> dict[str, Any] | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return {"type": "json_object"}
    schema = {"name": "answer", "schema": wanted.json_schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _thinking(body: CohereChatRequest, context: Context) -> dict[str, Any]:
    """Returns the chat's thinking fields; templates name the switch differently."""
    asked = body.thinking
    if asked is None:
        return {}
    on = asked.type == "enabled"
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": on, "thinking": on}}
    # A budget is no error for a model that does not think.
    if on and asked.token_budget is not None and context.model.reasoning_parser is not None:
        fields["thinking_token_budget"] = asked.token_budget
    return fields


class CohereChatFormat(ResponseFormat):
    """Builds one message of content and tool calls, or the events that stream it."""

    operation = "chat"

    def __init__(self) -> None:
        self.id = str(uuid.uuid4())
        self._parts = PartList()
        self._places: dict[int, int] = {}  # of parts in the stream: their index among those of their list
        self._finish: Finish | None = None
        self._has_begun = False

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Returns the whole message."""
        parts = parts_of(outputs[0])
        content = [{**_opened(part), _FIELDS[part.kind]: part.text} for part in parts if _is_content(part)]
        calls = [_called(part, part.text) for part in parts if not _is_content(part)]
        message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        return {"id": self.id, "message": message, **_ending(outputs[0].finish, usage)}

    def stream_delta(self, delta: ParsedDelta, usage: Callable[[], Usage]) -> bytes:
        """Returns the message's start before the first content, then the events of its parts."""
        self._finish = delta.finish or self._finish
        return self._opening() + b"".join(map(self._step, self._parts.feed(delta.events)))

    def stream_end(self, usage: Usage) -> bytes:
        """Returns the events that end the last part and the message."""
        steps = b"".join(map(self._step, self._parts.end()))
        return self._opening() + steps + typed_event("message-end", {"delta": _ending(self._finish, usage)})

    def stream_failure(self, error: ApiError) -> bytes:
        """Returns the message's end, which says why it failed."""
        ending = {"finish_reason": "ERROR", "error": error.message}
        return self._opening() + typed_event("message-end", {"delta": ending})

    def _opening(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
        return typed_event("message-start", {"id": self.id, "delta": {"message": message}})

    def _step(self, step: PartStep) -> bytes:
        part, is_content = step.part, _is_content(step.part)
        if step.what == "start":
            alike = [one for one in self._parts.parts[: part.number] if _is_content(one) == is_content]
            self._places[part.number] = len(alike)
        index = {"index": self._places[part.number]}
        name = "content" if is_content else "tool-call"
        if step.what == "end":
            return typed_event(f"{name}-end", index)
        if is_content:
            shown = _opened(part) if step.what == "start" else {_FIELDS[part.kind]: step.text}
            message: dict[str, Any] = {"content": shown}
        else:
            arguments = {"function": {"arguments": step.text}}
            message = {"tool_calls": _called(part, "") if step.what == "start" else arguments}
        what = "start" if step.what == "start" else "delta"
        return typed_event(f"{name}-{what}", {**index, "delta": {"message": message}})


_FIELDS = {"content": "text", "reasoning": "thinking"}


def _is_content(part: Part) -> bool:
    return part.kind != "tool_call"


def _opened(part: Part) -> dict[str, Any]:
    """Returns a part of the content as it is when it begins."""
    name = _FIELDS[part.kind]
    return {"type": name, name: ""}


def _called(part: Part, arguments: str) -> dict[str, Any]:
    function = {"name": part.name, "arguments": arguments}
    return {"id": part.call_id, "type": "function", "function": function}


def _ending(finish: Finish | None, usage: Usage) -> dict[str, Any]:
    """Returns why the message ended, and its counts."""
    reason = "stop" if finish is None else finish.reason
    is_stopped = finish is not None and reason == "stop" and isinstance(finish.stop_reason, str)
    counts = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    return {
        "finish_reason": "STOP_SEQUENCE" if is_stopped else _REASONS.get(reason, "COMPLETE"),
        "usage": {"billed_units": counts, "tokens": counts, "cached_tokens": usage.cached_tokens},
    }
