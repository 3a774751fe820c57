"""What a grammar needs to know of a JSON schema: references, types, values if they are few, exact numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from moebius.grammar.errors import GrammarError, Unsatisfiable
from moebius.grammar.numbers import read_bounds

ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")
# Keywords that say what a value is, of any draft.
_KEYWORDS = frozenset(
    (
        "$ref", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor", "$recursiveAnchor",
        "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "dependencies", "dependentRequired", "dependentSchemas",
        "unevaluatedProperties",
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains",
        "minContains", "maxContains", "unevaluatedItems",
        "minLength", "maxLength", "pattern", "format", "contentSchema",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    )
)  # fmt: skip
_DEFINITIONS = ("$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "dependentSchemas", *_DEFINITIONS)
_SINGLE = (
    "items", "additionalItems", "additionalProperties", "contains", "propertyNames", "unevaluatedItems",
    "unevaluatedProperties", "not", "if", "then", "else",
)  # fmt: skip
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_FLOAT_EXACT = 2**53
_MOST_MULTIPLE = 2**32
_DEPTH = 16  # of references and alternatives


class WholeSchema(Exception):
    """A part cannot stand alone, because of what it refers to."""


def keywords_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Returns its keywords that say what a value is; a bound that is null is none."""
    return frozenset(
        key for key in schema if key in _KEYWORDS and not (key in _BOUNDS and schema[key] is None)
    )


def subschemas(schema: Any) -> Iterator[Any]:
    """Yields a schema, and all those in it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        yield part
        if not isinstance(part, Mapping):
            continue
        for name in _LISTS:
            if isinstance(part.get(name), list):
                waiting += part[name]
        for name in _MAPS:
            if isinstance(part.get(name), Mapping):
                waiting += part[name].values()
        for name in _SINGLE:
            if isinstance(part.get(name), Mapping | list):
                waiting += part[name] if isinstance(part[name], list) else [part[name]]


class Reader:
    """A schema's references."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def target(self, reference: Any) -> Any:
        """Returns what a reference into the same document names. Raises WholeSchema for others."""
        text = str(reference)
        is_plain = text == "#" or text.startswith(("#/$defs/", "#/definitions/"))
        if not is_plain or "%" in text or (isinstance(self._root, Mapping) and _has_names(self._root)):
            raise WholeSchema
        value = self._root
        for part in text.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(value, Mapping) or key not in value:
                raise WholeSchema  # llguidance says so in its words
            value = value[key]
        return value

    def standing_alone(self, schema: Any) -> Any:
        """Returns the same with the definitions that it refers to.

        Raises WholeSchema where there is more to it.
        """
        if not isinstance(schema, Mapping):
            return schema
        needed: dict[tuple[str, str], Any] = {}
        waiting = [schema]
        while waiting:
            for part in subschemas(waiting.pop()):
                if not isinstance(part, Mapping):
                    continue
                if any(name in part for name in ("$anchor", "$dynamicRef", "$recursiveRef")):
                    raise WholeSchema
                if not isinstance(part.get("$ref"), str):
                    continue
                pieces = part["$ref"].split("/")
                self.target(part["$ref"])
                if len(pieces) < 3:
                    raise WholeSchema
                place = pieces[1], pieces[2].replace("~1", "/").replace("~0", "~")
                if place not in needed:
                    needed[place] = self._root[place[0]][place[1]]
                    waiting.append(needed[place])
        alone = dict(schema)
        for name in _DEFINITIONS:
            alone.pop(name, None)
            found = {key: value for (where, key), value in needed.items() if where == name}
            if found:
                alone[name] = found
        if needed and isinstance(self._root.get("$schema"), str):
            alone["$schema"] = self._root["$schema"]
        return alone

    def values(self, schema: Any, depth: int = _DEPTH) -> list[Any] | None:
        """Returns all values that satisfy a schema, without repetitions; None: perhaps many, or no
        scalars.
        """
        if not isinstance(schema, Mapping) or depth == 0:
            return [] if schema is False else None
        keywords = keywords_of(schema)
        if keywords == {"$ref"}:
            return self.values(self.target(schema["$ref"]), depth - 1)
        if keywords == {"anyOf"} and isinstance(schema["anyOf"], list):
            found = [self.values(part, depth - 1) for part in schema["anyOf"]]
            return None if None in found else _distinct([one for part in found for one in part or ()])
        if keywords == {"allOf"} and len(schema["allOf"]) == 1:
            return self.values(schema["allOf"][0], depth - 1)
        if keywords and keywords <= {"type", "enum", "const"} and keywords != {"type"}:
            few = finite_values(schema)
            return None if any(isinstance(one, list | dict) for one in few) else few
        if keywords <= {"type"} and schema.get("type") in ("boolean", "null"):
            return [True, False] if schema["type"] == "boolean" else [None]
        if keywords <= {"type", *_BOUNDS} and schema.get("type") == "integer":
            try:
                least, most = read_bounds(schema).integers()
            except Unsatisfiable:
                return []
            if least is not None and most is not None and most - least < 64:
                return list(range(least, most + 1))
        return None

    def types(self, schema: Any, depth: int = _DEPTH) -> frozenset[str]:
        """Returns the JSON types that a schema allows at most; integers are numbers."""
        if not isinstance(schema, Mapping) or depth == 0:
            return frozenset() if schema is False else frozenset(ALL_TYPES)
        kinds = frozenset(ALL_TYPES)
        if "$ref" in schema:
            kinds &= self.types(self.target(schema["$ref"]), depth - 1)
        if "type" in schema:
            named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            kinds &= {"number" if one == "integer" else str(one) for one in named}
        if "enum" in schema or "const" in schema:
            kinds &= {_type_of(one) for one in finite_values(schema)}
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                kinds &= frozenset().union(*(self.types(part, depth - 1) for part in schema[name]))
        return kinds

    def resolved(self, schema: Any) -> Any:
        """Returns a schema, or what it refers to if it does nothing else."""
        for _ in range(_DEPTH):
            if not isinstance(schema, Mapping) or keywords_of(schema) != {"$ref"}:
                break
            schema = self.target(schema["$ref"])
        return schema


