"""Ollama's API: the translation of its requests to chats, its streams of JSON lines, and its model's card."""

from __future__ import annotations

import datetime
import hashlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from gateway.apis.formats import Output, ResponseFormat, Usage
from gateway.apis.parts import Part, PartList, PartStep
from gateway.apis.translation import (
    Context,
    MessageList,
    Translation,
    base64_image,
    llama_sampling,
    text_part,
    without_none,
)
from gateway.generation.model import ServedModel
from gateway.generation.output import chat_logprobs
from gateway.parsers.events import Finish, ParsedDelta, TokenLogprob
from gateway.schemas.errors import ApiError, bad_request, ollama_error
from gateway.schemas.ollama import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaModelRequest,
    OllamaRequest,
    Options,
)
from gateway.text.tokenizer import Tokenizer
from moebius.durations import seconds_of

# The version whose API this is: clients query it, and refuse old ones.
VERSION = "0.20.0"
_LATEST = ":latest"
_UNLIMITED = 2**31  # output tokens, reduced to what fits in the context
NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "reasoning_effort": "think",
    **{name: f"options.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: f"options.{name}" for name in ("presence_penalty", "frequency_penalty")},
}


@dataclass(frozen=True)
class OllamaReply:
    """The data besides the output that an answer is made from; filled by the translations."""

    model: str  # as the request has it; repeated in the answer
    is_chat: bool
    keep_alive_s: float | None  # negative: for ever; None: not said


def translate_chat(body: OllamaChatRequest, context: Context) -> Translation:
    """Returns the chat request for an Ollama chat."""
    reply = OllamaReply(body.model, is_chat=True, keep_alive_s=keep_alive_s(body.keep_alive))
    if not body.messages:
        return _loaded(body, reply, context)
    messages = MessageList()
    calls = _CallIds()
    for message in body.messages:
        _add_message(messages, message, calls)
    request = {
        **_common(body),
        "messages": messages.finished(),
        "tools": body.tools or None,
        **_chat_only(body),
    }
    if body.messages[-1].role == "assistant" and not body.messages[-1].tool_calls:
        request |= {"continue_final_message": True, "add_generation_prompt": False}
    return Translation(without_none(request), NAMES, reply, fits_limit=True)


def translate_generate(body: OllamaGenerateRequest, context: Context) -> Translation:
    """Returns a chat request for a prompt, or a text completion for a raw one.

    Raises:
        ApiError: 400; a template was sent, or images with a raw prompt.
    """
    if body.template:
        raise bad_request("'template' is not supported: use 'raw'", "template", "unsupported_parameter")
    if body.context is not None:
        context.leave_out("context", "context")
    reply = OllamaReply(body.model, is_chat=False, keep_alive_s=keep_alive_s(body.keep_alive))
    if body.raw or body.suffix:
        return _raw(body, reply)
    if not body.prompt and not body.images:
        return _loaded(body, reply, context)
    messages = MessageList()
    if body.system:
        messages.system(body.system)
    messages.user([*_images(body.images), text_part(body.prompt)])
    request = {**_common(body), "messages": messages.finished(), **_chat_only(body)}
    return Translation(without_none(request), {**NAMES, "messages": "prompt"}, reply, fits_limit=True)


