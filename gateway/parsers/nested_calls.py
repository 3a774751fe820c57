"""Reads tool calls whose arguments are elements, with objects and arrays as nested elements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.parsers.framing import ToolFraming
from gateway.parsers.json_reader import MAX_LABEL
from gateway.parsers.machine import Reading, ToolFormat
from gateway.parsers.scanner import END, Steps
from gateway.parsers.typed_values import ValueWriter, as_json, kinds_of, referred
from gateway.parsers.xml_calls import attributes

_NS = "]<]minimax[>["
_ITEM = "item"
_DEPTH = 64  # of elements; deeper ones are text
# Kinds of text after a token of the format.
_OPEN, _CLOSE, _CALL_END, _NEXT_CALL = "open", "close", "call end", "next call"
_TEXT, _OVER = "text", "over"


class MinimaxM3(ToolFormat):
    """MiniMax M3: a token before every tag. An argument's tag is its name, an array item's `item`."""

    framing = ToolFraming(
        _NS + '<invoke name="{name}">',
        _NS + "</invoke>\n",
        begin=_NS + "<tool_call>\n",
        end=_NS + "</tool_call>",
        arguments="parameters",
        parameter_begin=_NS + "<{name}>",
        parameter_end=_NS + "</{name}>",
    )
    openers = (_NS + "<invoke",)
    sections = (_NS + "<tool_call>",)
    closers = (_NS + "</tool_call>",)
    inner = (_NS, "<tool_call>", "</tool_call>")

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._tag = self.markers(_NS)
        self._tag_end = self.markers(">")

    def read(self, opener: str) -> Steps[bool]:
        """Reads calls after the beginning of the opening tag."""
        head = yield from self._name()
        name = attributes(head).get("name", "")
        if not name or (not self.after_section and name not in self.tools):
            return False
        while name and not self.sink.is_full:
            self.sink.start_call(name, self.new_id())
            self.scan.forget()  # from here on it is a call
            ended = yield from self._arguments(name)
            if ended != _NEXT_CALL:
                break
            name = attributes((yield from self._name())).get("name", "")
        return True

    def _name(self) -> Steps[str]:
        """Returns a tag's text up to its end; empty: it is too long, or the output is over."""
        head, marker = yield from self.scan.collect(self._tag_end, MAX_LABEL)
        return head if marker == ">" else ""

    def _after_tag(self) -> Steps[tuple[str, str]]:
        """Returns the kind of what follows a token of the format, and the name of an element that begins."""
        scan = self.scan
        for text, what in (("</invoke>", _CALL_END), ("</tool_call>", _CALL_END), ("<invoke ", _NEXT_CALL)):
            if (yield from scan.accept(text)):
                return what, ""
        if (yield from scan.accept("</")):
            yield from self._name()
            return _CLOSE, ""
        if not (yield from scan.accept("<")):
            return _TEXT, ""
        return _OPEN, (yield from self._name())

    def _arguments(self, tool: str) -> Steps[str]:
        """Emits a call's arguments; returns what ended them."""
        root = self.tools[tool].parameters if tool in self.tools else {}
        opening = "{"
        while True:
            _, marker = yield from self.scan.until(self._tag)
            if marker is None:
                continue
            if marker == END:
                return _OVER
            what, key = yield from self._after_tag()
            if key:
                self.sink.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
                opening = ", "
                what = yield from self._argument(_inner(root, key, root), root)
            if what == _OVER:
                return _OVER
            if what in (_CALL_END, _NEXT_CALL):
                self.sink.arguments("{}" if opening == "{" else "}")
                self.sink.end_call()
                return what

    def _argument(self, schema: object, root: Mapping[str, Any]) -> Steps[str]:
        """Emits one value, a string as it arrives; returns what ended it."""
        kinds = kinds_of(schema, root)
        if not kinds or kinds & {"object", "array"}:
            text, what = yield from self._element(schema, root, 1)
            if what != _OVER:
                self.sink.arguments(text)
            return what
        writer = ValueWriter(kinds, trim=False)
        while True:
            piece, marker = yield from self.scan.until(self._tag)
            what, name = _TEXT, ""
            if marker == _NS:
                what, name = yield from self._after_tag()
                if what in (_TEXT, _OPEN):
                    # In a value without elements it is text.
                    piece, what = piece + _NS + (f"<{name}>" if name else ""), _TEXT
            written = writer.feed(piece)
            if written:
                self.sink.arguments(written)
            if marker == END:
                return _OVER
            if what in (_CLOSE, _CALL_END, _NEXT_CALL):
                self.sink.arguments(writer.finish())
                return what

    def _element(self, schema: object, root: Mapping[str, Any], depth: int) -> Steps[tuple[str, str]]:
        """Returns JSON of an element's value, and what ended it."""
        texts: list[str] = []
        children: list[tuple[str, str]] = []
        while True:
            piece, marker = yield from self.scan.until(self._tag)
            texts.append(piece)
            if marker is None:
                continue
            what, name = (_OVER, "") if marker == END else (yield from self._after_tag())
            if name and depth < _DEPTH:
                value, what = yield from self._element(_inner(schema, name, root), root, depth + 1)
                children.append((name, value))
                what = _OPEN if what == _CLOSE else what  # the nested element's end
            elif what == _TEXT or name:
                texts.append(_NS + (f"<{name}>" if name else ""))
            if what not in (_OPEN, _TEXT):
                return _json_of("".join(texts), children, kinds_of(schema, root)), what


def _inner(schema: object, name: str, root: Mapping[str, Any]) -> object:
    """Returns the schema of a property or of an array's elements, or None if there is none."""
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        schema = referred(schema["$ref"], root)
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return schema.get("items") if name == _ITEM else None


def _json_of(text: str, children: list[tuple[str, str]], kinds: frozenset[str]) -> str:
    """Returns JSON of an element: an array if all in it are items, an object of others, else its text."""
    if children:
        if all(name == _ITEM for name, _ in children) and ("object" not in kinds or "array" in kinds):
            return f"[{', '.join(value for _, value in children)}]"
        pairs = (f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in children)
        return f"{{{', '.join(pairs)}}}"
    if not text.strip() and kinds and "string" not in kinds:
        return "[]" if "array" in kinds else "{}" if "object" in kinds else as_json(text, kinds)
    return as_json(text, kinds)
