"""Reads grammars that users write in Lark's dialect (https://lark-parser.readthedocs.io/en/stable/grammar.html).

Priorities, aliases and what concerns Lark's trees are read and left out; templates, `%declare`, `%extend` and
imports of other than `common` are refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from moebius.grammar.lark import GrammarError
from moebius.grammar.regex import escaped, literal

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|//[^\n]*|\#[^\n]*)|(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)|(?P<name>[?!]*_?[A-Za-z][A-Za-z0-9_]*)
    |(?P<directive>%[a-z]+)|(?P<arrow>->)|(?P<range>\.\.)|(?P<number>\d+)|(?P<sign>[:|()\[\]?*+~{},.])""",
    re.VERBOSE,
)
# What Lark's `common` has.
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "NUMBER": r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
_DEPTH = 64  # of groups


@dataclass(frozen=True)
class Atom:
    """What is repeated: a name, a terminal's text, or a group of alternatives."""

    kind: Literal["name", "string", "regex", "range", "group"]
    text: str = ""
    group: tuple[tuple[Item, ...], ...] = ()


@dataclass(frozen=True)
class Item:
    atom: Atom
    least: int = 1
    most: int | None = 1  # None: any number


Alternatives = tuple[tuple[Item, ...], ...]


@dataclass
class Grammar:
    """A grammar that was read; filled by `_Reader`."""

    rules: dict[str, Alternatives] = field(default_factory=dict)
    terminals: dict[str, Alternatives] = field(default_factory=dict)
    ignored: list[Alternatives] = field(default_factory=list)


def read_lark(definition: str) -> Grammar:
    """Raises GrammarError naming the line."""
    return _Reader(definition).grammar()


class _Reader:
    """Recursive descent over the definition's tokens."""

    def __init__(self, definition: str) -> None:
        self._tokens = [*_tokens(definition), ("end", "", definition.count("\n") + 1)]
        self._place = 0

    def grammar(self) -> Grammar:
        """Raises GrammarError naming the line."""
        found = Grammar()
        while self._kind() != "end":
            if self._kind() == "directive":
                self._directive(found)
                continue
            name = self._take("name").lstrip("?!")
            if self._is("."):  # a priority, of which a mask knows nothing
                self._take("sign")
                self._take("number")
            if not self._is(":"):
                raise self._unexpected("':'")
            self._take("sign")
            kind = found.terminals if _is_terminal(name) else found.rules
            kind[name] = self._alternatives(0)
        if "start" not in found.rules:
            raise GrammarError("the grammar has no rule 'start'")
        return found

    def _directive(self, found: Grammar) -> None:
        word = self._take("directive")
        if word == "%ignore":
            found.ignored.append(self._alternatives(0))
            return
        if word != "%import":
            raise GrammarError(f"line {self._line()}: {word} is not supported")
        source = self._take("name")
        if source != "common" or not (self._is(".") or self._is("(")):
            raise GrammarError(f"line {self._line()}: only Lark's 'common' can be imported")
        if self._is("("):
            names = self._listed_names()
        else:
            self._take("sign")
            names = [self._take("name")]
        alias = names[0]
        if self._kind() == "arrow":
            self._take("arrow")
            alias = self._take("name")
        for name in names:
            if name not in _COMMON:
                raise GrammarError(f"line {self._line()}: 'common' has no {name!r}: {', '.join(_COMMON)}")
            item = Item(Atom("regex", literal(_COMMON[name])))
            found.terminals[alias if len(names) == 1 else name] = ((item,),)

    def _listed_names(self) -> list[str]:
        names = []
        self._take("sign")
        while not self._is(")"):
            names.append(self._take("name"))
            if self._is(","):
                self._take("sign")
        self._take("sign")
        return names

    def _alternatives(self, depth: int) -> Alternatives:
        if depth > _DEPTH:
            raise GrammarError(f"line {self._line()}: groups are nested deeper than {_DEPTH} levels")
        alternatives = [self._sequence(depth)]
        while self._is("|"):
            self._take("sign")
            alternatives.append(self._sequence(depth))
        return tuple(alternatives)

    def _sequence(self, depth: int) -> tuple[Item, ...]:
        items: list[Item] = []
        while self._kind() in ("name", "string", "regex") or self._is("(") or self._is("["):
            if self._kind() == "name" and self._begins_statement():
                break
            items.append(self._item(depth))
        if self._kind() == "arrow":
            self._take("arrow")
            self._take("name")
        return tuple(items)

    def _begins_statement(self) -> bool:
        following = self._tokens[self._place + 1 : self._place + 4]
        texts = [text for _, text, _ in following]
        return texts[:1] == [":"] or (texts[:1] == ["."] and texts[2:3] == [":"])

    def _item(self, depth: int) -> Item:
        if self._is("[") or self._is("("):
            closing = {"[": "]", "(": ")"}[self._take("sign")]
            atom = Atom("group", group=self._alternatives(depth + 1))
            if not self._is(closing):
                raise self._unexpected(f"'{closing}'")
            self._take("sign")
            return Item(atom, 0) if closing == "]" else self._repeated(atom)
        kind, text, _ = self._tokens[self._place]
        self._place += 1
        if kind == "string" and self._kind() == "range":
            self._take("range")
            first, last = decoded(text), decoded(self._take("string"))
            if len(first) != 1 or len(last) != 1:
                raise GrammarError(f"line {self._line()}: a range is between two characters")
            return self._repeated(Atom("range", f"[{escaped(first)}-{escaped(last)}]"))
        if kind == "name":
            return self._repeated(Atom("name", text.lstrip("?!")))
        return self._repeated(Atom("string" if kind == "string" else "regex", text))

    def _repeated(self, atom: Atom) -> Item:
        for sign, least, most in (("?", 0, 1), ("*", 0, None), ("+", 1, None)):
            if self._is(sign):
                self._take("sign")
                return Item(atom, least, most)
        if not self._is("~"):
            return Item(atom)
        self._take("sign")
        least = int(self._take("number"))
        if self._kind() != "range":
            return Item(atom, least, least)
        self._take("range")
        return Item(atom, least, int(self._take("number")))

    def _kind(self) -> str:
        return self._tokens[self._place][0]

    def _line(self) -> int:
        return self._tokens[self._place][2]

    def _is(self, sign: str) -> bool:
        return self._tokens[self._place][:2] == ("sign", sign)

    def _take(self, kind: str) -> str:
        if self._kind() != kind:
            raise self._unexpected({"sign": "a sign"}.get(kind, f"a {kind}"))
        self._place += 1
        return self._tokens[self._place - 1][1]

    def _unexpected(self, wanted: str) -> GrammarError:
        found = self._tokens[self._place][1] or "the end"
        return GrammarError(f"line {self._line()}: {found!r:.100} stands where {wanted} is expected")


def _tokens(definition: str) -> Iterator[tuple[str, str, int]]:
    place, line = 0, 1
    while place < len(definition):
        found = _TOKEN.match(definition, place)
        if found is None:
            raise GrammarError(f"line {line}: {definition[place : place + 20]!r} cannot be read")
        if found.lastgroup != "space":
            yield str(found.lastgroup), found.group(), line
        line += found.group().count("\n")
        place = found.end()


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def decoded(text: str) -> str:
    """Returns the text of a string in quotes. Raises GrammarError."""
    try:
        return str(ast.literal_eval(text.removesuffix("i")))
    except (ValueError, SyntaxError) as error:
        raise GrammarError(f"{text:.100} is not a string: {error}") from error
