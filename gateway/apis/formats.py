"""The wire formats of responses: the interface for all APIs, and OpenAI's two formats with choices.

Those two also have the token details that requests can ask for, in vLLM's shapes: ids, and the prompt's
log-probabilities.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import to_json

from gateway.generation.job import Prepared, PromptJob
from gateway.generation.output import alternatives, chat_logprobs, completion_logprobs, finite, token_text
from gateway.parsers.events import (
    ContentDelta,
    Finish,
    OutputEvent,
    ParsedDelta,
    ReasoningDelta,
    TokenLogprob,
    ToolCallArguments,
    ToolCallStart,
)
from gateway.schemas.common import StreamOptions
from gateway.schemas.errors import ApiError
from gateway.text.tokenizer import Tokenizer
from gateway.transport.streaming import DONE, KEEP_ALIVE, event

_NO_OPTIONS = StreamOptions.model_validate({})


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times of one request over all its prompts; filled by `RequestRun`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of prompt_tokens
    reasoning_tokens: int = 0  # of completion_tokens
    accepted_draft_tokens: int = 0  # became completion tokens
    rejected_draft_tokens: int = 0  # verified, but did not
    prompt_s: float = 0.0  # from the request's arrival to its first token, seconds
    total_s: float = 0.0  # from the request's arrival until now, seconds


@dataclass
class OutputCall:
    """One tool call of an output; filled by `Output.calls`."""

    call_id: str
    name: str
    arguments: str  # a JSON object, unless the output was cut off in it or the model wrote something else


@dataclass
class Output:
    """One output, collected for a non-streamed answer; filled by `RequestRun`."""

    deltas: list[ParsedDelta] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, delta: ParsedDelta) -> None:
        """Adds new content."""
        self.deltas.append(delta)
        self.finish = delta.finish or self.finish

    @property
    def text(self) -> str:
        """The text of the content."""
        return "".join(delta.content for delta in self.deltas)

    def mean_logprob(self, echoed: int) -> float:
        """Returns the mean log-probability of its tokens; the first `echoed` ones are the prompt's."""
        values = [token.logprob or 0.0 for token in self.logprobs[echoed:]]
        return sum(values) / max(1, len(values))

    @property
    def reasoning(self) -> str:
        """The text of the reasoning, or an empty string if there is none."""
        return "".join(new.text for new in self._events() if isinstance(new, ReasoningDelta))

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """The log-probabilities of the content."""
        return [token for delta in self.deltas for token in delta.logprobs]

    @property
    def token_ids(self) -> list[int]:
        """All token ids, of any kind of text."""
        return [token for delta in self.deltas for token in delta.token_ids]

    def calls(self) -> list[OutputCall]:
        """Returns the tool calls in order."""
        names: list[ToolCallStart] = []
        arguments: list[list[str]] = []
        for new in self._events():
            if isinstance(new, ToolCallStart):
                names.append(new)
                arguments.append([])
            elif isinstance(new, ToolCallArguments):
                arguments[new.index].append(new.text)
        pairs = zip(names, arguments, strict=True)
        return [OutputCall(start.call_id, start.name, "".join(pieces)) for start, pieces in pairs]

    def _events(self) -> Iterator[OutputEvent]:
        return (new for delta in self.deltas for new in delta.events)


class ResponseFormat(ABC):
    """Builds one response of one API; made per request. Either `whole` is used, or the methods of streams."""

    operation: str  # gen_ai.operation.name
    id: str
    engine_id = ""  # of the engine's requests; empty: `id`
    media_type = "text/event-stream"  # of streams
    keep_alive = KEEP_ALIVE  # sent during silence, also before the stream's first data

    @abstractmethod
    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any] | list[dict[str, Any]]:
        """Returns a non-streamed answer."""

    @abstractmethod
    def stream_delta(self, delta: ParsedDelta, usage: Callable[[], Usage]) -> bytes:
        """Returns the bytes for new content, with the opening before the first; empty: nothing yet.

        `usage` returns the counts so far.
        """

    @abstractmethod
    def stream_end(self, usage: Usage) -> bytes:
        """Returns the bytes that end a stream once all outputs have ended."""

    @abstractmethod
    def stream_failure(self, error: ApiError) -> bytes:
        """Returns the last bytes of a stream whose request fails, at any point of it."""

    async def settle(self) -> None:  # noqa: B027 - most formats keep nothing
        """Runs when the answer is complete, before its end is sent."""


