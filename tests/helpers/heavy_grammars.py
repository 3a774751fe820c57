"""Requests whose grammars are small to send and take many seconds to compile."""

from __future__ import annotations

import json
from typing import Any

_RULES = 2600  # 56 KB


def heavy_gbnf(seed: int = 0) -> str:
    """A chain of rules, each of which may be left out: one terminal of as many levels."""
    rules = (f'r{number} ::= "{seed}" r{number + 1} | r{number + 1}' for number in range(_RULES))
    return "root ::= r0\n" + "\n".join(rules) + f'\nr{_RULES} ::= "z"'


def heavy_regex(seed: int = 0) -> str:
    """Returns the repetitions of repetitions: four million letters."""
    return f"((ab?){{2000}}){{{2000 + seed % 100}}}{seed}"


def heavy_schema(seed: int = 0) -> dict[str, Any]:
    """Returns properties whose lengths are all different, and so are their lexemes."""
    properties = {
        f"{seed} {number}": {"type": "string", "minLength": number, "maxLength": 9 * number}
        for number in range(900)
    }
    return {"type": "object", "properties": properties}


def heavy_requests(seed: int = 0) -> list[dict[str, Any]]:
    """Returns the fields of requests, none of which has been seen before with this seed."""
    tool = {"name": "f", "strict": True, "parameters": heavy_schema(seed)}
    return [
        {"ebnf": heavy_gbnf(seed)},
        {"structured_outputs": {"grammar": heavy_gbnf(seed)}},
        {"structured_outputs": {"regex": heavy_regex(seed)}},
        {"guided_json": json.dumps(heavy_schema(seed))},
        {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"},
    ]
