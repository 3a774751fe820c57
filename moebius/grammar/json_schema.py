"""JSON schemas as grammars: structure and numbers are written here, all else is left to llguidance's `%json`.

llguidance keeps bounds of numbers as float64, lets numbers have any number of digits, and knows no
`uniqueItems`. So objects, arrays, alternatives and references become rules, numbers terminals of
`moebius/grammar/numbers.py`, and strings, and what combines schemas (`allOf`, keywords next to `$ref` or
`anyOf`), `%json` of that part. In such a part numbers are what llguidance makes of them, so it is refused
where a float64 does not hold its bounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from moebius.grammar.errors import GrammarError, Unsatisfiable, quoted
from moebius.grammar.json_parts import (
    ALL_TYPES,
    Reader,
    WholeSchema,
    are_disjoint,
    check_exact,
    finite_values,
    keywords_of,
)
from moebius.grammar.numbers import constant_terminal, integer_terminal, number_terminal, read_bounds
from moebius.grammar.regex import literal

_OBJECT = frozenset(("properties", "required", "additionalProperties"))
_ARRAY = frozenset(("items", "prefixItems", "minItems", "maxItems", "uniqueItems"))
_STRING = frozenset(("minLength", "maxLength", "pattern", "format"))
_NUMBER = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_KEY = r'"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"'  # each character in one way
_MOST_UNIQUE = 64  # bits of a rule's parameter
# Properties or first items: each is a level of rules, and llguidance descends on the stack.
_MOST_PARTS = 400


def json_grammar(schema: Any, options: Mapping[str, Any]) -> str:
    """Returns the text of a grammar for JSON that satisfies a schema.

    Args:
        schema: any; its own `x-guidance` goes before `options`.
        options: of llguidance's compiler (`lark.json_options`).
    Raises:
        GrammarError: naming the keyword that cannot be enforced.
    """
    own = schema.get("x-guidance") if isinstance(schema, Mapping) else None
    chosen = {**options, **(own if isinstance(own, Mapping) else {})}
    if isinstance(schema, Mapping):
        schema = {key: value for key, value in schema.items() if key != "x-guidance"}
    writer = _Writer(Reader(schema), chosen)
    try:
        return writer.text(schema)
    except WholeSchema:
        return _Writer(Reader(schema), chosen).text(schema, whole=True)
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None


class _Writer:
    """Rules and terminals of one schema."""

    def __init__(self, reader: Reader, options: Mapping[str, Any]) -> None:
        self._reader = reader
        self._options = options
        self._lenient = bool(options.get("lenient"))
        self._lines: list[str] = []
        self._known: dict[str, str] = {}  # names by body, of references by what they say
        self._impossible: dict[str, Unsatisfiable] = {}  # references that nothing satisfies
        self._any_name = ""
        self._types: Mapping[str, Callable[[Mapping[str, Any], str], tuple[list[str], list[str]]]] = {
            "null": lambda _schema, _place: (['"null"'], []),
            "boolean": lambda _schema, _place: (['"true"', '"false"'], []),
            "integer": self._numbers,
            "number": self._numbers,
            "string": self._strings,
            "array": self._array,
            "object": self._object,
        }

    def text(self, schema: Any, whole: bool = False) -> str:
        """Returns all rules, the first of which is `start`; `whole`: nothing is written here."""
        if whole or not self._options.keys() <= _READ_OPTIONS:
            start = self._left(schema, "", whole=True)
        else:
            start = self._rule(schema, "")
        pattern = self._options.get("whitespace_pattern")
        if self._options.get("whitespace_flexible", True) is False and pattern is None:
            pattern = ""
        skipped = [f"%ignore {literal(pattern)}"] if pattern else []
        lines = ['%llguidance {"ignore_once": true}', f"start: {start}", *skipped, *self._lines]
        return "\n".join(lines) + "\n"

    def _rule(self, schema: Any, place: str) -> str:
        """Returns the name of the rule for a value of the schema. Raises Unsatisfiable, GrammarError."""
        return self._joined(self._parts(schema, place))

    def _joined(self, parts: tuple[list[str], list[str]]) -> str:
        terminals, rules = parts
        ways = (
            [self._terminal(" | ".join(f"({one})" for one in dict.fromkeys(terminals)))] if terminals else []
        )
        ways += dict.fromkeys(rules)
        return ways[0] if len(ways) == 1 else self._named(" | ".join(ways), "r")

    def _terminal(self, body: str) -> str:
        return self._named(body, "T")

    def _named(self, body: str, kind: str) -> str:
        key = f"{kind}: {body}"
        name = self._known.get(key)
        if name is None:
            name = self._known[key] = f"{kind}{len(self._known)}"
            self._lines.append(f"{name}: {body}")
        return name

    def _parts(self, schema: Any, place: str) -> tuple[list[str], list[str]]:
        """Returns the bodies of terminals, and names of rules: a value is one of them."""
        if schema is False:
            raise Unsatisfiable(f"false at {place or 'the top'}")
        if schema is True:
            return [], [self._any()]
        if not isinstance(schema, Mapping):
            raise GrammarError(f"a schema is an object, true or false (at {place or 'the top'})")
        keywords = keywords_of(schema)
        if "$ref" in keywords and len(keywords) == 1:
            return [], [self._reference(schema["$ref"])]
        for name in ("anyOf", "oneOf"):
            options = schema.get(name)
            if keywords != {name} or not isinstance(options, list) or not options:
                continue
            if name == "anyOf" or self._lenient or are_disjoint(options, self._reader):
                return self._alternatives(options, f"{place}.{name}")
        if keywords == {"allOf"} and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
            return self._parts(schema["allOf"][0], f"{place}.allOf[0]")
        if keywords and keywords <= {"type", "enum", "const"} and keywords != {"type"}:
            return self._constants(schema, place)
        if not keywords <= {"type"} | _OBJECT | _ARRAY | _STRING | _NUMBER or isinstance(
            schema.get("items"), list
        ):
            return [], [self._left(schema, place)]
        return self._by_type(schema, keywords, place)

    def _by_type(
        self, schema: Mapping[str, Any], keywords: frozenset[str], place: str
    ) -> tuple[list[str], list[str]]:
        if not keywords:
            return [], [self._any()]
        types = schema.get("type", list(ALL_TYPES))
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not types or not all(one in self._types for one in types):
            raise GrammarError(f"type is {schema['type']!r:.100}; allowed: {', '.join(self._types)}")
        if "number" in types:
            types = [one for one in types if one != "integer"]
        return self._first_or_all(
            [partial(self._types[one], {**schema, "type": one}, place) for one in types]
        )

    def _alternatives(self, options: Sequence[Any], place: str) -> tuple[list[str], list[str]]:
        return self._first_or_all(
            [partial(self._parts, option, f"{place}[{number}]") for number, option in enumerate(options)]
        )

    @staticmethod
    def _first_or_all(
        made: Sequence[Callable[[], tuple[list[str], list[str]]]],
    ) -> tuple[list[str], list[str]]:
        """Returns all that can be satisfied; Unsatisfiable where none can."""
        terminals: list[str] = []
        rules: list[str] = []
        problem: Unsatisfiable | None = None
        for make in made:
            try:
                some, others = make()
            except Unsatisfiable as error:
                problem = problem or error
                continue
            terminals += some
            rules += others
        if not terminals and not rules:
            raise problem or Unsatisfiable("there are no alternatives")
        return terminals, rules

    def _reference(self, reference: Any) -> str:
        key = f"$ref {reference}"
        if key in self._impossible:
            raise self._impossible[key]
        name = self._known.get(key)
        if name is None:
            target = self._reader.target(reference)
            name = self._known[key] = f"ref{len(self._known)}"  # now, since it may refer to itself
            try:
                self._lines.append(f"{name}: {self._rule(target, str(reference))}")
            except Unsatisfiable as error:
                self._impossible[key] = error
                raise
        return name

    def _left(self, schema: Any, place: str, whole: bool = False) -> str:
        """Returns what llguidance makes of a part."""
        described = schema if whole else self._reader.standing_alone(schema)
        check_exact(described, place)
        if isinstance(described, Mapping):
            described = {**described, "x-guidance": dict(self._options)}
        return self._named(f"%json {json.dumps(described, ensure_ascii=False)}", "r")

    def _constants(self, schema: Mapping[str, Any], place: str) -> tuple[list[str], list[str]]:
        values = finite_values({key: schema[key] for key in ("type", "enum", "const") if key in schema})
        if not values:
            raise Unsatisfiable(f"no value is left at {place or 'the top'}")
        numbers = [one for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
        others = [one for one in values if not isinstance(one, int | float) or isinstance(one, bool)]
        rules = [self._left({"enum": others}, place)] if others else []
        return [constant_terminal(one) for one in numbers], rules

    def _numbers(self, schema: Mapping[str, Any], place: str) -> tuple[list[str], list[str]]:
        if schema.get("multipleOf") is not None:
            kept = {key: value for key, value in schema.items() if key in _NUMBER or key == "type"}
            return [], [self._left(kept, place)]
        write = integer_terminal if schema["type"] == "integer" else number_terminal
        return [write(read_bounds(schema))], []

    def _strings(self, schema: Mapping[str, Any], place: str) -> tuple[list[str], list[str]]:
        kept = {key: value for key, value in schema.items() if key in _STRING}
        return [], [self._left({"type": "string", **kept}, place)]

    def _any(self) -> str:
        """Returns any value."""
        if not self._any_name:
            self._any_name = "any"
            number = number_terminal(read_bounds({}))
            other = self._terminal(f'{number} | "true" | "false" | "null"')
            (string,) = self._strings({}, "")[1]
            pair = f'{self._terminal(literal(_KEY))} ":" any'
            self._lines += [
                f"any: {string} | {other} | any_object | any_array",
                f'any_object: "{{" ({pair} ("," {pair})*)? "}}"',
                'any_array: "[" (any ("," any)*)? "]"',
            ]
        return self._any_name

    def _object(self, schema: Mapping[str, Any], place: str) -> tuple[list[str], list[str]]:
        listed, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not isinstance(listed, Mapping) or not isinstance(required, list):
            raise GrammarError(f"properties is an object, and required a list (at {place or 'the top'})")
        if len(listed) + len(required) > _MOST_PARTS:
            return [], [self._left(schema, place)]
        members: list[tuple[str, bool]] = []
        for name in dict.fromkeys([*listed, *required]):
            where = f"{place}.properties.{name}" if place else f"properties.{name}"
            try:
                value = self._rule(listed.get(name, others), where)
            except Unsatisfiable as error:
                if name in required:
                    raise Unsatisfiable(f"the property {name!r:.100} is needed: {error}") from error
                continue
            members.append((f'{quoted(json.dumps(name, ensure_ascii=False))} ":" {value}', name in required))
        body = self._members(members, self._other_member([*listed, *required], others, place))
        return [], [self._named(f'"{{" {body} "}}"', "r")]

    def _other_member(self, taken: Sequence[str], schema: Any, place: str) -> str:
        """Returns a member that is not listed; empty: there are none."""
        try:
            value = self._rule(schema, f"{place}.additionalProperties")
        except Unsatisfiable:
            return ""
        key = literal(_KEY)
        if taken:
            names = dict.fromkeys(quoted(json.dumps(name, ensure_ascii=False)) for name in taken)
            key = f"{key} & ~({' | '.join(names)})"
        return f'{self._terminal(key)} ":" {value}'

    def _members(self, members: Sequence[tuple[str, bool]], other: str) -> str:
        """Listed members in their order, those that are not needed perhaps left out, then others."""
        fresh = f'({other} ("," {other})*)?' if other else ""  # where nothing was written yet
        later = f'("," {other})*' if other else ""  # where something was
        for number in reversed(range(len(members))):
            one, is_needed = members[number]
            if is_needed:
                fresh, later = f"{one} {later}", f'"," {one} {later}'
            elif any(needed for _, needed in members[:number]):  # something is written in any case
                later = f'("," {one})? {later}'
            else:
                tail = self._named(later, "r") if later else ""
                rest = self._named(fresh, "r") if fresh else ""
                fresh, later = (
                    f"({one} {tail} | {rest})" if rest else f"({one} {tail})?",
                    f'("," {one})? {tail}',
                )
        return fresh

    def _array(self, schema: Mapping[str, Any], place: str) -> tuple[list[str], list[str]]:
        least, most = _count(schema, "minItems", place) or 0, _count(schema, "maxItems", place)
        if most is not None and least > most:
            raise Unsatisfiable(f"minItems ({least}) is greater than maxItems ({most})")
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        if schema.get("uniqueItems") is True and (most is None or most > 1) and not self._lenient:
            return [], [self._unique(schema, least, most, place)]
        if len(first) > _MOST_PARTS:
            return [], [self._left(schema, place)]
        rules: list[str] = []
        for number, part in enumerate(first if most is None else first[:most]):
            try:
                rules.append(self._rule(part, f"{place}.prefixItems[{number}]"))
            except Unsatisfiable:
                if number < least:
                    raise
                most = number
                break
        rest = ""
        if most is None or most > len(rules):
            try:
                rest = self._rule(items, f"{place}.items")
            except Unsatisfiable:
                if least > len(rules):
                    raise
        return [], [self._named(f'"[" {_items(rules, rest, least, most)} "]"', "r")]

    def _unique(self, schema: Mapping[str, Any], least: int, most: int | None, place: str) -> str:
        """Returns the items of a few values, none of them twice: which there were are the bits of a rule's
        parameter.
        """
        values = None if schema.get("prefixItems") else self._reader.values(schema.get("items", True))
        if values is None or len(values) > _MOST_UNIQUE:
            raise GrammarError(
                f"uniqueItems (at {place or 'the top'}) can be enforced where items are one of at most "
                f"{_MOST_UNIQUE} values (enum, const, boolean, integers within bounds)"
            )
        if len(values) < least:
            raise Unsatisfiable(f"minItems ({least}) is greater than the number of values ({len(values)})")
        texts = [
            constant_terminal(one)
            if isinstance(one, int | float) and not isinstance(one, bool)
            else quoted(json.dumps(one, ensure_ascii=False))
            for one in values
        ]
        number = len(self._known)
        item, after = f"item{number}", f"after{number}"
        self._known[item] = item
        more = "" if most is None or most >= len(values) else f" %if bit_count_lt(_, {most})"
        choices = [f"{text} {after}::set_bit({bit}) %if bit_clear({bit})" for bit, text in enumerate(texts)]
        self._lines.append(f"{item}::_: " + "\n  | ".join(choices))
        self._lines.append(f'{after}::_: "]" %if bit_count_ge(_, {least})\n  | "," {item}::_{more}')
        return self._named(f'"[" {item}::0x0' + (' | "[" "]"' if least == 0 else ""), "r")


_READ_OPTIONS = {"whitespace_pattern", "whitespace_flexible", "lenient", "coerce_one_of"}


def _items(first: Sequence[str], rest: str, least: int, most: int | None) -> str:
    """Returns the inside of an array."""
    if not first:
        if not rest or most == 0:
            return ""
        repeated = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        body = rest if most == 1 else f'{rest} ("," {rest}){repeated}'
        return body if least else f"({body})?"
    fewest, bound = max(least - len(first), 0), "" if most is None else most - len(first)
    tail = f'("," {rest}){{{fewest},{bound}}}' if rest and bound != 0 else ""
    for number in reversed(range(1, len(first))):
        tail = f'"," {first[number]} {tail}'
        if number >= least:
            tail = f"({tail})?"
    body = f"{first[0]} {tail}"
    return body if least else f"({body})?"


def _count(schema: Mapping[str, Any], keyword: str, place: str) -> int | None:
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise GrammarError(f"{keyword} is {value!r:.100}; it is a whole number (at {place or 'the top'})")
    return int(value)
