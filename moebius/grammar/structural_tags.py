"""Structural tags: text in which some passages, found by how they begin, follow a grammar.

Two forms are read: the one of `begin`, `schema`, `end` and `triggers`, and the one of a tree of formats that
xgrammar and vLLM have since (`{"format": {"type": "triggered_tags", ...}}`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from moebius.grammar.lark import ANY_TEXT, LarkGrammar

_MAX_DEPTH = 32


class StructuralTagError(ValueError):
    """The description is not one, or asks for what cannot be enforced; the message says where."""


def structural_tag_grammar(text: str) -> str:
    """Lark's text for the JSON of a structural tag. Raises StructuralTagError."""
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StructuralTagError(f"not valid JSON: {error}") from error
    if not isinstance(tag, dict):
        raise StructuralTagError("not a JSON object")
    grammar = LarkGrammar()
    if "format" in tag:
        return grammar.render(_Formats(grammar).rule(tag["format"], "format", 0))
    if "structures" not in tag:
        raise StructuralTagError("it has neither 'format' nor 'structures'")
    structures, triggers = _list(tag, "structures", ""), _list(tag, "triggers", "")
    tags = [
        {
            "begin": _text(structure, "begin", f"structures[{number}]"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": structure.get("end", ""),
        }
        for number, structure in enumerate(structures)
        if isinstance(structure, dict)
    ]
    if len(tags) != len(structures):
        raise StructuralTagError("'structures' holds something else than objects")
    described = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return grammar.render(_Formats(grammar).rule(described, "structures", 0))


class _Formats:
    """One rule for each format of the tree."""

    def __init__(self, grammar: LarkGrammar) -> None:
        self._grammar = grammar
        self._kinds: Mapping[str, Callable[[dict[str, Any], str, int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def rule(self, described: Any, place: str, depth: int) -> str:
        """Returns the name of the format's rule. Raises StructuralTagError naming the place."""
        if depth > _MAX_DEPTH:
            raise StructuralTagError(f"{place}: nested deeper than {_MAX_DEPTH} levels")
        if not isinstance(described, dict):
            raise StructuralTagError(f"{place} is not an object")
        kind = described.get("type")
        make = self._kinds.get(str(kind))
        if make is None:
            raise StructuralTagError(f"{place}.type is {kind!r}; allowed: {', '.join(self._kinds)}")
        return make(described, place, depth)

    def _const_string(self, described: dict[str, Any], place: str, depth: int) -> str:
        return self._grammar.rule(self._grammar.literal(_text(described, "value", place)))

    def _json_schema(self, described: dict[str, Any], place: str, depth: int) -> str:
        return self._grammar.json(described.get("json_schema", {}))

    def _regex(self, described: dict[str, Any], place: str, depth: int) -> str:
        return self._grammar.rule(f"/{regex_to_lark(_text(described, 'pattern', place))}/")

    def _any_text(self, described: dict[str, Any], place: str, depth: int) -> str:
        return self._grammar.rule(ANY_TEXT)

    def _sequence(self, described: dict[str, Any], place: str, depth: int) -> str:
        return self._grammar.rule(" ".join(self._elements(described, place, depth)))

    def _or(self, described: dict[str, Any], place: str, depth: int) -> str:
        return self._grammar.any_of(self._elements(described, place, depth))

    def _elements(self, described: dict[str, Any], place: str, depth: int) -> list[str]:
        elements = _list(described, "elements", place)
        if not elements:
            raise StructuralTagError(f"{place}.elements is empty")
        return [
            self.rule(element, f"{place}.elements[{number}]", depth + 1)
            for number, element in enumerate(elements)
        ]

    def _tag(self, described: dict[str, Any], place: str, depth: int, begin_from: int = 0) -> str:
        """`begin_from`: how much of the beginning has been read as the trigger."""
        begin, end = _text(described, "begin", place)[begin_from:], described.get("end", "")
        ends = [end] if isinstance(end, str) else end
        if not (isinstance(ends, list) and all(isinstance(text, str) for text in ends) and ends):
            raise StructuralTagError(f"{place}.end is neither a text nor a list of texts")
        content = described.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text":
            inside = self._grammar.any_of(
                [self._grammar.until(text) if text else self._grammar.rule(ANY_TEXT) for text in ends]
            )
        else:
            inside = self.rule(content, f"{place}.content", depth + 1)
            inside += " " + self._grammar.any_of([self._grammar.literal(text) for text in ends])
        return self._grammar.rule(f"{self._grammar.literal(begin)} {inside}")

    def _triggered_tags(self, described: dict[str, Any], place: str, depth: int) -> str:
        triggers, tags = _texts(described, "triggers", place), _list(described, "tags", place)
        if not tags:
            raise StructuralTagError(f"{place}.tags is empty")
        starts: dict[str, list[str]] = {}
        whole: list[str] = []
        for number, tag in enumerate(tags):
            where = f"{place}.tags[{number}]"
            begin = _text(tag, "begin", where)
            trigger = max((text for text in triggers if begin.startswith(text)), key=len, default=None)
            if not trigger:
                raise StructuralTagError(f"{where}.begin starts with none of the triggers {list(triggers)}")
            starts.setdefault(trigger, []).append(self._tag(tag, where, depth, len(trigger)))
            whole.append(self._tag(tag, where, depth))
        triggered = self._grammar.any_of(
            [
                f"{self._grammar.until(trigger)} {self._grammar.any_of(rest)}"
                for trigger, rest in starts.items()
            ]
        )
        tail = self._grammar.rule(ANY_TEXT)
        first = self._grammar.any_of(whole) if described.get("at_least_one") else ""
        if described.get("stop_after_first"):
            return self._grammar.rule(first or f"{triggered} | {tail}")
        return self._grammar.rule(f"{first} {triggered}* {tail}")

    def _tags_with_separator(self, described: dict[str, Any], place: str, depth: int) -> str:
        tags = _list(described, "tags", place)
        if not tags:
            raise StructuralTagError(f"{place}.tags is empty")
        made = [self._tag(tag, f"{place}.tags[{number}]", depth) for number, tag in enumerate(tags)]
        one = self._grammar.any_of(made)
        separator = self._grammar.literal(_text(described, "separator", place))
        more = "" if described.get("stop_after_first") else f"({separator} {one})*"
        body = self._grammar.rule(f"{one} {more}")
        return body if described.get("at_least_one") else self._grammar.rule(f"{body}?")


def _text(described: Any, key: str, place: str) -> str:
    value = described.get(key) if isinstance(described, dict) else None
    if not isinstance(value, str):
        raise StructuralTagError(f"{_at(place, key)} is not a text")
    return value


def _list(described: dict[str, Any], key: str, place: str) -> list[Any]:
    value = described.get(key)
    if not isinstance(value, list):
        raise StructuralTagError(f"{_at(place, key)} is not a list")
    return value


def _texts(described: dict[str, Any], key: str, place: str) -> Sequence[str]:
    values = _list(described, key, place)
    if not all(isinstance(value, str) for value in values):
        raise StructuralTagError(f"{_at(place, key)} holds something else than texts")
    return values


def _at(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
