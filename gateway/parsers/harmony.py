"""gpt-oss: an output is a sequence of messages in channels, each with a header of its own.

`openai-harmony`, the library for this format, is not used here: it reads one vocabulary only, which it
downloads or takes from a file that an environment variable names, it raises for what it does not expect, and
it does not say of a call's arguments whether more follows. `tests/tools/compare_harmony.py` compares both.
"""

from __future__ import annotations

import re

import structlog

from gateway.parsers.events import OutputPlan
from gateway.parsers.framing import ToolFraming
from gateway.parsers.json_reader import MAX_LABEL
from gateway.parsers.machine import ToolFormat
from gateway.parsers.scanner import END, Markers, Steps
from gateway.parsers.sink import OutputParser, Sink, new_call_id

logger = structlog.get_logger(__name__)
CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
CALL = "<|call|>"
MESSAGE_ENDS = ("<|end|>", CALL, "<|return|>")
ALL = (CHANNEL, MESSAGE, START, "<|constrain|>", *MESSAGE_ENDS)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTION = "functions."


class Harmony(ToolFormat):
    """The format of gpt-oss's calls, for grammars; `HarmonyParser` reads them with everything else."""

    framing = ToolFraming(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "<|call|>", place="channels"
    )
    inner = ALL

    def read(self, opener: str) -> Steps[bool]:
        """Is never called."""
        raise AssertionError("harmony outputs are read by HarmonyParser")
        yield


class HarmonyParser(OutputParser):
    """Reads the channel analysis as reasoning, messages to functions as calls, and all else as content."""

    def __init__(self, plan: OutputPlan, tokens: frozenset[str]) -> None:
        """`tokens`: texts of the format that the tokenizer has tokens for."""
        super().__init__(Sink(plan.max_calls, plan.show_reasoning))
        strict = frozenset() if plan.forced else tokens
        self._thinks = plan.reasoning_parser is not None
        self._calls = plan.tool_parser is not None
        self._all = Markers(ALL, strict)
        self._headers = Markers((MESSAGE, START, *MESSAGE_ENDS), strict)
        self._bodies = Markers((*MESSAGE_ENDS, START, CHANNEL), strict)

    def _run(self) -> Steps[None]:
        marker: str | None = None
        # The prompt ends within a header: a call's recipient may precede its channel.
        for begun in (" to=", "to="):
            if (yield from self.scan.accept(begun)):
                marker = yield from self._message(begun)
                break
        while not self.sink.is_full:
            if marker in (START, CHANNEL):
                marker = yield from self._message()
                continue
            if marker == MESSAGE:  # without a header
                marker = yield from self._content()
                continue
            piece, marker = yield from self.scan.until(self._all)
            self.sink.content(piece, self.scan.piece_start)
            if marker == END:
                return

    def _message(self, begun: str = "") -> Steps[str | None]:
        """Reads a message whose header has begun with `begun`; returns the marker after it."""
        self.scan.record()
        header, marker = yield from self.scan.collect(self._headers, MAX_LABEL)
        header = begun + header
        if marker != MESSAGE:
            if marker is None or begun:  # too long for a header, or text that only looked like one
                logger.debug("no header", text=header[:200])
                self.sink.content(header, self.scan.record_start - len(begun))
            self.scan.forget()
            return marker
        self.scan.forget()
        recipient = _RECIPIENT.search(header)
        to = "" if recipient is None else recipient.group(1)
        channel = header.partition(CHANNEL)[2] or header
        name = to.removeprefix(_FUNCTION) if to.startswith(_FUNCTION) else ""
        if self._calls and name:
            return (yield from self._call(name))
        if self._thinks and (channel.lstrip().startswith("analysis") or (to and not name)):
            return (yield from self._reasoning())
        return (yield from self._content())

    def _call(self, name: str) -> Steps[str | None]:
        self.sink.start_call(name, new_call_id())
        is_empty = True
        while True:
            piece, marker = yield from self.scan.until(self._bodies)
            piece = piece.lstrip() if is_empty else piece
            is_empty = is_empty and not piece
            self.sink.arguments(piece)
            if marker is not None:
                if is_empty and marker != END:
                    self.sink.arguments("{}")
                self.sink.end_call()
                if marker == CALL:  # for models whose stop tokens do not include it
                    self.sink.is_full = True
                return marker

    def _reasoning(self) -> Steps[str | None]:
        self.sink.begin_reasoning()
        while True:
            piece, marker = yield from self.scan.until(self._bodies)
            self.sink.reasoning(piece, self.scan.piece_start)
            if marker is not None:
                if marker != END:
                    self.sink.end_reasoning()
                return marker

    def _content(self) -> Steps[str | None]:
        while True:
            piece, marker = yield from self.scan.until(self._bodies)
            self.sink.content(piece, self.scan.piece_start)
            if marker is not None:
                return marker