def are_disjoint(options: Sequence[Any], reader: Reader) -> bool:
    """Returns whether no value satisfies two of the schemas: their types differ, or a property that
    all need.
    """
    kinds = [reader.types(option) for option in options]
    if all(not (one & other) for one, other in combinations(kinds, 2)):
        return True
    objects = [reader.resolved(option) for option in options]
    if not all(isinstance(one, Mapping) and one.get("type") == "object" for one in objects):
        return False
    needed = [set(one.get("required") or ()) for one in objects]
    for name in set.intersection(*needed):
        values = [reader.values((one.get("properties") or {}).get(name, True)) for one in objects]
        texts = [{json.dumps(value) for value in few} for few in values if few is not None]
        if len(texts) == len(objects) and all(not (one & other) for one, other in combinations(texts, 2)):
            return True
    return False


def finite_values(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the values of `enum` or `const` that `type` allows, without repetitions."""
    values: list[Any] = [schema.get("const")]
    if isinstance(schema.get("enum"), list):
        values = list(schema["enum"])
    if "enum" in schema and "const" in schema:
        values = [one for one in values if _key(one) == _key(schema["const"])]
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        values = [
            one
            for one in values
            if _type_of(one) in named
            or ("integer" in named and _type_of(one) == "number" and one == int(one))
        ]
    return _distinct(values)


def check_exact(schema: Any, place: str) -> None:
    """Raises GrammarError where llguidance, which has float64, would enforce other numbers."""
    multiples = 1
    for part in subschemas(schema):
        if not isinstance(part, Mapping):
            continue
        for name in _BOUNDS:
            _check_bound(part.get(name), name, place)
        for value in [*(part["enum"] if isinstance(part.get("enum"), list) else ()), part.get("const")]:
            for number in _numbers_in(value):
                _check_bound(number, "a constant", place)
        if part.get("multipleOf") is not None:
            multiples *= _coefficient(part["multipleOf"], place)
            if multiples > _MOST_MULTIPLE:  # which combinations of them may need
                raise GrammarError(
                    f"multipleOf (at {place or 'the top'}): the product of all is at most {_MOST_MULTIPLE}"
                )


def _check_bound(value: Any, name: str, place: str) -> None:
    if isinstance(value, int | float) and abs(value) > _FLOAT_EXACT:
        raise GrammarError(
            f"{name} {value!r:.60} (at {place or 'the top'}): together with multipleOf, allOf or "
            "patternProperties, next to $ref or anyOf, or inside of a constant, numbers are between "
            f"-{_FLOAT_EXACT} and {_FLOAT_EXACT}"
        )


def _coefficient(value: Any, place: str) -> int:
    """`multipleOf` without its decimal point, as llguidance finds it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST_MULTIPLE:
        raise GrammarError(
            f"multipleOf is {value!r:.100} (at {place or 'the top'}): it is below {_MOST_MULTIPLE}"
        )
    digits, scaled = 0, float(value)
    while scaled != int(scaled) and digits < 20:
        scaled, digits = scaled * 10, digits + 1
    if float(f"{int(scaled)}e-{digits}") != value:
        raise GrammarError(f"multipleOf {value!r} (at {place or 'the top'}) is no short decimal")
    return int(scaled)


def _numbers_in(value: Any) -> Iterator[float]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list | dict):
            waiting += one if isinstance(one, list) else one.values()
        elif isinstance(one, int | float) and not isinstance(one, bool):
            yield one


def _has_names(root: Mapping[str, Any]) -> bool:
    """Whether a part has a name or a base of its own, by which references may mean it."""
    parts = (part for part in subschemas(root) if isinstance(part, Mapping) and part is not root)
    return any(isinstance(part.get(name), str) for part in parts for name in ("$id", "$anchor"))


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = ((bool, "boolean"), (int, "number"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for type_, name in names if isinstance(value, type_)), "object")


def _key(value: Any) -> str:
    """Equal for values that JSON schemas take for equal."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list({_key(one): one for one in reversed(values)}.values())[::-1]
