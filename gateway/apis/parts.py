"""Splits an output into its parts (thoughts, texts, tool calls), one after the other, as APIs show them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gateway.apis.formats import Output
from gateway.parsers.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    TokenLogprob,
    ToolCallArguments,
    ToolCallStart,
)
from gateway.text.conversation import map_strings


@dataclass
class Part:
    """One part of an output, as far as it was generated; filled by `PartList`."""

    number: int  # of the output's parts
    kind: Literal["reasoning", "content", "tool_call"]
    call_id: str = ""
    name: str = ""  # of the tool
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of content

    @property
    def text(self) -> str:
        """The part's text so far; of a call its arguments."""
        return "".join(self.pieces)

    def arguments(self) -> dict[str, Any]:
        """Returns a call's arguments, or an empty object where the call was cut off."""
        return parsed_arguments(self.text)


@dataclass(frozen=True)
class PartStep:
    """One change of a part; made by `PartList.feed`."""

    part: Part
    what: Literal["start", "text", "end"]
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()  # of content


class PartList:
    """Splits an output's events into parts; at most one of them is open."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open: Part | None = None
        self._logprobs: tuple[TokenLogprob, ...] = ()  # not yet with a text

    def feed(self, events: Iterable[OutputEvent], logprobs: tuple[TokenLogprob, ...] = ()) -> list[PartStep]:
        """Returns the steps that the events cause; `logprobs` are those of their content."""
        self._logprobs = logprobs
        steps: list[PartStep] = []
        for event in events:
            match event:
                case ReasoningDelta():
                    self._text(steps, "reasoning", event.text)
                case ContentDelta():
                    self._text(steps, "content", event.text)
                case ToolCallStart():
                    self._start(steps, Part(len(self.parts), "tool_call", event.call_id, event.name))
                case ToolCallArguments():
                    assert self._open is not None, "arguments come after their call's start"
                    self._add(steps, event.text)
        return steps

    def end(self) -> list[PartStep]:
        """Returns the step that closes the open part, at the output's end."""
        opened, self._open = self._open, None
        return [] if opened is None else [PartStep(opened, "end")]

    def _text(self, steps: list[PartStep], kind: Literal["reasoning", "content"], text: str) -> None:
        if self._open is None or self._open.kind != kind:
            self._start(steps, Part(len(self.parts), kind))
        self._add(steps, text)

    def _start(self, steps: list[PartStep], part: Part) -> None:
        steps += self.end()
        self._open = part
        self.parts.append(part)
        # The part is copied: later events of the same message may extend it before the step is read.
        steps.append(PartStep(replace(part, pieces=[], logprobs=[]), "start"))

    def _add(self, steps: list[PartStep], text: str) -> None:
        assert self._open is not None
        self._open.pieces.append(text)
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._open.kind == "content":
            logprobs, self._logprobs = self._logprobs, ()
        self._open.logprobs.extend(logprobs)
        steps.append(PartStep(self._open, "text", text, logprobs))


def well_formed(text: str) -> str:
    """Returns `text` without halves of surrogate pairs, which JSON can spell but UTF-8 cannot encode."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def parsed_arguments(text: str) -> dict[str, Any]:
    """Returns the object that a model's arguments spell, or an empty one where they are no object."""
    try:
        value = json.loads(text)
        return map_strings(value, well_formed) if isinstance(value, dict) else {}
    except (ValueError, RecursionError):
        return {}


def parts_of(output: Output) -> list[Part]:
    """Returns the parts of a whole output."""
    parts = PartList()
    for delta in output.deltas:
        parts.feed(delta.events)
    return parts.parts
