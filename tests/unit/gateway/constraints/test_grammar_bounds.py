"""Guards the bounds on the work of a grammar: honest requests are within them, ambiguous grammars are not."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from gateway.constraints.tool_calls import tool_call_constraint
from gateway.parsers.events import ToolSpec
from moebius.config.request_limits import MAX_CHOICES
from moebius.grammar.compile import grammar_of, limits
from protos.engine_pb2 import Choice, Constraint
from tests.unit.gateway.constraints.test_response_format import BYTES
from tests.unit.gateway.constraints.test_tool_framings import HERMES

AMBIGUOUS = {
    "three of one": "start: s\ns: s s s | s s | /[a-z]/",
    "words of words": "start: (w | w w | w w w)*\nw: /[a-z]/+",
    "many rules": "start: s\ns: "
    + " | ".join(f"r{number} s" for number in range(30))
    + " | /[a-z]/\n"
    + "\n".join(f"r{number}: s s | /[a-z]/" for number in range(30)),
    "after a while": 'start: "abcd" s\ns: s s s s | s s s | s s | /[a-z]/',
}


def masks_until_refused(grammar: str, text: str) -> int:
    """Returns how many masks an output of these characters has before it is ended; -1: it is not."""
    matcher = LLMatcher(BYTES, grammar, log_level=0, limits=limits())
    for number, byte in enumerate(text.encode()):
        matcher.compute_bitmask()
        if matcher.is_error() or not matcher.consume_token(byte):
            return number + 1
    return -1


@pytest.mark.parametrize("name", list(AMBIGUOUS))
def test_ambiguous_grammars_end_soon(name: str) -> None:
    """A mask may count as many items as a large schema needs: what grows with every character is ended.

    Items are what llguidance counts. Tokens of one byte are the kindest case: a mask looks no further ahead.
    """
    grammar = grammar_of(Constraint(ebnf=AMBIGUOUS[name]))
    text = "abcdefgh" * 40
    assert 0 < masks_until_refused(grammar, text) <= 250


def test_large_schemas_are_within_the_bounds() -> None:
    """The most that honest requests need: properties that may all be left out, options, tools."""
    properties = {f"property_{number}": {"type": ["string", "integer", "null"]} for number in range(200)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    chosen = dict.fromkeys(list(properties)[::20], "x")
    options = [f"option {number} of {number * 7}" for number in range(MAX_CHOICES)]
    tools = [ToolSpec(f"tool_{number}", {"properties": {"a": {"type": "string"}}}) for number in range(128)]
    calls = tool_call_constraint(HERMES, tools, at_least_one=False, parallel=True, added_tokens={})
    for constraint, text in (
        (Constraint(json_schema=json.dumps(schema)), json.dumps(chosen)),
        (Constraint(choice=Choice(options=options)), options[-1]),
        (calls, '<tool_call>\n{"name": "tool_99", "arguments": {"a": "x"}}\n</tool_call>'),
    ):
        assert masks_until_refused(grammar_of(constraint), text) == -1, constraint