def _raw(body: OllamaGenerateRequest, reply: OllamaReply) -> Translation:
    if body.images:
        raise bad_request("a prompt that is raw or has a suffix takes no images", "images")
    request = {
        **_common(body),
        "prompt": body.prompt,
        "suffix": body.suffix or None,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    return Translation(without_none(request), NAMES, reply, fits_limit=True, is_text=True)


def _loaded(body: OllamaRequest, reply: OllamaReply, context: Context) -> Translation:
    """Returns the answer to a request without input, which only loads the model."""
    context.model.check_name(served_name(body.model))
    ending = {"done": True, "done_reason": "unload" if reply.keep_alive_s == 0 else "load"}
    return Translation({}, answer={**_line(reply, {"content": ""}), **ending})


def keep_alive_s(value: float | str | None) -> float | None:
    """Returns a duration in seconds; texts are numbers of seconds, or Go's, as 1h30m.

    Raises ApiError 400.
    """
    if not isinstance(value, str):
        return value
    try:
        return seconds_of(value)
    except ValueError as error:
        raise bad_request(f"'keep_alive': {error}", "keep_alive") from None


def served_name(name: str) -> str:
    """Returns the name without the tag `latest`."""
    return name.removesuffix(_LATEST)


class _CallIds:
    """Assigns ids to calls: Ollama's clients rarely send any, and send results in the order of the calls."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []  # name and id of calls without a result

    def call(self, name: str, given: str | None) -> str:
        """Returns the id of a call, `given` or a new one."""
        self._count += 1
        call_id = given or f"call_{self._count}"
        self._open.append((name, call_id))
        return call_id

    def result(self, message: OllamaMessage) -> str:
        """Returns the id of the call that a result answers: the first of its name, else the first."""
        if message.tool_call_id:
            return message.tool_call_id
        of_name = [one for one in self._open if one[0] == message.tool_name]
        found = next(iter(of_name or self._open), None)
        if found is None:
            return "call_0"
        self._open.remove(found)
        return found[1]


def _add_message(messages: MessageList, message: OllamaMessage, calls: _CallIds) -> None:
    text = message.content or ""
    parts = [*_images(message.images), *([text_part(text)] if text or not message.images else [])]
    if message.role == "system":
        messages.system(text)
    elif message.role == "user":
        messages.user(parts)
    elif message.role == "tool":
        messages.result(calls.result(message), parts)
    else:
        messages.new_assistant()
        if message.thinking:
            messages.reasoning(message.thinking)
        if text or not message.tool_calls:
            messages.answer(text)
        for call in message.tool_calls or ():
            name = call.function.name
            messages.call(calls.call(name, call.id), name, call.function.arguments)


def _images(images: list[str] | None) -> list[dict[str, Any]]:
    """Returns image parts for base64 data, whose type is detected from its bytes."""
    return [base64_image("image/*", data) for data in images or ()]


def _common(body: OllamaRequest) -> dict[str, Any]:
    options = body.options or Options.model_validate({})
    limit = options.num_predict
    return {
        "model": served_name(body.model),
        "max_tokens": limit if limit is not None and limit > 0 else _UNLIMITED,
        **llama_sampling(options),
        "stream": body.stream is not False,
        **_format(body.format),
    }


def _format(wanted: str | dict[str, Any] | None) -> dict[str, Any]:
    if not wanted:
        return {}
    if isinstance(wanted, dict):
        schema = {"name": "answer", "schema": wanted}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if wanted != "json":
        raise bad_request(f"'format' is json or a JSON schema, got {wanted[:100]!r}", "format")
    return {"response_format": {"type": "json_object"}}


def _chat_only(body: OllamaRequest) -> dict[str, Any]:
    think = body.think
    fields: dict[str, Any] = {
        "logprobs": body.logprobs or None,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
    }
    if isinstance(think, str):
        fields["reasoning_effort"] = think
    elif think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": think, "thinking": think}
    return fields


def _line(reply: OllamaReply, message: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that every object of an answer has; `message`: content, thinking and tool_calls."""
    now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
    line: dict[str, Any] = {"model": reply.model, "created_at": now}
    if reply.is_chat:
        return {**line, "message": {"role": "assistant", **message}}
    line["response"] = message["content"]
    return {**line, **({"thinking": message["thinking"]} if "thinking" in message else {})}


class OllamaFormat(ResponseFormat):
    """Builds lines of JSON, or one object; each call is one line."""

    media_type = "application/x-ndjson"

    def __init__(self, tokenizer: Tokenizer, logprobs: int | None, reply: OllamaReply) -> None:
        """`logprobs`: alternatives of each token; None: no log-probabilities."""
        self.id = f"ollama-{uuid.uuid4().hex}"
        self.operation = "chat" if reply.is_chat else "text_completion"
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._reply = reply
        self._parts = PartList()
        self._calls = 0
        self._finish: Finish | None = None
        # Clients read every line as JSON, so keep-alives are lines without content instead of comments.
        self.keep_alive = _ndjson({**_line(reply, {"content": ""}), "done": False})

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Returns the answer as one object."""
        output = outputs[0]
        self._finish = output.finish
        parts = PartList()
        for delta in output.deltas:
            parts.feed(delta.events)
        message: dict[str, Any] = {"content": output.text}
        if output.reasoning:
            message["thinking"] = output.reasoning
        calls = [self._call(part) for part in parts.parts if part.kind == "tool_call"]
        if calls:
            message["tool_calls"] = calls
        return {**_line(self._reply, message), **self._scores(output.logprobs), **self._ending(usage)}

    def stream_delta(self, delta: ParsedDelta, usage: Callable[[], Usage]) -> bytes:
        """Returns a line for each piece of text and each complete call."""
        self._finish = delta.finish or self._finish
        return b"".join(map(self._step, self._parts.feed(delta.events, delta.logprobs)))

    def stream_end(self, usage: Usage) -> bytes:
        """Returns the line of a call that ended last, and the line with the counts."""
        data = b"".join(map(self._step, self._parts.end()))
        return data + _ndjson({**_line(self._reply, {"content": ""}), **self._ending(usage)})

    def stream_failure(self, error: ApiError) -> bytes:
        """Returns the error, which is the last line."""
        return _ndjson(ollama_error(error))

    def _step(self, step: PartStep) -> bytes:
        part = step.part
        if part.kind == "tool_call":
            if step.what != "end":
                return b""
            return self._chunk({"content": "", "tool_calls": [self._call(part)]})
        if step.what != "text":
            return b""
        if part.kind == "reasoning":
            return self._chunk({"content": "", "thinking": step.text})
        return self._chunk({"content": step.text}, step.logprobs)

    def _chunk(self, message: dict[str, Any], logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        return _ndjson({**_line(self._reply, message), "done": False, **self._scores(logprobs)})

    def _call(self, part: Part) -> dict[str, Any]:
        function = {"index": self._calls, "name": part.name, "arguments": part.arguments()}
        self._calls += 1
        return {"id": part.call_id, "function": function}

    def _scores(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._logprobs is None or not logprobs:
            return {}
        return {"logprobs": chat_logprobs(self._tokenizer, logprobs, self._logprobs)["content"]}

    def _ending(self, usage: Usage) -> dict[str, Any]:
        """Returns the stop reason, token counts, and times in nanoseconds."""
        is_cut = self._finish is not None and self._finish.reason == "length"
        return {
            "done": True,
            "done_reason": "length" if is_cut else "stop",
            "total_duration": int(usage.total_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(usage.prompt_s * 1e9),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(max(usage.total_s - usage.prompt_s, 0) * 1e9),
        }


def _ndjson(value: dict[str, Any]) -> bytes:
    return to_json(value) + b"\n"


def card(model: ServedModel) -> dict[str, Any]:
    """Returns the entry of /api/tags; facts that are unknown are empty or 0."""
    name = model.name if ":" in model.name else model.name + _LATEST
    return {
        "name": name,
        "model": name,
        "modified_at": _time(model.created),
        "size": 0,
        "digest": hashlib.sha256(f"{model.name}\n{model.fingerprint or model.root}".encode()).hexdigest(),
        "details": _details(model),
    }


def running_card(model: ServedModel) -> dict[str, Any]:
    """Returns the entry of /api/ps; when it will sleep, only the engine knows."""
    never = _time(model.created + 100 * 365 * 86400)
    return {**card(model), "expires_at": never, "size_vram": 0, "context_length": model.max_context_length}


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _details(model: ServedModel) -> dict[str, Any]:
    family = model.model_type or "unknown"
    return {
        "parent_model": "",
        "format": "gguf" if model.root.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }


def translate_show(body: OllamaModelRequest, context: Context) -> Translation:
    """Returns the answer of /api/show: what the model can do, and how long its context is."""
    model = context.model
    model.check_name(served_name(body.model))
    template = model.tokenizer.chat_template
    family = model.model_type or "unknown"
    capabilities = {
        "completion": True,
        "tools": model.tool_parser is not None and template is not None and template.knows_tools,
        "thinking": model.reasoning_parser is not None,
        "vision": model.supports_vision,
    }
    defaults = "\n".join(f"{name} {value}" for name, value in sorted(model.defaults.items()))
    answer = {
        "modelfile": "",
        "parameters": defaults,
        "template": "" if template is None else template.source,
        "details": _details(model),
        "model_info": {
            "general.architecture": family,
            "general.basename": model.name,
            f"{family}.context_length": model.max_context_length,
            f"{family}.vocab_size": model.vocab_size,
        },
        "capabilities": [name for name, has in capabilities.items() if has],
        "modified_at": _time(model.created),
    }
    return Translation({}, answer=answer)


def translate_pull(body: OllamaModelRequest, context: Context) -> Translation:
    """Returns the answer of /api/pull: success for the served model, an error for any other."""
    context.model.check_name(served_name(body.model))
    return Translation({}, answer={"status": "success"})
