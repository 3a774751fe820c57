"""The parts of an output once its reasoning and its tool calls are separated from its content.

`OutputState` (gateway/generation/output.py) returns a `ParsedDelta` per message of the engine; the response
formats of all APIs consume it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the reasoning; filled by reasoning parsers."""

    text: str


@dataclass(slots=True)  # not frozen: there is one per token, and freezing triples what making it costs
class ContentDelta:
    """A piece of the answer's text; filled by parsers, and by `OutputState` where an output has none."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a tool call; once per call, before its arguments. Filled by tool parsers."""

    index: int  # of the output's calls, from 0 without gaps
    call_id: str  # unique; as the model wrote it where its format has ids
    name: str  # as the model wrote it: clients refuse unknown names


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments; all pieces of a call that was not cut off concatenate to a JSON object.

    Filled by tool parsers.
    """

    index: int
    text: str


OutputEvent = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of prompt or output; filled by `gateway/generation/output.py` from the engine's message."""

    token_id: int
    logprob: float | None  # natural log; None for the first prompt token
    top: tuple[tuple[int, float], ...]  # alternatives (token id, logprob), best first
    offset: int  # characters of text before this token


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an output ended; filled by `OutputState`."""

    reason: str  # stop, length, abort, or tool_calls if it ended by itself with calls
    stop_reason: str | int | None = None  # the stop string or stop token found


@dataclass(slots=True)  # not frozen, as ContentDelta
class ParsedDelta:
    """New content of one output, in the order in which the model wrote it; filled by `OutputState`."""

    index: int
    events: tuple[OutputEvent, ...]  # texts are never empty
    logprobs: tuple[TokenLogprob, ...]  # of tokens whose text is content
    token_ids: tuple[int, ...]  # of this message, of any kind of text
    new_tokens: int
    reasoning_tokens: int = 0  # of new_tokens
    finish: Finish | None = None

    @property
    def content(self) -> str:
        """The text of all its `ContentDelta`s."""
        return "".join(event.text for event in self.events if isinstance(event, ContentDelta))

    def after(self, earlier: ParsedDelta) -> ParsedDelta:
        """Returns this delta joined to `earlier`, which came before and did not end the output."""
        return ParsedDelta(
            self.index,
            earlier.events + self.events,
            earlier.logprobs + self.logprobs,
            earlier.token_ids + self.token_ids,
            earlier.new_tokens + self.new_tokens,
            earlier.reasoning_tokens + self.reasoning_tokens,
            self.finish,
        )


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function of the request; filled in the prompt process."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)  # JSON schema of the arguments object
    strict: bool = True  # calls satisfy the schema even if the model may choose to call
    # Syntax (lark or regex) and definition of a grammar for the text that is the only parameter, "input".
    text: tuple[str, str] | None = None


@dataclass(frozen=True)
class OutputPlan:
    """How an output is parsed; made in the prompt process from request and model, carried in `OutputRules`.

    Picklable: parsers are named here, and made per output (`gateway/parsers/registry.py`).
    """

    reasoning_parser: str | None = None
    tool_parser: str | None = None
    starts_in_reasoning: bool = False  # the prompt's end opened the thought
    tools: tuple[ToolSpec, ...] = ()
    forced: bool = False  # required or named: a grammar allows only calls after the thought
    max_calls: int | None = None  # 1 without parallel_tool_calls: generation ends after it; None: any number
    show_reasoning: bool = True  # False: reasoning is counted and dropped
