"""OpenAI's Responses: builds the object that answers a request, and the events that stream it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from gateway.apis.compaction import usage_of
from gateway.apis.conversations import Conversations
from gateway.apis.formats import Output, ResponseFormat, Usage
from gateway.apis.parts import Part, PartList, PartStep, parsed_arguments, well_formed
from gateway.apis.responses import INPUT, ResponsesReply, ToolName, encrypted
from gateway.apis.stored_responses import ResponseStore
from gateway.generation.output import chat_logprobs
from gateway.parsers.events import Finish, ParsedDelta, TokenLogprob
from gateway.schemas.errors import ApiError
from gateway.text.tokenizer import Tokenizer
from gateway.transport.streaming import event

logger = structlog.get_logger(__name__)
_ADDED = frozenset({"completed", "incomplete"})  # responses with these go into their conversation


class InputText:
    """Extracts a custom tool's text from the function's arguments, `{"input": "..."}`, as they arrive."""

    _START = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
    # A piece that can be decoded: it ends in no half of an escape and no half of a surrogate pair.
    _WHOLE = re.compile(
        r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
        r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*"
    )
    _LONGEST_START = 64
    _LONGEST_ESCAPE = 12

    def __init__(self) -> None:
        self._held = ""
        self._is_open = False
        self._has_ended = False
        self.given: list[str] = []

    def feed(self, arguments: str) -> str:
        """Returns the text that is certain after this piece."""
        if self._has_ended:
            return ""
        self._held += arguments
        if not self._is_open:
            start = self._START.match(self._held)
            if start is None:
                self._has_ended = len(self._held) > self._LONGEST_START  # `finish` gives all of it
                return ""
            self._is_open = True
            self._held = self._held[start.end() :]
        whole = self._WHOLE.match(self._held)
        end = 0 if whole is None else whole.end()
        text, self._held = self._held[:end], self._held[end:]
        self._has_ended = self._held.startswith('"')
        return self._give(text)

    def finish(self, arguments: str) -> str:
        """Returns the rest, once all `arguments` are known: where they are no such object, all of them."""
        if self._is_open:
            is_broken = not self._has_ended and len(self._held) > self._LONGEST_ESCAPE
            return self._give(self._held, is_escaped=False) if is_broken else ""
        text = parsed_arguments(arguments).get(INPUT)
        return self._give(text if isinstance(text, str) else arguments, is_escaped=False)

    def _give(self, text: str, is_escaped: bool = True) -> str:
        if is_escaped and "\\" in text:
            with contextlib.suppress(ValueError):  # an escape that JSON does not have
                text = well_formed(str(json.loads(f'"{text}"', strict=False)))
        self.given.append(text)
        return text


class ResponsesFormat(ResponseFormat):
    """Builds one response of items: thoughts, messages and calls."""

    operation = "chat"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        logprobs: int | None,
        reply: ResponsesReply,
        store: ResponseStore,
    ) -> None:
        """`logprobs`: alternatives of each token; None: no log-probabilities."""
        self.id = reply.response_id
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._reply = reply
        self._store = store
        self._parts = PartList()
        self._inputs: dict[int, InputText] = {}  # of custom tools, by their part's number
        self._items: list[dict[str, Any]] = []  # those that are complete
        self._finish: Finish | None = None
        self._sequence = 0
        self._done: dict[str, Any] | None = None
        self._is_settled = False  # its conversation has it

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Returns the whole response."""
        for delta in outputs[0].deltas:
            self.stream_delta(delta, lambda: usage)
        self.stream_end(usage)
        assert self._done is not None
        return self._done

    def stream_delta(self, delta: ParsedDelta, usage: Callable[[], Usage]) -> bytes:
        """Returns the response's start before the first content, then the events of each item in order."""
        self._finish = delta.finish or self._finish
        steps = self._parts.feed(delta.events, delta.logprobs)
        return self._opening() + b"".join(map(self._step, steps))

    def stream_end(self, usage: Usage) -> bytes:
        """Returns the events that end the last item and the response."""
        data = self._opening() + b"".join(map(self._step, self._parts.end()))
        self._done = self._ended(usage)
        return data + self._event(f"response.{self._done['status']}", response=self._done)

    def stream_failure(self, error: ApiError) -> bytes:
        """Returns the failed response, with the items that were complete."""
        said = error.body()["error"]
        code = "rate_limit_exceeded" if error.status == 429 else said["code"]
        shown = {"code": "server_error" if error.status >= 500 else code, "message": said["message"]}
        response = {**self._response("failed"), "error": shown, "output": self._items}
        if self._reply.is_background:  # its client may ask later
            self._done = response
        return self._opening() + self._event("response.failed", response=response)

    @property
    def reply(self) -> ResponsesReply:
        """What the request asked for besides the output."""
        return self._reply

    def begun(self, status: str) -> dict[str, Any]:
        """Returns the response before it is complete: queued or in_progress."""
        return self._response(status)

    @property
    def is_done(self) -> bool:
        """Whether the response has its end."""
        return self._done is not None

    def cancel(self) -> None:
        """Ends the response without its end: `settle` stores the items that were complete."""
        self._done = {**self._response("cancelled"), "output": self._items}

    async def settle(self) -> None:
        """Stores the response, and adds it to its conversation, where the request asked for that.

        A second call stores it again.
        """
        items = self._reply.input_items
        if items is not None and self._done is not None:
            await asyncio.to_thread(self._store.put, self._done, items)
        is_added = self._done is not None and self._done["status"] in _ADDED
        if self._reply.conversation and is_added and not self._is_settled:
            self._is_settled = True
            assert self._done is not None
            new = [*json.loads(self._reply.new_items), *self._done["output"]]
            try:
                await asyncio.to_thread(Conversations(self._store).append, self._reply.conversation, new)
            except ApiError as error:  # it was deleted meanwhile: the answer itself is complete
                logger.warning("a conversation was not continued", reason=error.message)

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event(payload, kind)

    def _opening(self) -> bytes:
        if self._sequence:
            return b""
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return b"".join([self._event(kind, response=response) for kind in kinds])

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            "usage": None,
            **self._reply.fields,
        }

    def _ended(self, usage: Usage) -> dict[str, Any]:
        return {
            **self._response("incomplete" if self._is_cut else "completed"),
            "completed_at": None if self._is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "output": self._items,
            "usage": usage_of(usage),
        }

    @property
    def _is_cut(self) -> bool:
        return self._finish is not None and self._finish.reason == "length"

    def _step(self, step: PartStep) -> bytes:
        """Returns the events of one step, in the order in which OpenAI's clients expect them."""
        part = step.part
        if part.kind == "reasoning":
            return self._thought_step(step)
        if part.kind == "content":
            return self._text_step(step)
        return self._custom_step(step) if self._tool(part).kind == "custom" else self._call_step(step)

    def _place(self, part: Part) -> dict[str, Any]:
        return {"item_id": self._item_id(part), "output_index": part.number}

    def _started(self, item: dict[str, Any], part: Part) -> bytes:
        return self._event("response.output_item.added", output_index=part.number, item=item)

    def _finished(self, item: dict[str, Any], part: Part) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=part.number, item=item)

    def _text_step(self, step: PartStep) -> bytes:
        part, where = step.part, {**self._place(step.part), "content_index": 0}
        if step.what == "text":
            return self._event(
                "response.output_text.delta", **where, delta=step.text, logprobs=self._scores(step.logprobs)
            )
        scores = self._scores(part.logprobs)
        text = {"type": "output_text", "text": part.text, "annotations": [], "logprobs": scores}
        if step.what == "start":
            return self._started(self._message(part, "in_progress", []), part) + self._event(
                "response.content_part.added", **where, part=text
            )
        return (
            self._event("response.output_text.done", **where, text=part.text, logprobs=scores)
            + self._event("response.content_part.done", **where, part=text)
            + self._finished(self._message(part, self._status(part), [text]), part)
        )

    def _message(self, part: Part, status: str, content: list[Any]) -> dict[str, Any]:
        return {
            "id": self._item_id(part),
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _thought_step(self, step: PartStep) -> bytes:
        part, summarises = step.part, self._reply.summarises
        kind, part_kind, index = (
            ("reasoning_summary_text", "reasoning_summary_part", "summary_index")
            if summarises
            else ("reasoning_text", "content_part", "content_index")
        )
        where = {**self._place(part), index: 0}
        if step.what == "text":
            return self._event(f"response.{kind}.delta", **where, delta=step.text)
        text = {"type": "summary_text" if summarises else "reasoning_text", "text": part.text}
        item: dict[str, Any] = {"id": self._item_id(part), "type": "reasoning", "summary": []}
        if step.what == "start":
            return self._started({**item, "status": "in_progress"}, part) + self._event(
                f"response.{part_kind}.added", **where, part=text
            )
        item.update({"summary": [text]} if summarises else {"content": [text]})
        if self._reply.encrypts:
            item["encrypted_content"] = encrypted(part.text)
        return (
            self._event(f"response.{kind}.done", **where, text=part.text)
            + self._event(f"response.{part_kind}.done", **where, part=text)
            + self._finished({**item, "status": self._status(part)}, part)
        )

    def _call_step(self, step: PartStep) -> bytes:
        part, where = step.part, self._place(step.part)
        if step.what == "start":
            return self._started(self._call(part, "in_progress"), part)
        if step.what == "text":
            return self._event("response.function_call_arguments.delta", **where, delta=step.text)
        item = self._call(part, self._status(part))
        done = {"name": item["name"], "arguments": part.text}
        return self._event("response.function_call_arguments.done", **where, **done) + self._finished(
            item, part
        )

    def _call(self, part: Part, status: str) -> dict[str, Any]:
        return {**self._named(part), "type": "function_call", "arguments": part.text, "status": status}

    def _custom_step(self, step: PartStep) -> bytes:
        part, where = step.part, self._place(step.part)
        text = self._inputs.setdefault(part.number, InputText())
        item = {**self._named(part), "type": "custom_tool_call"}
        if step.what == "start":
            return self._started({**item, "status": "in_progress", "input": ""}, part)
        new = text.feed(step.text) if step.what == "text" else text.finish(part.text)
        data = self._event("response.custom_tool_call_input.delta", **where, delta=new) if new else b""
        if step.what == "text":
            return data
        item |= {"status": self._status(part), "input": "".join(text.given)}
        done = self._event("response.custom_tool_call_input.done", **where, input=item["input"])
        return data + done + self._finished(item, part)

    def _named(self, part: Part) -> dict[str, Any]:
        """Returns a call under its tool's name at the client."""
        tool = self._tool(part)
        named = {"id": self._item_id(part), "call_id": part.call_id, "name": tool.name}
        return named if tool.namespace is None else {**named, "namespace": tool.namespace}

    def _tool(self, part: Part) -> ToolName:
        return self._reply.tools.get(part.name) or ToolName("function", part.name)

    def _status(self, part: Part) -> str:
        is_last = part is self._parts.parts[-1]
        return "incomplete" if is_last and self._is_cut else "completed"

    def _scores(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Returns the log-probabilities of tokens in the shape of the API."""
        if self._logprobs is None or not logprobs:
            return []
        content: list[dict[str, Any]] = chat_logprobs(self._tokenizer, logprobs, self._logprobs)["content"]
        return content

    def _item_id(self, part: Part) -> str:
        """Returns an item id that contains the response's, by which the item is found again."""
        kind = self._tool(part).kind if part.kind == "tool_call" else part.kind
        return f"{_PREFIXES[kind]}_{self.id.removeprefix('resp_')}_{part.number}"


_PREFIXES = {"reasoning": "rs", "content": "msg", "function": "fc", "custom": "ctc"}