class ChoiceFormat(ResponseFormat):
    """Builds JSON objects with `choices`; all objects of a stream share id and creation time."""

    id_prefix: str
    whole_object: str  # `object` of a non-streamed answer
    chunk_object: str  # `object` of a stream's chunks
    prompt_of_response = False  # prompt details are fields of the response, not of a choice

    def __init__(self, model: str, tokenizer: Tokenizer, prepared: Prepared, fingerprint: str = "") -> None:
        """`model` is the served one's name; `fingerprint` as in `ServedModel`."""
        self._fingerprint = fingerprint or None
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._logprobs = prepared.logprobs
        self._names_by_id = bool(prepared.fields.return_tokens_as_token_ids)
        self._names_tokens = bool(prepared.fields.logprob_token_ids)
        self._options = prepared.fields.stream_options or _NO_OPTIONS
        self._details = TokenDetails(prepared, tokenizer)
        self._opened: set[int] = set()
        # Chunks of a stream differ in their choices only: the envelope before them is encoded once.
        head = event(self._envelope(self.chunk_object, []))
        self._chunk_head = head.removesuffix(b"[]}\n\n")

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Returns an object with one choice per output."""
        choices = [
            {
                **self.full(index, output, output.finish or Finish("abort")),
                **self._details.of_output(output.token_ids, whole=True),
                **({} if self.prompt_of_response else self._details.of_prompt(index, whole=True)),
            }
            for index, output in enumerate(outputs)
        ]
        of_prompt = self._details.of_prompt(0, whole=True) if self.prompt_of_response else {}
        return {**self._envelope(self.whole_object, choices), "usage": usage_object(usage), **of_prompt}

    def stream_delta(self, delta: ParsedDelta, usage: Callable[[], Usage]) -> bytes:
        """Returns the opening, then new content; the last chunk of an output has its finish reason."""
        opened = b""
        of_prompt: dict[str, Any] = {}
        if delta.index not in self._opened:
            if not self._opened or not self.prompt_of_response:
                of_prompt = self._details.of_prompt(delta.index)
            self._opened.add(delta.index)
            opening = self.opening(delta.index)
            if opening is not None:
                opened = self._chunk(opening, lambda: _before(usage(), delta), of_prompt)
                of_prompt = {}
        choices = self.delta_choices(delta)
        if not choices and (delta.finish is not None or (delta.token_ids and self._details.wants_ids)):
            choices = [self.empty(delta.index)]
        if delta.token_ids and self._details.wants_ids:
            choices[-1].update(self._details.of_output(delta.token_ids))
        if delta.finish is not None:
            choices[-1].update(finish_reason=self.reason(delta.finish), stop_reason=delta.finish.stop_reason)
        if choices and not self.prompt_of_response:
            choices[0].update(of_prompt)
            of_prompt = {}
        parts = [self._chunk(choice, usage, {} if n else of_prompt) for n, choice in enumerate(choices)]
        return b"".join((opened, *parts))

    def stream_end(self, usage: Usage) -> bytes:
        """Returns the usage if it was asked for, and the end."""
        if not self._options.include_usage:
            return DONE
        return event({**self._envelope(self.chunk_object, []), "usage": usage_object(usage)}) + DONE

    def stream_failure(self, error: ApiError) -> bytes:
        """Returns the error's object, and the end."""
        return event(error.body()) + DONE

    def _chunk(self, choice: dict[str, Any], usage: Callable[[], Usage], more: Mapping[str, Any]) -> bytes:
        if self._options.include_usage:
            counted = usage_object(usage()) if self._options.continuous_usage_stats else None
            more = {**more, "usage": counted}
        rest = b"," + to_json(more)[1:] if more else b"}"
        return b"%b[%b]%b\n\n" % (self._chunk_head, to_json(choice), rest)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns the choice that opens output `index` in a stream; None if the API has none."""

    @abstractmethod
    def delta_choices(self, delta: ParsedDelta) -> list[dict[str, Any]]:
        """Returns the choices for new content, log-probabilities included, without a finish reason."""

    @abstractmethod
    def empty(self, index: int) -> dict[str, Any]:
        """Returns the choice for tokens without text, or for an end alone."""

    def reason(self, finish: Finish) -> str:
        """Returns the finish reason under the API's name."""
        return finish.reason

    @abstractmethod
    def full(self, index: int, output: Output, finish: Finish) -> dict[str, Any]:
        """Returns the choice of a non-streamed answer."""


