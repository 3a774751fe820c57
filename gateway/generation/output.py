"""Turns the engine's tokens into text and events, and log-probabilities into OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.parsers.events import (
    ContentDelta,
    Finish,
    OutputPlan,
    ParsedDelta,
    TokenLogprob,
)
from gateway.parsers.parsed_text import ParsedText
from gateway.schemas.errors import ApiError
from gateway.text.tokenizer import StopStrings, Tokenizer, make_detokenizer
from protos import engine_pb2

# A masked token has -inf, which JSON cannot represent; other servers send this number for it.
_LOWEST = -9999.0


def finite(logprob: float) -> float:
    """Returns `logprob`, or the lowest value that JSON clients expect."""
    return max(logprob, _LOWEST)


def alternatives(
    top_logprobs: Sequence[engine_pb2.TopLogProbs], position: int
) -> tuple[tuple[int, float], ...]:
    """Returns the alternatives at one position, best first; empty when the engine sent none for it."""
    if position >= len(top_logprobs):
        return ()
    row = top_logprobs[position]
    return tuple((token_id, finite(value)) for token_id, value in zip(row.token_ids, row.values, strict=True))


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns a single token's text; incomplete characters become U+FFFD (bytes are a separate field)."""
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def id_name(token_id: int) -> str:
    """Returns the name of a token in responses that name tokens by id."""
    return f"token_id:{token_id}"


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float, by_id: bool) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    name = id_name(token_id) if by_id else raw.decode("utf-8", errors="replace")
    return {"token": name, "logprob": logprob, "bytes": list(raw)}


def chat_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[TokenLogprob],
    count: int,
    by_id: bool = False,
    with_own: bool = False,
) -> dict[str, Any]:
    """Returns chat's `choices[].logprobs`: an entry per content token with up to `count` alternatives.

    `by_id`: tokens are named by their ids; `with_own`: each is always among its alternatives.
    """
    content = []
    for token in tokens:
        entry = _entry(tokenizer, token.token_id, token.logprob or 0.0, by_id)
        top = token.top[:count]
        if with_own and token.token_id not in dict(top):
            top = ((token.token_id, token.logprob or 0.0), *top)
        entry["top_logprobs"] = [_entry(tokenizer, token_id, value, by_id) for token_id, value in top]
        content.append(entry)
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], count: int, by_id: bool = False
) -> dict[str, Any]:
    """Returns completions' `choices[].logprobs`: parallel lists; text_offset counts characters.

    Each `top_logprobs` entry holds the token itself first, then up to `count` alternatives; two tokens of
    equal text keep the better value. `by_id`: tokens are named by their ids.
    """

    def name(token_id: int) -> str:
        return id_name(token_id) if by_id else token_text(tokenizer, token_id)

    top: list[dict[str, float] | None] = []
    for token in tokens:
        if token.logprob is None:
            top.append(None)
            continue
        row = {name(token.token_id): token.logprob}
        for token_id, value in token.top[:count]:
            row[name(token_id)] = max(value, row.get(name(token_id), value))
        top.append(row)
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": [name(token.token_id) for token in tokens],
        "top_logprobs": top,
    }


def prompt_token_logprobs(logprobs: engine_pb2.InputLogProbs) -> list[TokenLogprob]:
    """Returns the log-probabilities of a prompt's tokens, of which the first has none."""
    return [
        TokenLogprob(
            token_id,
            finite(value.value) if value.HasField("value") else None,
            alternatives(logprobs.top_logprobs, position),
            0,
        )
        for position, (token_id, value) in enumerate(
            zip(logprobs.token_ids, logprobs.token_logprobs, strict=True)
        )
    ]


@dataclass(frozen=True)
class OutputRules:
    """The rules by which tokens become text; filled by the route from the request and the model."""

    stop_strings: tuple[str, ...]
    include_stop: bool  # keep stop strings and stop tokens in the text
    stop_token_ids: frozenset[int]  # the request's and, unless ignored, the model's end-of-sequence ids
    eos_token_ids: frozenset[int]
    min_tokens: int
    skip_special_tokens: bool
    prompt_text: str | None = None  # set when it is echoed
    echoes_logprobs: bool = False  # with the echoed prompt's log-probabilities
    detokenize: bool = True  # False: the text is empty
    echo_only: bool = False  # max_tokens was 0: the engine's one token is dropped
    plan: OutputPlan | None = None  # how reasoning and tool calls are recognised; None: all is content


