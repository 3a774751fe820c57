"""What is wrong with a constraint, and literals of grammars: what all of this package needs."""

from __future__ import annotations

import json


class GrammarError(ValueError):
    """A constraint cannot be enforced; the message says what of it."""


class Unsatisfiable(GrammarError):
    """No value satisfies a schema; the message says why. A part that may be left out is then left out."""


def quoted(text: str) -> str:
    """Returns a literal in llguidance's dialect of Lark, which is JSON's."""
    return json.dumps(text, ensure_ascii=False)
