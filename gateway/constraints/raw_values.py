"""Grammar terminals for strings that models write without quotes, from a parameter's schema.

The text ends before a marker. Texts that the parser would read as something else than a string
(`gateway/parsers/typed_values.py`) are left to the other types that the schema allows; and since
llguidance's lexer takes the longest match, a text's beginning decides between string and other types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.parsers.typed_values import kinds_of, referred
from moebius.grammar.lark import GrammarError, quoted
from moebius.grammar.regex import ANYTHING, escaped, literal, whole

_DEPTH = 8  # of references and combinations, as the parser follows them
_MAX_PARTS = 4096  # schemas of one parameter, counted per reference
ALL_KINDS = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
SPACE = r" \t\n\r"
_WORDS = {"true": "boolean", "false": "boolean", "null": "null"}
# The spellings that the parser accepts where a boolean or null is allowed.
_SPELLINGS = rf"(?i:[{SPACE}]*(true|false|null|none)[{SPACE}]*)"
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])"  # only days that all months have
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]+W|[0-9]+D(T[0-9]+H)?|T[0-9]+[HMS]|[0-9]+[YM])",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": "([0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4}",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9._~:/?#@!&'()*+,;=-]+",
}
# First characters that strings must not have if values of these types are allowed, too.
_FIRST = {"number": r"\-0-9", "integer": r"\-0-9", "array": r"\[", "object": r"\{"}
_ANNOTATIONS = frozenset(
    ("type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)


@dataclass(frozen=True)
class RawValue:
    """The raw form of a parameter that may be a string; filled by `raw_value`."""

    strings: str | None  # a terminal's body; None: any text
    words: tuple[str, ...] = ()  # values that are no strings but could be read as such
    others: tuple[str, ...] = ()  # types of values that are written as JSON, which no string resembles


def check_size(schema: object, root: Mapping[str, Any]) -> None:
    """Raises GrammarError if a parameter's references and combinations amount to too many schemas."""
    waiting, count = [(schema, _DEPTH)], 0
    while waiting:
        part, depth = waiting.pop()
        count += 1
        if count > _MAX_PARTS:
            raise GrammarError(f"references and combinations that amount to more than {_MAX_PARTS} schemas")
        if isinstance(part, Mapping) and depth:
            if "$ref" in part:
                waiting.append((referred(str(part["$ref"]), root), depth - 1))
            for name in ("anyOf", "oneOf", "allOf"):
                waiting += [(one, depth - 1) for one in part.get(name) or ()]


def allows_strings(schema: object, root: Mapping[str, Any]) -> bool:
    """Returns whether a parameter may be a string, which is then written without quotes."""
    return schema is not False and "string" in _kinds(schema, root)


def _kinds(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    return kinds_of(schema, root) or ALL_KINDS


def raw_value(
    schema: object, root: Mapping[str, Any], has_kind: bool, not_in_text: Sequence[str]
) -> RawValue:
    """Returns the raw form of a parameter that allows strings.

    Args:
        schema: of the parameter.
        root: in which it is.
        has_kind: the model's format marks whether the value is a string.
        not_in_text: substrings that no text may contain.
    Raises:
        GrammarError: naming the keyword that cannot be enforced.
    """
    kinds = _kinds(schema, root) - {"string"}
    others = tuple(sorted(kinds - {"integer"} if "number" in kinds else kinds))
    strings = _strings(schema, root, _DEPTH)
    if not has_kind and _is_free(schema, root, _DEPTH):
        return RawValue(None)  # any reading of the text is allowed
    conditions = [strings or literal(ANYTHING)]
    words: tuple[str, ...] = ()
    if not has_kind:
        first = "".join(dict.fromkeys(_FIRST[kind] for kind in others if kind in _FIRST))
        conditions += [f"~{literal(f'[{first}{SPACE}](?s:.*)')}"] if first else []
        if kinds & {"boolean", "null"}:
            conditions.append(f"~{literal(_SPELLINGS)}")
            words = valid_words(schema, root, kinds)
        others = tuple(kind for kind in others if kind in _FIRST)
    elif strings is None:
        return RawValue(None, others=others)
    if not_in_text:
        found = "|".join(map(escaped, not_in_text))
        conditions.append(f"~{literal(f'{ANYTHING}(?:{found}){ANYTHING}')}")
    return RawValue(" & ".join(conditions), words, others)


def _is_free(schema: object, root: Mapping[str, Any], depth: int) -> bool:
    """Returns whether the schema restricts nothing but the types."""
    if not isinstance(schema, Mapping) or depth == 0:
        return schema is True
    if "$ref" in schema and not _is_free(referred(str(schema["$ref"]), root), root, depth - 1):
        return False
    parts = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ()), *(schema.get("allOf") or ())]
    return schema.keys() <= _ANNOTATIONS | {"$ref", "anyOf", "oneOf", "allOf"} and all(
        _is_free(part, root, depth - 1) for part in parts
    )


def valid_words(schema: object, root: Mapping[str, Any], kinds: frozenset[str]) -> tuple[str, ...]:
    """Returns which of JSON's true, false and null a schema allows, of some kinds."""
    return tuple(word for word in _WORDS if _WORDS[word] in kinds and _is_valid(word, schema, root))


def _is_valid(word: str, schema: object, root: Mapping[str, Any]) -> bool:
    import jsonschema  # slow to import, and few requests need it

    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    whole_schema = {**definitions, **schema} if isinstance(schema, Mapping) else schema
    return bool(jsonschema.Draft202012Validator(whole_schema).is_valid(json.loads(word)))


def _strings(schema: object, root: Mapping[str, Any], depth: int) -> str | None:
    """Returns an expression of terminals for the strings that a schema allows; None: all strings."""
    if not isinstance(schema, Mapping):
        return None
    if depth == 0:
        raise GrammarError(f"combinations and references of more than {_DEPTH} levels")
    conditions: list[str | None] = []
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        texts = [quoted(value) for value in values if isinstance(value, str)]
        conditions.append(f"({' | '.join(texts)})" if texts else None)
    if "pattern" in schema:
        conditions.append(literal(whole(str(schema["pattern"]))))
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        conditions.append(literal(f"(?s:.{{{int(least)},{'' if most is None else int(most)}}})"))
    if "format" in schema:
        expression = _FORMATS.get(str(schema["format"]))
        if expression is None:
            known = ", ".join(_FORMATS)
            raise GrammarError(f"format {schema['format']!r:.100}, of a string without quotes: {known}")
        conditions.append(literal(expression))
    if "$ref" in schema:
        conditions.append(_strings(referred(str(schema["$ref"]), root), root, depth - 1))
    conditions += [_strings(part, root, depth - 1) for part in schema.get("allOf") or ()]
    for name in ("anyOf", "oneOf"):
        parts = [part for part in schema.get(name) or () if allows_strings(part, root)]
        made = [_strings(part, root, depth - 1) for part in parts]
        if made and None not in made:
            conditions.append(f"({' | '.join(f'({one})' for one in made)})")
    given = [condition for condition in conditions if condition is not None]
    return " & ".join(given) if given else None