class OutputState:
    """Detokenises, searches for stop strings, separates reasoning and tool calls, and aligns
    log-probabilities; those of tokens whose text is held back are held back with it."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, rules: OutputRules, prompt_ids: Sequence[int]
    ) -> None:
        self.index = index
        self.token_count = 0
        self.finish: Finish | None = None
        self._tokenizer = tokenizer
        self._rules = rules
        self._detokenizer = make_detokenizer(tokenizer, rules.skip_special_tokens, prompt_ids)
        self._stops = StopStrings(rules.stop_strings, rules.include_stop)
        self._pending: list[TokenLogprob] = []  # of output tokens, by offset
        self._echoed_logprobs: list[TokenLogprob] = []  # the prompt's, until they are given out
        self._echoed = rules.prompt_text is None
        self._decoded_length = 0  # characters detokenised, the echoed prompt's included
        self._shown_length = 0  # characters released
        self._parsing = None if rules.plan is None else ParsedText.of(rules.plan, tokenizer)
        if self._parsing is not None:
            self._detokenizer.keep(self._parsing.marked)

    def feed(self, chunk: engine_pb2.GenerateStreamChunk) -> ParsedDelta:
        """Takes the tokens of one message; tokens after a stop string are ignored."""
        logprobs = chunk.output_logprobs if chunk.HasField("output_logprobs") else None
        echo = "" if self._echoed else self._echo(chunk.input_logprobs)
        return self._advance(echo, chunk.token_ids[:], logprobs, 0)

    def complete(self, message: engine_pb2.GenerateComplete) -> ParsedDelta:
        """Takes the last message, with any tokens that no chunk carried, and ends the output.

        Raises:
            ApiError: the engine says that this output failed: 400 by the request's own constraint, else 500.
        """
        if message.constraint_failed:
            raise ApiError(400, message.error_message, code="constraint_failed")
        if message.finish_reason == "error":
            raise ApiError(500, f"the engine failed: {message.error_message}", code="engine_error")
        logprobs = message.output_logprobs if message.HasField("output_logprobs") else None
        seen = 0 if self._rules.echo_only else self.token_count
        return self._advance(
            self._echo(message.input_logprobs), message.output_ids[seen:], logprobs, seen, message
        )

    def _advance(
        self,
        text: str,
        token_ids: list[int],
        logprobs: engine_pb2.OutputLogProbs | None,
        first: int,
        last: engine_pb2.GenerateComplete | None = None,
    ) -> ParsedDelta:
        """Feeds tokens until a stop string; with the last message also releases text that was held back.

        `text` precedes them; `first` is the position of token_ids[0] in `logprobs`.
        """
        before, parsing = self.token_count, self._parsing
        for position, token_id in enumerate(() if self._rules.echo_only else token_ids, start=first):
            self.token_count += 1
            if logprobs is not None:
                self._pending.append(
                    TokenLogprob(
                        token_id,
                        finite(logprobs.token_logprobs[position]),
                        alternatives(logprobs.top_logprobs, position),
                        self._decoded_length,
                    )
                )
            piece = ""
            is_shown = token_id not in self._rules.stop_token_ids or self._rules.include_stop
            if is_shown and self._rules.detokenize:
                piece = self._detokenizer.step(token_id)
            if parsing is None:
                text += self._settle(piece)
            else:
                parsing.feed(self._settle(piece), token_id, piece)
                if parsing.is_full and self.finish is None:
                    self.finish = Finish("tool_calls")
            if self.finish is not None:
                break
        if last is not None and self.finish is None:
            rest = self._settle(self._detokenizer.flush())
            if self.finish is None:
                rest += self._stops.flush()
                self.finish = self._reason(last)
            if parsing is None:
                text += rest
            else:
                parsing.feed(rest)
        count = self.token_count - before
        if parsing is not None:
            return self._parsed(parsing, text, tuple(token_ids[:count]))
        self._shown_length += len(text)
        released = self._release() if text or self.finish else ()
        events = (ContentDelta(text),) if text else ()
        return ParsedDelta(self.index, events, released, tuple(token_ids[:count]), count, 0, self.finish)

    def _parsed(self, parsing: ParsedText, echo: str, token_ids: tuple[int, ...]) -> ParsedDelta:
        """Returns the parser's events for a message's tokens."""
        if self.finish is not None:
            parsing.finish()
            if (
                self.finish.reason == "stop"
                and parsing.calls
                and not isinstance(self.finish.stop_reason, str)
            ):
                self.finish = Finish("tool_calls", self.finish.stop_reason)
        events, reasoning_tokens = parsing.take()
        logprobs = parsing.content_logprobs(self._pending, self._decoded_length, self.finish is not None)
        if echo:
            events = (ContentDelta(echo), *events)
        return ParsedDelta(
            self.index, events, logprobs, token_ids, len(token_ids), reasoning_tokens, self.finish
        )

    def _settle(self, text: str) -> str:
        """Returns the part of new text that may be shown; sets `finish` at a complete stop string."""
        self._decoded_length += len(text)
        if not self._rules.stop_strings or self.token_count < self._rules.min_tokens:
            return text  # stop strings do not count, or not yet
        result = self._stops.feed(text)
        if result.matched is not None:
            self.finish = Finish("stop", result.matched)
        return result.text

    def _release(self) -> tuple[TokenLogprob, ...]:
        """Returns log-probabilities whose text is released; at the output's end all others too, except those
        of tokens that lie wholly in a cut-off stop string.

        The result depends on the text alone, not on how many tokens a message had.
        """
        held, self._pending = self._pending, []
        echoed, self._echoed_logprobs = self._echoed_logprobs, []
        if self.finish is not None and not isinstance(self.finish.stop_reason, str):
            return (*echoed, *held)
        shown = [token for token in held if token.offset < self._shown_length]
        if self.finish is None:
            self._pending = held[len(shown) :]
        return (*echoed, *shown)

    def _reason(self, message: engine_pb2.GenerateComplete) -> Finish:
        """Returns the engine's finish reason; a stop token is named unless it is the model's own EOS."""
        if self._rules.echo_only:
            return Finish("length")
        if message.WhichOneof("matched_stop") == "matched_token_id":
            matched = message.matched_token_id
            return Finish(message.finish_reason, None if matched in self._rules.eos_token_ids else matched)
        return Finish(message.finish_reason)

    def _echo(self, logprobs: engine_pb2.InputLogProbs) -> str:
        """Returns the prompt's text once, and queues the prompt's log-probabilities."""
        if self._echoed:
            return ""
        self._echoed = True
        detokenizer = make_detokenizer(self._tokenizer, False)  # as the echoed text shows them
        offset = 0
        for token in prompt_token_logprobs(logprobs) if self._rules.echoes_logprobs else ():
            self._echoed_logprobs.append(replace(token, offset=offset))
            offset += len(detokenizer.step(token.token_id))
        text = self._rules.prompt_text or ""
        self._decoded_length = len(text)
        return text
