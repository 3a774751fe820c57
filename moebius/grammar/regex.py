"""Regular expressions by their atoms: matched anywhere in a text, or spelled as inside of a JSON string.

Atoms are all that has to be known of an expression here: what stands around them, groups and repetitions, is
copied. The dialect is what JSON schemas (ECMA 262) and Rust's crate, which llguidance has, agree on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Literal

from moebius.grammar.errors import GrammarError

ANYTHING = r"(?s:.*)"
Kind = Literal["character", "class", "any", "open", "close", "or", "repeat", "begin", "end"]
_REPEAT = re.compile(r"[*+?][?+]?|\{\d*,?\d*\}\??")
_OPEN = re.compile(r"\((?:\?P?<[A-Za-z_]\w*>|\?[imsux-]*:)?")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|x\{([0-9A-Fa-f]+)\}|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]+)\}")
_PROPERTY = re.compile(r"\\[pP](?:\{[^}]*\}|\w)")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_ASCII_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[A-Za-z0-9_]", "W": "[^A-Za-z0-9_]"}
# What a JSON string spells otherwise.
_ESCAPED = [*map(chr, range(32)), '"', "\\"]
_UNESCAPED = r'[^"\\\x00-\x1F]'


def escaped(text: str) -> str:
    """Returns an expression for exactly this text."""
    return "".join(
        f"\\x{ord(character):02X}"
        if ord(character) < 32
        else f"\\{character}"
        if character in r"\.+*?()|[]{}^$#&-~/"
        else character
        for character in text
    )


def literal(expression: str) -> str:
    """Returns an expression as a grammar of Lark has it."""
    if not expression:
        return '""'
    body = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), expression)
    return f"/{body}/"


def whole(pattern: str) -> str:
    """An expression for the texts in which a JSON schema's `pattern` is found.

    Raises:
        GrammarError: it looks around, refers to its groups, or has an anchor where that says something else.
    """
    branches: list[list[tuple[Kind, str]]] = [[]]
    depth = 0
    for kind, text in atoms(pattern):
        depth += (kind == "open") - (kind == "close")
        if kind == "or" and depth == 0:
            branches.append([])
        else:
            branches[-1].append((kind, text))
    return "|".join(f"(?:{_unanchored(branch)})" for branch in branches)


def _unanchored(branch: list[tuple[Kind, str]]) -> str:
    first = bool(branch) and branch[0][0] == "begin"
    last = len(branch) > first and branch[-1][0] == "end"
    inner = branch[first : len(branch) - last]
    if any(kind in ("begin", "end") for kind, _ in inner):
        raise GrammarError("a pattern's ^ and $ can be enforced at its beginning and its end alone")
    text = "".join(text for _, text in inner)
    return f"{'' if first else ANYTHING}(?:{text}){'' if last else ANYTHING}"


def in_json(expression: str, dot_is_any: bool = False) -> str:
    """Returns an expression for what `expression` matches as a JSON string spells it, each character in one
    way.

    `dot_is_any`: a dot matches line breaks, too. Raises GrammarError as `whole`.
    """
    found = list(atoms(expression))
    first = bool(found) and found[0][0] == "begin"
    last = len(found) > first and found[-1][0] == "end"
    parts = []
    for kind, text in found[first : len(found) - last]:
        if kind in ("begin", "end"):
            raise GrammarError("an expression's ^ and $ can be enforced at its beginning and its end alone")
        if kind == "character":
            parts.append(_spelled(_character(text)))
        elif kind == "class" or kind == "any":
            dot = r"[\s\S]" if dot_is_any else r"[^\n]"
            parts.append(_spelled_class(dot if kind == "any" else text))
        else:
            parts.append(text)
    return "".join(parts)


def _spelled(character: str) -> str:
    spelling = json.dumps(character, ensure_ascii=False)[1:-1]
    return escaped(character) if spelling == character else f"(?-i:{escaped(spelling)})"


def _spelled_class(text: str) -> str:
    letters = _PROPERTY.sub("", text)  # of letters, digits and marks: none of them is spelled otherwise
    has_others = any(name[2:].strip("{")[:1] not in "LMN" for name in _PROPERTY.findall(text))
    if has_others or (letters != text and "^" in text):
        raise GrammarError(f"the class {text} cannot be enforced inside of a JSON string")
    try:
        members = None if letters in ("", "[]") else re.compile(letters, re.ASCII)
    except re.error as error:
        raise GrammarError(f"the class {text} cannot be read: {error}") from error
    special = [one for one in _ESCAPED if members is not None and members.fullmatch(one)]
    return "(?:" + "|".join([f"[{text}&&{_UNESCAPED}]", *map(_spelled, special)]) + ")"


def _character(text: str) -> str:
    """Returns the character that an atom of that kind stands for."""
    if not text.startswith("\\"):
        return text
    code = _CODE.fullmatch(text[1:])
    if code is not None:
        return chr(int(next(filter(None, code.groups())), 16))
    return _CONTROLS.get(text[1:], text[1:])


def atoms(expression: str) -> Iterator[tuple[Kind, str]]:
    """Yields its parts in order. Raises GrammarError for what no finite automaton does."""
    place = 0
    while place < len(expression):
        kind, text = _atom(expression, place)
        place += len(text)
        if kind == "class" and text[1:] in _ASCII_CLASSES:
            text = _ASCII_CLASSES[text[1:]]
        elif kind == "character" and len(text) == 2 and text[1] not in _CONTROLS:
            text = escaped(text[1])
        yield kind, text


def _atom(expression: str, place: int) -> tuple[Kind, str]:
    character = expression[place]
    if character == "\\":
        return _escape(expression, place)
    if character == "[":
        return "class", _class(expression, place)
    if character == "(":
        found = _OPEN.match(expression, place)
        assert found is not None
        if expression[place + 1 : place + 2] == "?" and found.group() == "(":
            raise GrammarError(
                f"look-around and conditions are not supported: {expression[place : place + 4]}"
            )
        return "open", found.group()
    repeat = _REPEAT.match(expression, place)
    if repeat is not None and repeat.group() not in ("{}", "{,}"):
        return "repeat", repeat.group()
    kinds: dict[str, Kind] = {".": "any", ")": "close", "|": "or", "^": "begin", "$": "end"}
    return kinds.get(character, "character"), character


def _escape(expression: str, place: int) -> tuple[Kind, str]:
    following = expression[place + 1 : place + 2]
    if following in ("p", "P"):
        found = _PROPERTY.match(expression, place)
        if found is not None:
            return "class", found.group()
    if following in ("d", "D", "w", "W", "s", "S"):
        return "class", f"\\{following}"
    code = _CODE.match(expression, place + 1)
    if code is not None:
        return "character", f"\\{code.group()}"
    if not following or following in "bBAzZGkcpPxuU" or following in "123456789":
        raise GrammarError(f"\\{following} is not supported in a pattern")
    return "character", f"\\{following}"


def _class(expression: str, start: int) -> str:
    """A class in brackets, which may have others in it."""
    place = start + 1
    if expression[place : place + 1] == "^":
        place += 1
    if expression[place : place + 1] == "]":
        place += 1
    while place < len(expression):
        character = expression[place]
        if character == "]":
            return expression[start : place + 1]
        if character == "[" and expression[place + 1 : place + 2] == ":":
            place = expression.find(":]", place) + 1 or len(expression)
        elif character == "\\":
            place += 1
        place += 1
    raise GrammarError(f"a class is not closed: {expression[start : start + 40]}")
