"""Reads tool calls written as Python: a list of calls with keyword arguments, each emitted when complete."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from gateway.parsers.framing import ToolFraming
from gateway.parsers.json_reader import MAX_LABEL
from gateway.parsers.machine import ToolFormat
from gateway.parsers.scanner import END, Steps, run_of
from gateway.parsers.typed_values import json_value, literal

_WORD = run_of(re.compile(r"[\w.\-/:]*"))
_SYNTAX = re.compile(r"""["'()\[\]{},=\\]""")
_MAX_ARGUMENT = 2**24  # characters
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class _Expression:
    """Finds the end of an argument: a comma or a bracket that is not its own."""

    def __init__(self) -> None:
        self._closing: list[str] = []
        self._quote = ""
        self._escaped = False

    def advance(self, text: str, start: int, limit: int) -> tuple[int, bool]:
        """Returns how far the argument reaches in `text[start:limit]`, and whether it is over."""
        place = start
        while place < limit:
            if self._escaped:
                self._escaped, place = False, place + 1
                continue
            match = _SYNTAX.search(text, place, limit)
            if match is None:
                return limit, False
            if self._ends_at(match.group()):
                return match.start(), True
            place = match.end()
        return place, False

    def _ends_at(self, character: str) -> bool:
        if self._quote:
            self._escaped = character == "\\"
            self._quote = "" if character == self._quote else self._quote
        elif character in "\"'":
            self._quote = character
        elif character in _CLOSING:
            self._closing.append(_CLOSING[character])
        elif not self._closing:
            return character in ",)]}"
        elif character == self._closing[-1]:
            self._closing.pop()
        return False


class Pythonic(ToolFormat):
    """Llama 3.2 and 4, and others: `[get_weather(city="Oslo"), get_time()]` is the whole answer."""

    framing = ToolFraming(
        "{name}(",
        ")",
        begin="[",
        separator=", ",
        end="]",
        arguments="parameters",
        parameter_begin="{name}=",
        parameter_separator=", ",
        values="python",
        place="bare",
        marker="<|python_start|>",
    )
    openers = ("<|python_start|>",)
    closers = ("<|python_end|>",)
    bare = "["

    def read(self, opener: str) -> Steps[bool]:
        """Reads a list from its beginning; a list of other things is content."""
        yield from self.scan.skip_space()
        if not (yield from self.scan.accept("[")):
            return False
        calls = self.sink.calls
        while not self.sink.is_full:
            yield from self.scan.skip_space()
            name = yield from self.scan.collect_while(_WORD, MAX_LABEL)
            if not name or (yield from self.scan.skip_space()) != "(":
                break
            if not calls and name not in self.tools and self.sink.calls == calls:
                break  # prose in brackets, a Markdown link
            yield from self.scan.accept("(")
            self.sink.start_call(name, self.new_id())
            self.scan.forget()  # from here on it is a call
            if not (yield from self._arguments(name)):
                break
            self.sink.end_call()
            if (yield from self.scan.skip_space()) != ",":
                yield from self.scan.accept("]")
                break
            yield from self.scan.accept(",")
        return self.sink.calls > calls

    def _arguments(self, name: str) -> Steps[bool]:
        """Emits the arguments, whose opening bracket is taken; returns whether they were complete."""
        declared = self.tools[name].parameters.get("properties") if name in self.tools else None
        positions = iter(declared if isinstance(declared, dict) else ())
        opening = "{"
        while True:
            first = yield from self.scan.skip_space()
            if first == END:
                return False
            if first == ")":
                yield from self.scan.accept(")")
                self.sink.arguments("{}" if opening == "{" else "}")
                return True
            if first == ",":
                yield from self.scan.accept(",")
                continue
            expression = _Expression()
            text = yield from self.scan.collect_while(expression.advance, _MAX_ARGUMENT)
            if not text or (yield from self.scan.peek()) not in (",", ")"):
                return False
            key, value = self._split(text)
            key = key or next(positions, "")
            if not key:
                continue
            self.sink.arguments(f"{opening}{json.dumps(key)}: {value}")
            opening = ", "

    @staticmethod
    def _split(text: str) -> tuple[str, str]:
        """Returns an argument's keyword (empty: none) and its value, as JSON."""
        match = re.match(r"\s*([A-Za-z_][\w-]*)\s*=(?!=)", text)
        source = text if match is None else text[match.end() :]
        value = json_value(source)
        if value is ...:
            value = literal(_python(source))
        spelled = source.strip() if value is ... else value
        return ("" if match is None else match.group(1)), json.dumps(spelled, ensure_ascii=False)


class Lfm2(Pythonic):
    """LFM2: the list is between two tokens, anywhere in the answer."""

    framing = replace(
        Pythonic.framing, begin="<|tool_call_start|>[", end="]<|tool_call_end|>", place="marked", marker=""
    )
    openers = ("<|tool_call_start|>",)
    closers = ("<|tool_call_end|>",)
    bare = ""


def _python(source: str) -> str:
    """Returns the source with JSON's constants, which models mix in, as Python's."""
    constants = {"true": "True", "false": "False", "null": "None"}
    return constants.get(source.strip(), source)
