"""Converts arguments that models write as plain text to JSON, by the types that a tool's schema allows."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

_DEPTH = 8  # of references and combinations that are followed
_MAY_BE_NULL = 16  # characters, white space included
_SPELLINGS = {"true": "true", "false": "false", "null": "null", "none": "null"}


_Known = dict[tuple[str, int], frozenset[str]]


def kinds_of(
    schema: object, root: Mapping[str, Any], depth: int = _DEPTH, known: _Known | None = None
) -> frozenset[str]:
    """Returns the JSON types that a schema allows; empty: unspecified.

    `known`: results for references at a depth, since they may refer to one another many times.
    """
    known = {} if known is None else known
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(item for item in kind if isinstance(item, str))
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if (reference, depth) not in known:
            known[reference, depth] = kinds_of(referred(reference, root), root, depth - 1, known)
        return known[reference, depth]
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(map(_kind, values))
    for name in ("anyOf", "oneOf"):
        parts = schema.get(name)
        if isinstance(parts, list) and parts:
            found = [kinds_of(part, root, depth - 1, known) for part in parts]
            return frozenset().union(*found) if all(found) else frozenset()
    parts = schema.get("allOf")
    if isinstance(parts, list):
        return next(filter(None, (kinds_of(part, root, depth - 1, known) for part in parts)), frozenset())
    if "properties" in schema:
        return frozenset(("object",))
    return frozenset(("array",)) if "items" in schema else frozenset()


def kinds_of_property(name: str, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the JSON types that the schema `root` of an object allows for one of its properties."""
    properties = root.get("properties")
    return kinds_of(properties.get(name) if isinstance(properties, Mapping) else None, root)


def referred(reference: str, root: Mapping[str, Any]) -> object:
    """Returns the value that a reference `#/…` names; None if there is none."""
    value: object = root
    for part in reference.removeprefix("#").split("/")[1:]:
        value = value.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
    return value


def _kind(value: object) -> str:
    """Returns the JSON type of a value."""
    if value is None:
        return "null"
    names = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for type_, name in names if isinstance(value, type_)), "object")


def spelled(text: str) -> str:
    """Returns `text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def json_value(text: str) -> object:
    """Returns the JSON value that `text` spells; `...`: it is no JSON."""
    try:
        value: object = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return ...
    return value


def literal(text: str) -> object:
    """Returns the value of a Python literal that JSON can represent; `...`: it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the source is a model's output
            value: object = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False).encode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ...
    return value


def as_json(text: str, kinds: frozenset[str]) -> str:
    """Returns JSON of a complete value from a model's text: of one of `kinds` if possible, else a string.

    Without kinds, text that is valid JSON is JSON, unless it is a string in quotes.
    """
    trimmed = text.strip()
    spelling = _SPELLINGS.get(trimmed.lower())
    if spelling is not None and kinds & {"boolean", "null"}:
        trimmed = spelling
    value = json_value(trimmed)
    if value is ... and kinds and "string" not in kinds:
        value = literal(trimmed)
        trimmed = "" if value is ... else json.dumps(value, ensure_ascii=False)
    if value is ... or isinstance(value, str):
        return json.dumps(text, ensure_ascii=False)
    kind = _kind(value)
    if not kinds or kind in kinds or (kind == "integer" and "number" in kinds):
        return trimmed
    if kind == "number" and "integer" in kinds and isinstance(value, float) and value.is_integer():
        return str(int(value))
    if kinds == {"boolean"} and value in (0, 1):
        return "true" if value else "false"
    return json.dumps(text, ensure_ascii=False) if "string" in kinds else trimmed


class ValueWriter:
    """Converts one value to JSON: strings as they arrive, all else once it is complete."""

    def __init__(self, kinds: frozenset[str], trim: bool) -> None:
        """`trim` drops a line break at the beginning and one at the end."""
        self._kinds = kinds
        self._trim = trim
        self._streams = kinds == {"string"}
        self._may_be_null = kinds == {"string", "null"}
        self._opened = False
        self._began = False
        self._break = ""  # a line break that may be the last character
        self._held: list[str] = []

    def feed(self, piece: str) -> str:
        """Returns JSON of what is certain after the piece."""
        if self._trim and not self._began and piece:
            self._began = True
            piece = piece.removeprefix("\n")
        if self._trim and piece:
            piece = self._break + piece
            self._break = "\n" if piece.endswith("\n") else ""
            piece = piece.removesuffix("\n")
        if self._may_be_null and not self._streams:
            self._held.append(piece)
            text = "".join(self._held)
            start = text.strip().lower()
            # Templates of several families have Python's word in their examples.
            if len(text) <= _MAY_BE_NULL and ("null".startswith(start) or "none".startswith(start)):
                return ""
            self._streams, self._held, piece = True, [], text
        if not self._streams:
            self._held.append(piece)
            return ""
        opening = "" if self._opened or not piece else '"'
        self._opened = self._opened or bool(piece)
        return opening + spelled(piece)

    def finish(self) -> str:
        """Returns the rest of a complete value."""
        if self._streams:
            return '"' if self._opened else '""'
        text = "".join(self._held)
        return as_json(text, self._kinds) if text or not self._may_be_null else '""'
