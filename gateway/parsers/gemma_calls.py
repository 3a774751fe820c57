"""Gemma 4's tool calls: objects whose keys have no quotes and whose strings stand between tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gateway.parsers.framing import ToolFraming
from gateway.parsers.json_reader import MAX_LABEL, pass_value, read_label
from gateway.parsers.machine import Reading, ToolFormat
from gateway.parsers.scanner import END, Steps, run_of
from gateway.parsers.typed_values import as_json, kinds_of_property, spelled

_QUOTE = '<|"|>'
_NAME = run_of(re.compile(r"[\w.\-/:]*"))
_KEY = run_of(re.compile(r"[^:,{}\[\]\"<\n]*"))
_SCALAR = run_of(re.compile(r"[^,{}\[\]\"<]*"))
_DEPTH = 64  # of objects and arrays; deeper values are left out
_MAX_SCALAR = 2**16  # characters


class Gemma4(ToolFormat):
    """`<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>`."""

    framing = ToolFraming(
        "<|tool_call>call:{name}{",
        "}<tool_call|>",
        arguments="parameters",
        parameter_begin="{name}:",
        parameter_separator=",",
        quote=_QUOTE,
    )
    openers = ("<|tool_call>",)
    closers = ("<tool_call|>",)
    inner = (_QUOTE,)

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        # A string may contain any text; the token that ends a call is certain.
        self._ends = tuple(text for text in self.closers if text in self.tokens)
        self._string_end = self.markers(_QUOTE, *self._ends)
        self._cut = False  # the call ended within a value

    def read(self, opener: str) -> Steps[bool]:
        """Reads a call after the token that begins it."""
        yield from self.scan.skip_space()
        if not (yield from self.scan.accept("call:")):
            return False
        name = yield from self.scan.collect_while(_NAME, MAX_LABEL)
        if not name or (yield from self.scan.skip_space()) != "{":
            return False
        if opener not in self.tokens and name not in self.tools:
            return False
        self._cut = False
        self.sink.start_call(name, self.new_id())
        self.scan.forget()  # from here on it is a call
        if (yield from self._object(self.tools[name].parameters if name in self.tools else {}, 0)):
            self.sink.end_call()
        return True

    def _object(self, root: Mapping[str, Any], depth: int) -> Steps[bool]:
        """Emits an object from its bracket on; returns whether it was complete. `root`: {} in nested ones."""
        yield from self.scan.accept("{")
        opening = "{"
        while True:
            first = yield from self._next()
            if first == END and not self._cut:
                return False
            if first == "}" or self._cut:
                if not self._cut:
                    yield from self.scan.accept("}")
                self.sink.arguments("{}" if opening == "{" else "}")
                return True
            key = yield from self._key(first)
            if key is None or (yield from self.scan.skip_space()) != ":":
                yield from self._skip_one()
                continue
            yield from self.scan.accept(":")
            self.sink.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            if not (yield from self._value(kinds_of_property(key, root), depth)):
                return False

    def _array(self, depth: int) -> Steps[bool]:
        """Emits an array, as `_object` does an object."""
        yield from self.scan.accept("[")
        opening = "["
        while True:
            first = yield from self._next()
            if first == END and not self._cut:
                return False
            if first in ("]", "}") or self._cut:
                if not self._cut:
                    yield from self.scan.accept("]")
                self.sink.arguments("[]" if opening == "[" else "]")
                return True
            self.sink.arguments(opening)
            opening = ", "
            if not (yield from self._value(frozenset(), depth)):
                return False

    def _next(self) -> Steps[str]:
        """Returns the next character that is no space and no comma; notes when the call ends."""
        while not self._cut:
            first = yield from self.scan.skip_space()
            if first == ",":
                yield from self.scan.accept(",")
            elif first != "<" or not (yield from self._call_ends()):
                return first
        return END

    def _call_ends(self) -> Steps[bool]:
        """Takes a text that ends calls, if it follows; returns whether it did."""
        for text in self.closers:
            if (yield from self.scan.accept(text)):
                self._cut = True
        return self._cut

    def _skip_one(self) -> Steps[None]:
        """Skips a character that is not allowed here."""
        first = yield from self.scan.peek()
        if first != END:
            yield from self.scan.accept(first)

    def _key(self, first: str) -> Steps[str | None]:
        """Returns a key, with or without quotes, or None if there is none."""
        if first == '"':
            return (yield from read_label(self.scan, self._ends))
        if first == "<" and (yield from self.scan.accept(_QUOTE)):
            text, marker = yield from self.scan.collect(self._string_end, MAX_LABEL)
            self._cut = marker in self.closers
            return text if marker == _QUOTE else None
        key = (yield from self.scan.collect_while(_KEY, MAX_LABEL, self._ends)).strip()
        return key or None

    def _value(self, kinds: frozenset[str], depth: int) -> Steps[bool]:
        """Emits a value as JSON; returns whether it was complete."""
        first = yield from self.scan.skip_space()
        if first == END:
            return False
        if first == "<" and (yield from self.scan.accept(_QUOTE)):
            return (yield from self._string())
        if first == '"':
            return (yield from pass_value(self.scan, self.sink.arguments, self._ends))
        if first in "{[" and depth < _DEPTH:
            return (yield from (self._object({}, depth + 1) if first == "{" else self._array(depth + 1)))
        text = yield from self._scalar()
        if text is None:
            return False
        self.sink.arguments(as_json(text, kinds) if text else "null")
        return True

    def _scalar(self) -> Steps[str | None]:
        """Returns a number or a word, or None if the output ended in it."""
        pieces: list[str] = []
        while True:
            pieces.append((yield from self.scan.collect_while(_SCALAR, _MAX_SCALAR, self._ends)))
            first = yield from self.scan.peek()
            if first == END:
                return None
            if first in ",}]" or (first == "<" and (yield from self._call_ends())):
                return "".join(pieces).strip()
            pieces.append(first)
            yield from self.scan.accept(first)

    def _string(self) -> Steps[bool]:
        """Emits the text up to the next quote; returns whether it was complete."""
        self.sink.arguments('"')
        while True:
            piece, marker = yield from self.scan.until(self._string_end)
            if piece:
                self.sink.arguments(spelled(piece))
            if marker == END:
                return False
            if marker is not None:
                self._cut = marker in self.closers
                self.sink.arguments('"')
                return True