def _before(usage: Usage, delta: ParsedDelta) -> Usage:
    """Returns the counts before `delta`."""
    return replace(
        usage,
        completion_tokens=usage.completion_tokens - delta.new_tokens,
        reasoning_tokens=usage.reasoning_tokens - delta.reasoning_tokens,
    )


def usage_object(usage: Usage) -> dict[str, Any]:
    """Returns token counts as OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.rejected_draft_tokens,
        },
    }


def chat_delta(new: OutputEvent) -> dict[str, Any]:
    """Returns the `delta` of a chunk that carries one event."""
    if isinstance(new, ContentDelta):
        return {"content": new.text}
    if isinstance(new, ReasoningDelta):  # servers and clients use either name
        return {"reasoning": new.text, "reasoning_content": new.text}
    call: dict[str, Any] = {"index": new.index}
    if isinstance(new, ToolCallStart):
        call |= {"id": new.call_id, "type": "function", "function": {"name": new.name, "arguments": ""}}
    else:
        call["function"] = {"arguments": new.text}
    return {"tool_calls": [call]}


def chat_message(output: Output) -> dict[str, Any]:
    """Returns a whole answer's `message`; its content is null if there are only calls or only reasoning."""
    content, reasoning, calls = output.text, output.reasoning, output.calls()
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content or (None if calls or reasoning else ""),
        "refusal": None,
    }
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return message


class ChatFormat(ChoiceFormat):
    """Builds a chunk with the role, then chunks with content, the last of which has the finish reason."""

    operation = "chat"
    id_prefix = "chatcmpl"
    prompt_of_response = True
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, model: str, tokenizer: Tokenizer, prepared: Prepared, fingerprint: str = "") -> None:
        super().__init__(model, tokenizer, prepared, fingerprint)
        # The client sent `functions`, the predecessor of tools, and expects no `tool_calls`.
        self._in_functions = prepared.speaks_functions

    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns the choice with the role, before the first content."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta_choices(self, delta: ParsedDelta) -> list[dict[str, Any]]:
        """Returns a choice per kind of new content, in the order in which the model generated it."""
        choices = [
            {"index": delta.index, "delta": self._delta(new), "logprobs": None, "finish_reason": None}
            for new in delta.events
        ]
        if self._logprobs is not None:
            self._add_logprobs(delta, choices)
        return choices

    def _delta(self, new: OutputEvent) -> dict[str, Any]:
        made = chat_delta(new)
        return {"function_call": made["tool_calls"][0]["function"]} if self._calls_one(made) else made

    def _calls_one(self, made: dict[str, Any]) -> bool:
        return self._in_functions and "tool_calls" in made

    def reason(self, finish: Finish) -> str:
        """Returns the finish reason, which is `function_call` for calls of requests with `functions`."""
        return "function_call" if self._in_functions and finish.reason == "tool_calls" else finish.reason

    def _add_logprobs(self, delta: ParsedDelta, choices: list[dict[str, Any]]) -> None:
        """Adds a delta's log-probabilities to the first content in it."""
        places = [number for number, new in enumerate(delta.events) if isinstance(new, ContentDelta)]
        if not places and not delta.logprobs:
            return
        if not places:
            choices.append({"index": delta.index, "delta": {"content": ""}, "finish_reason": None})
        choices[places[0] if places else -1]["logprobs"] = self._logprobs_of(delta.logprobs)

    def empty(self, index: int) -> dict[str, Any]:
        """Returns an empty delta."""
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}

    def full(self, index: int, output: Output, finish: Finish) -> dict[str, Any]:
        """Returns a whole message."""
        message = chat_message(output)
        if self._calls_one(message):
            message["function_call"] = message.pop("tool_calls")[0]["function"]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs_of(output.logprobs),
            "finish_reason": self.reason(finish),
            "stop_reason": finish.stop_reason,
        }

    def _logprobs_of(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, tokens, self._logprobs, self._names_by_id, self._names_tokens)


