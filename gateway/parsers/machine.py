"""The state machine for outputs with one thought, content and tool calls, separated by markers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

import structlog

from gateway.parsers.events import OutputPlan, ToolSpec
from gateway.parsers.framing import ToolFraming
from gateway.parsers.json_reader import loaded, pass_value, read_value
from gateway.parsers.scanner import END, Markers, Scanner, Steps
from gateway.parsers.sink import OutputParser, Sink, new_call_id

logger = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ThinkFormat:
    """The format of a family's thoughts; one constant per reasoning parser."""

    begin: str
    end: str
    # Whether a token that begins a tool call also ends the thought: many models leave out its end at times.
    ends_at_calls: bool = False
    # Whether the output begins with the thought unless the prompt closed it, with or without `begin`.
    always: bool = False
    label: str = ""  # After `begin`, not part of the thought.
    # Texts around an answer, left out; those that are no tokens count before content, and after such a start.
    before_answer: tuple[str, ...] = ()
    after_answer: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()  # Further texts that may be tokens.
    # Texts between a thought's end and an answer, or a call.
    to_answer: str = ""
    to_calls: str = ""

    @property
    def tokens(self) -> frozenset[str]:
        """The texts that may be special tokens, which are kept for the parser."""
        return frozenset((self.begin, self.end, *self.before_answer, *self.after_answer, *self.inner))


@dataclass
class Reading:
    """The state that the parts of a parser share; made per output."""

    scan: Scanner
    sink: Sink
    tools: dict[str, ToolSpec]
    tokens: frozenset[str]  # the format's texts that count only as tokens
    is_forced: bool = False  # a grammar allows only calls


class ToolFormat(ABC):
    """The format of a family's tool calls; a class per tool parser, an instance per output."""

    framing: ToolFraming  # as grammars write it
    openers: tuple[str, ...] = ()  # begin a call; `read` takes what follows
    # Around calls: dropped if an opener follows, else content.
    sections: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()  # after calls: dropped
    bare: str = ""  # first characters of calls without an opener
    inner: tuple[str, ...] = ()  # further texts that may be tokens

    def __init__(self, reading: Reading) -> None:
        self.scan, self.sink, self.tools = reading.scan, reading.sink, reading.tools
        self.tokens = reading.tokens
        self.is_forced = reading.is_forced
        self.after_section = False  # whether `read` is called for an opener after one of `sections`

    def new_id(self) -> str:
        """Returns an id for a call that has none."""
        return new_call_id()

    @classmethod
    def texts(cls) -> frozenset[str]:
        """Returns all texts of the format that the tokenizer may have tokens for."""
        return frozenset((*cls.openers, *cls.sections, *cls.closers, *cls.inner))

    @abstractmethod
    def read(self, opener: str) -> Steps[bool]:
        """Reads a call after its opener (empty: a bare one); False: it is none, and nothing was emitted."""

    def markers(self, *texts: str) -> Markers:
        """Returns a search for some of the format's texts."""
        return Markers(texts, self.tokens)

    def call_with_json(self, name: str, call_id: str = "", ends: Collection[str] = ()) -> Steps[bool]:
        """Emits a call whose arguments follow as a JSON object, or as a string that spells one.

        Args:
            name: of the tool.
            call_id: as the model wrote it; empty: a new one.
            ends: texts after which the call has no arguments, and tokens that end them.
        Returns:
            False: what follows is neither, nor the end of the output.
        """
        call_id = call_id or self.new_id()
        first = yield from self.scan.skip_space()
        tokens = self.tokens & frozenset(ends)
        if first == "{":
            self.sink.start_call(name, call_id)
            self.scan.forget()  # from here on it is a call
            if (yield from pass_value(self.scan, self.sink.arguments, tokens)):
                self.sink.end_call()
            return True
        if first == END:
            self.sink.start_call(name, call_id)
            return True
        if any(text.startswith(first) for text in ends):
            self.sink.start_call(name, call_id)
            self.sink.arguments("{}")
            self.sink.end_call()
            return True
        text = yield from read_value(self.scan, tokens)
        value = None if text is None else loaded(text)
        if isinstance(value, str) and isinstance(loaded(value), dict):
            text = value
        elif text != "null":
            return False
        self.sink.start_call(name, call_id)
        self.sink.arguments("{}" if text is None or text == "null" else text)
        self.sink.end_call()
        return True


