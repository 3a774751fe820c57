"""The result of all APIs' translations, and what they share: messages of a chat, tools and images.

A translation runs in a prompt process. It turns a validated body into a chat request's JSON, and the data
that the API's format needs later, in the gateway.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.apis.stored_responses import ResponseStore
from gateway.generation.model import ServedModel
from gateway.schemas.common import JsonError, Tolerance, parse_json
from gateway.schemas.errors import ApiError, bad_request
from gateway.schemas.native import LlamaSampling


@dataclass(frozen=True)
class Translation:
    """One request as a chat request; filled by an API's `translate`."""

    request: dict[str, Any]  # body of a chat request; of a text completion where `is_text`
    names: Mapping[str, str] = field(default_factory=dict)  # the API's parameter for each of the chat's
    reply: Any = None  # further data for the API's format; picklable
    # Reduces the output tokens asked for to the room there is, instead of refusing.
    fits_limit: bool = False
    is_text: bool = False
    # Syntax and definition of the grammars that texts for tools follow, by the tool's name in the chat.
    texts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    answer: dict[str, Any] | None = None  # JSON of what needs no engine; then there is no request

    def softened(self) -> Translation | None:
        """Returns a copy whose later instructions are the user's, for templates that refuse them, or None."""
        messages = self.request["messages"]
        later = [message["role"] in ("system", "developer") for message in messages[1:]]
        if not any(later):
            return None
        spoken = [
            {**message, "role": "user"} if is_later else message
            for message, is_later in zip(messages[1:], later, strict=True)
        ]
        return replace(self, request={**self.request, "messages": [messages[0], *spoken]})

    def named(self, error: ApiError) -> ApiError:
        """Returns an error about the chat request, with the parameter names of the API that was used."""
        if error.param is None:
            return error
        root = error.param.split(".")[0].split("[")[0]
        name = self.names.get(root)
        if name is None:
            return error
        # The place within a message is a different one in the body that was sent.
        message = error.message.replace(repr(error.param), repr(name)).replace(repr(root), repr(name))
        return ApiError(error.status, message, param=name, code=error.code, retry_after_s=error.retry_after_s)


@dataclass(frozen=True)
class Context:
    """Data that a translation may need besides the body; made by the request's preparation."""

    tolerance: Tolerance
    model: ServedModel
    responses: ResponseStore | None = None  # None: nothing is stored

    def leave_out(self, what: str, param: str) -> None:
        """Counts an ignored part of the body, named `what`. Raises ApiError 400 in strict mode."""
        if self.tolerance.strict:
            raise bad_request(
                f"{what[:100]} is not supported (strict_parameters)", param, "unsupported_parameter"
            )
        self.tolerance.ignored.add(what[:100])


class MessageList:
    """Builds a chat's messages from an API's items."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._shown: list[dict[str, Any]] = []  # images of tool results, not yet in a message

    def system(self, text: str, role: str = "system") -> None:
        """Adds instructions; leading ones become one message, which is all that most templates accept."""
        first = self.messages[0] if len(self.messages) == 1 else None
        if not self.messages:
            self.messages.append({"role": "system", "content": text})
        elif first is not None and first["role"] == "system":
            first["content"] = f"{first['content']}\n\n{text}"
        else:
            self._close_results()
            self.messages.append({"role": role, "content": text})

    def user(self, parts: Sequence[dict[str, Any]]) -> None:
        """Adds text and images of the user; consecutive ones become one message."""
        self._close_results()
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"] += parts
        else:
            self.messages.append({"role": "user", "content": list(parts)})

    def assistant(self) -> dict[str, Any]:
        """Returns the open message of the model; begins one after any other role's."""
        self._close_results()
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def reasoning(self, text: str) -> None:
        """Adds a thought; it begins a new message when the last one has text or calls."""
        message = self.assistant()
        if "content" in message or "tool_calls" in message:
            message = self.new_assistant()
        message["reasoning_content"] = _joined(message.get("reasoning_content"), text)

    def new_assistant(self) -> dict[str, Any]:
        """Begins a further message of the model and returns it."""
        self._close_results()
        self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def answer(self, text: str) -> None:
        """Adds text of the model; it begins a new message when the last one has called tools."""
        message = self.assistant()
        if "tool_calls" in message:
            message = self.new_assistant()
        message["content"] = _joined(message.get("content"), text)

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        """Adds a tool call; `arguments`: an object, or the text that should have been one."""
        function = {"name": name, "arguments": call_arguments(arguments)}
        calls = self.assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, parts: Sequence[dict[str, Any]]) -> None:
        """Adds a tool's result. Templates show text in such messages; images follow as the user's."""
        texts = [part["text"] for part in parts if part["type"] == "text"]
        self._shown += [part for part in parts if part["type"] != "text"]
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)})

    def _close_results(self) -> None:
        shown, self._shown = self._shown, []
        if shown:
            self.messages.append({"role": "user", "content": shown})

    def finished(self) -> list[dict[str, Any]]:
        """Returns all messages, each with content; content of text alone is one string."""
        self._close_results()
        for message in self.messages:
            message.setdefault("content", "")
            if isinstance(message["content"], list) and all("text" in part for part in message["content"]):
                message["content"] = "\n".join(part["text"] for part in message["content"])
        return self.messages


def _joined(before: str | None, text: str) -> str:
    return text if not before else f"{before}\n{text}"


def call_arguments(arguments: Any) -> dict[str, Any]:
    """Returns a call's arguments as an object; text that is not one, as models write it, stays text."""
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except JsonError:
            return {"arguments": arguments}
    return arguments if isinstance(arguments, dict) else {"arguments": json.dumps(arguments)}


def text_part(text: str) -> dict[str, Any]:
    """Returns a text part of a chat's message."""
    return {"type": "text", "text": text}


def image_part(url: str, detail: str | None = None) -> dict[str, Any]:
    """Returns an image part of a chat's message; unknown details become the image's own."""
    image = {"url": url} if detail not in ("auto", "high", "low") else {"url": url, "detail": detail}
    return {"type": "image_url", "image_url": image}


def base64_image(media_type: str, data: str) -> dict[str, Any]:
    """Returns an image part with the image's bytes as a data URL."""
    return image_part(f"data:{media_type};base64,{data}")


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None = None
) -> dict[str, Any]:
    """Returns a tool as a chat has it."""
    function: dict[str, Any] = {
        "name": name,
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    if description:
        function["description"] = description
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def named_choice(name: str, tools: Sequence[Mapping[str, Any]], param: str = "tool_choice") -> dict[str, Any]:
    """Returns the choice of one tool. Raises ApiError 400 when there is no such tool."""
    if not any(tool["function"]["name"] == name for tool in tools):
        raise bad_request(f"{param!r} names the tool {name!r:.100}, which is not one of 'tools'", param)
    return {"type": "function", "function": {"name": name}}


def llama_sampling(options: LlamaSampling) -> dict[str, Any]:
    """Returns the sampling fields of the chat API that llama-server's options mean."""
    return {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p or None,  # 0 means greedy; the chat API does not accept it
        "min_p": options.min_p,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "seed": None if options.seed == -1 else options.seed,
        "stop": options.stop or None,
    }


def without_none(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that are set."""
    return {key: item for key, item in value.items() if item is not None}