class CompletionFormat(ChoiceFormat):
    """Builds chunks of text, the last of which has the finish reason."""

    operation = "text_completion"
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns None: text completions open with their first text."""
        return None

    def delta_choices(self, delta: ParsedDelta) -> list[dict[str, Any]]:
        """Returns the choice with the text decoded since the last chunk."""
        if not delta.events and not delta.logprobs:
            return []
        return [self._choice(delta.index, delta.content, delta.logprobs, None)]

    def empty(self, index: int) -> dict[str, Any]:
        """Returns the choice with an empty text."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def full(self, index: int, output: Output, finish: Finish) -> dict[str, Any]:
        """Returns the choice with the whole text."""
        return self._choice(index, output.text, output.logprobs, finish)

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenLogprob], finish: Finish | None
    ) -> dict[str, Any]:
        logprobs = (
            None
            if self._logprobs is None
            else completion_logprobs(self._tokenizer, tokens, self._logprobs, self._names_by_id)
        )
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if finish is not None:
            choice.update(finish_reason=finish.reason, stop_reason=finish.stop_reason)
        return choice


class TokenDetails:
    """The additional fields of one response; made by its route."""

    def __init__(self, prepared: Prepared, tokenizer: Tokenizer) -> None:
        fields = prepared.fields
        self._jobs = prepared.jobs
        self._outputs_per_prompt = fields.n or 1
        self._tokenizer = tokenizer
        # Whether ids of output tokens are returned.
        self.wants_ids = bool(fields.return_token_ids)
        self._num_prompt_logprobs = fields.prompt_logprobs

    def of_output(self, token_ids: Sequence[int], whole: bool = False) -> dict[str, Any]:
        """Returns the details for a choice with these tokens; `whole`: in a non-streamed answer."""
        if self.wants_ids:
            return {"token_ids": list(token_ids)}
        return {"token_ids": None} if whole else {}

    def of_prompt(self, index: int, whole: bool = False) -> dict[str, Any]:
        """Returns the details of the prompt of output `index`; `whole`: in a non-streamed answer."""
        job = self._jobs[index // self._outputs_per_prompt]
        details: dict[str, Any] = {"prompt_token_ids": list(job.prompt_ids)} if self.wants_ids else {}
        if whole:
            count = self._num_prompt_logprobs
            details.setdefault("prompt_token_ids", None)
            details["prompt_logprobs"] = None if count is None else self._prompt_logprobs(job, count)
        return details

    def _prompt_logprobs(self, job: PromptJob, count: int) -> list[dict[str, Any] | None]:
        """Returns per prompt token: null for the first, else itself and the `count` likeliest by id."""
        scored = job.input_logprobs
        entries: list[dict[str, Any] | None] = []
        for position, token_id in enumerate(scored.token_ids if scored is not None else ()):
            assert scored is not None
            own = scored.token_logprobs[position]
            if not own.HasField("value"):
                entries.append(None)
                continue
            best = alternatives(scored.top_logprobs, position)[:count]
            ranks = {candidate: rank for rank, (candidate, _) in enumerate(best, start=1)}
            rows = {token_id: finite(own.value), **dict(best)}
            entries.append(
                {
                    str(candidate): {
                        "logprob": value,
                        "rank": ranks.get(candidate),
                        "decoded_token": token_text(self._tokenizer, candidate),
                    }
                    for candidate, value in rows.items()
                }
            )
        return entries