class StreamParser(OutputParser):
    """Parses content, with a thought before it and calls in it."""

    def __init__(
        self,
        plan: OutputPlan,
        think: ThinkFormat | None,
        tools: type[ToolFormat] | None,
        tokens: Collection[str],
    ) -> None:
        """`tokens`: the texts for which the tokenizer has tokens."""
        super().__init__(Sink(plan.max_calls, plan.show_reasoning))
        self._think = think
        # Grammars may spell markers letter by letter: in forced outputs they count in either form.
        strict = frozenset() if plan.forced else frozenset(tokens)
        named = {tool.name: tool for tool in plan.tools}
        self._tools = (
            None if tools is None else tools(Reading(self.scan, self.sink, named, strict, plan.forced))
        )
        self._strict = strict
        self._in_frame = False  # an answer's beginning frame was left out
        self._starts_in_reasoning = plan.starts_in_reasoning and think is not None
        if self._starts_in_reasoning:
            self.sink.begin_reasoning()  # before the first token, which counts as reasoning

    def _run(self) -> Steps[None]:
        think, tools = self._think, self._tools
        pending: str | None = None  # a marker that ended the thought
        if think is not None and self._starts_in_reasoning:
            pending = yield from self._thought(think)
        frame = (*think.before_answer, *think.after_answer) if think is not None else ()
        always = (think.begin, think.end, *frame) if think is not None else ()
        of_tools = (*tools.openers, *tools.sections, *tools.closers) if tools is not None else ()
        markers = Markers((*always, *of_tools), self._strict)
        is_start = True
        while not self.sink.is_full:
            if is_start and pending is None and tools is not None and tools.bare:
                pending = yield from self._bare_call(tools)
                if self.sink.is_full:
                    return
            is_start = False
            piece, marker = ("", pending) if pending is not None else (yield from self.scan.until(markers))
            pending = None
            self.sink.content(piece, self.scan.piece_start)
            if marker == END:
                return
            if marker is None:
                continue
            if think is not None and marker in frame:
                if not self._frames(think, marker):
                    self._text(marker)
            elif think is not None and marker in (think.begin, think.end):
                if marker == think.begin and (marker in self._strict or not self.sink.has_content):
                    pending = yield from self._thought(think)
                    is_start = pending is None
                elif marker not in self._strict:
                    self._text(marker)
            elif tools is not None:
                yield from self._marked(tools, marker)

    def _frames(self, think: ThinkFormat, marker: str) -> bool:
        """Returns whether a marker frames the answer, and is not part of it."""
        if marker in think.before_answer and (marker in self._strict or not self.sink.has_content):
            self._in_frame = True
            return True
        return marker in think.after_answer and (marker in self._strict or self._in_frame)

    def _text(self, marker: str) -> None:
        """Emits a marker as content: its characters were just taken."""
        self.sink.content(marker, self.scan.offset - len(marker))

    def _thought(self, think: ThinkFormat) -> Steps[str | None]:
        """Reads the thought up to its end; returns the opener that ended it, if one did."""
        sink, scan = self.sink, self.scan
        sink.begin_reasoning()
        yield from scan.accept(think.label)
        openers: tuple[str, ...] = ()
        if think.ends_at_calls and self._tools is not None:
            all_openers = (*self._tools.openers, *self._tools.sections)
            openers = tuple(opener for opener in all_openers if self._is_certain(opener, self._tools))
        markers = Markers((think.begin, think.end, *openers), self._strict)
        is_start = True
        while True:
            piece, marker = yield from scan.until(markers)
            sink.reasoning(piece, scan.piece_start)
            is_start = is_start and not piece.strip()
            if marker == think.begin:
                if is_start:
                    yield from scan.accept(think.label)
                else:
                    sink.reasoning(marker, scan.offset - len(marker))
            elif marker is not None:
                if marker != END:
                    sink.end_reasoning()
                return marker if marker in openers else None

    def _is_certain(self, opener: str, tools: ToolFormat) -> bool:
        """Returns whether the opener cannot be ordinary text: it is a token, or contains one."""
        return opener in self._strict or any(text in opener for text in tools.inner if text in self._strict)

    def _bare_call(self, tools: ToolFormat) -> Steps[str | None]:
        """Reads a call without an opener at the output's beginning; anything else is left or becomes content.

        Returns the beginning of a thought, if that is what looked like a call.
        """
        self.scan.record()
        first = yield from self.scan.skip_space()
        is_bare = first != END and first in tools.bare
        if is_bare and self._think is not None and (yield from self.scan.accept(self._think.begin)):
            self.scan.forget()
            return self._think.begin
        if is_bare and (yield from tools.read("")):
            self.scan.forget()
        else:
            self._refused("", self.scan.recorded())
        return None

    def _marked(self, tools: ToolFormat, marker: str) -> Steps[None]:
        """Reads what a marker of the tools' format begins."""
        scan = self.scan
        scan.record()
        if marker in tools.closers and self.sink.calls:
            scan.forget()
            return
        start, raw = scan.record_start - len(marker), marker
        tools.after_section = marker in tools.sections
        if tools.after_section:
            opener = yield from self._opener_after(tools)
            is_call = opener is not None and (yield from tools.read(opener))
        else:
            is_call = marker in tools.openers and (yield from tools.read(marker))
        if is_call:
            scan.forget()
        else:
            self._refused(raw, scan.recorded(), start)

    def _opener_after(self, tools: ToolFormat) -> Steps[str | None]:
        """Returns the opener that follows, after white space at most, or None if there is none."""
        first = yield from self.scan.skip_space()
        if first == END:
            return None
        for opener in tools.openers:
            if (yield from self.scan.accept(opener)):
                return opener
        return None

    def _refused(self, marker: str, taken: str, start: int | None = None) -> None:
        """Emits as content what turned out to be no call."""
        text = marker + taken
        if marker or taken.strip():
            logger.debug("no tool call", format=type(self._tools).__name__, text=text[:200])
        self.sink.content(text, self.scan.record_start if start is None else start)
