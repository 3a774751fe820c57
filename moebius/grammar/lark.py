"""Grammars in llguidance's dialect of Lark, put together from literals, JSON schemas and free text.

A token that the tokenizer keeps whole ("added") can be asked for by its id: then nothing that merely spells
the same will do. https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md has the dialect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moebius.grammar.errors import GrammarError as GrammarError
from moebius.grammar.errors import quoted as quoted
from moebius.grammar.json_schema import json_grammar

# White space that a model may put between JSON's tokens: enough for usual layouts, and bounded, since models
# that would rather say something else go on with white space for ever.
_WHITESPACE = r" |\n[ ]{0,60}|\n\t{0,20}"
# Any text, also none.
ANY_TEXT = r"/(.|\n)*/"


def json_options(no_whitespace: bool) -> dict[str, Any]:
    """Returns how llguidance writes JSON, as its `JsonCompileOptions`."""
    return {"whitespace_flexible": False} if no_whitespace else {"whitespace_pattern": _WHITESPACE}


class LarkGrammar:
    """Collects rules; `render` gives the grammar's text."""

    def __init__(self, added_tokens: Mapping[str, int] | None = None) -> None:
        """`added_tokens`: ids by text of the tokens that literals ask for whole."""
        self._added = dict(added_tokens or {})
        longest_first = sorted(self._added, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if self._added else None
        self._rules: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        """Adds a rule; returns its name. An empty body is the empty text."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body or quoted('')}")
        return name

    def literal(self, text: str) -> str:
        """Returns exactly this text; empty for none."""
        pieces = [text] if self._split is None else self._split.split(text)
        return " ".join(
            f"<[{self._added[piece]}]>" if piece in self._added else quoted(piece)
            for piece in pieces
            if piece
        )

    def added_pieces(self, text: str) -> list[str]:
        """Returns the added tokens in it."""
        return [piece for piece in (self._split.split(text) if self._split else ()) if piece in self._added]

    def split_at(self, text: str, special_ids: frozenset[int]) -> tuple[str, str]:
        """Returns what comes before the first token that no text spells, and the text from that token on."""
        place = 0
        for piece in self._split.split(text) if self._split else ():
            if self._added.get(piece) in special_ids:
                return text[:place], text[place:]
            place += len(piece)
        return text, ""

    def first_piece(self, text: str, special_ids: frozenset[int] = frozenset()) -> str:
        """Returns the added token that `text` begins with; without one, what comes before the first, or all
        of it.

        What comes before the first token that no text spells goes with that token.
        """
        pieces = [text] if self._split is None else [piece for piece in self._split.split(text) if piece]
        if len(pieces) > 1 and pieces[0] not in self._added and self._added[pieces[1]] in special_ids:
            return pieces[0] + pieces[1]
        return pieces[0] if pieces else ""

    def terminal(self, body: str) -> str:
        """Adds a terminal; returns its name."""
        name = f"TERMINAL_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def json(self, schema: Any, *, no_whitespace: bool = False) -> str:
        """Returns a rule for a JSON value that satisfies a schema.

        Raises GrammarError: it cannot be enforced.
        """
        return self.rule(f"%lark {{\n{json_grammar(schema, json_options(no_whitespace))}}}")

    def until(self, end: str) -> str:
        """Returns a rule for any text up to the first occurrence of `end`, which is part of it."""
        return self.rule(f"{ANY_TEXT} {quoted(end)}", "[lazy]")

    def any_of(self, bodies: Sequence[str]) -> str:
        """Returns a rule for one of them."""
        return self.rule(" | ".join(body or quoted("") for body in bodies))

    def render(self, start: str) -> str:
        """Returns the whole grammar; `start` is the body of its first rule."""
        return "\n".join(["%llguidance {}", f"start: {start or quoted('')}", *self._rules]) + "\n"
