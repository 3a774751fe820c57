"""A `Constraint` as a grammar of llguidance, and whether that can be enforced.

The gateway asks before it sends a request on, the engine before it runs one; both get the same answer.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from moebius.config.request_limits import MAX_CHOICES, MAX_GRAMMAR_CHARACTERS
from moebius.grammar.errors import GrammarError as GrammarError
from moebius.grammar.errors import Unsatisfiable, quoted
from moebius.grammar.json_schema import json_grammar
from moebius.grammar.lark import json_options
from moebius.grammar.structural_tags import StructuralTagError, structural_tag_grammar
from protos.engine_pb2 import Constraint

_ENDLESS = "the grammar is empty: no text satisfies it"
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")
_NO_KEYWORD = "keywords that are not supported:"
_LONGEST_REASON = 600
_TOKEN = "<["  # with which a token's id begins in a grammar
# Answers of `check` that are remembered.
_REMEMBERED = 1024


def limits() -> LLParserLimits:
    """What compiling a grammar, and computing one mask of it, may take.

    Counted, not timed: all ranks of an engine come to the same end. A mask of an ambiguous grammar costs the
    square of its Earley items, since each derivation looks for its item among the row's, and only new ones
    are counted: at most about 30 ms with 4000 (110 ms with 10 000), and outputs that come near that end
    within some tokens, because what grows does so with every token. An object of 200 optional properties
    needs 3200 items, 128 tools need 390 (`tests/unit/gateway/constraints/test_grammar_bounds.py`).
    """
    return LLParserLimits(verbose_errors=False, max_items_in_row=1_000, step_max_items=4_000)


def grammar_of(constraint: Constraint) -> str:
    """llguidance's grammar for a constraint that has one (`kind`).

    Raises:
        GrammarError: it is too large or cannot be read; whether it can be enforced is for `check`.
    """
    kind = constraint.WhichOneof("kind")
    assert kind is not None, "the constraint has no grammar"
    value = getattr(constraint, kind)
    if isinstance(value, str) and len(value) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarError(f"{len(value)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed")
    if kind in ("json_schema", "json_object"):
        return _json(value if kind == "json_schema" else '{"type": "object"}', constraint.no_whitespace)
    return _KINDS[kind](value)


def _json(schema: str, no_whitespace: bool) -> str:
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"not a JSON schema: {error}") from error
    if not isinstance(parsed, dict | bool):
        raise GrammarError("not a JSON schema, which is an object, true or false")
    try:
        return LLMatcher.grammar_from_lark(json_grammar(parsed, json_options(no_whitespace)))
    except Unsatisfiable as error:
        raise GrammarError(f"no value satisfies it ({error})") from error


def _choice(choice: Any) -> str:
    options = list(choice.options)
    if not options or not all(options):
        raise GrammarError("a choice needs at least one option, and none that is empty")
    if len(options) > MAX_CHOICES or sum(map(len, options)) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarError(
            f"{len(options)} options; at most {MAX_CHOICES}, of {MAX_GRAMMAR_CHARACTERS} characters in all"
        )
    # One terminal: a thousand alternatives of a rule were a thousand items.
    return LLMatcher.grammar_from_lark("start: OPTION\nOPTION: " + " | ".join(map(quoted, options)))


def _ebnf(text: str) -> str:
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except (Exception, RecursionError) as error:  # the converter raises bare exceptions
        raise GrammarError(f"the grammar cannot be read: {error}") from error


def _structural_tag(text: str) -> str:
    try:
        return LLMatcher.grammar_from_lark(structural_tag_grammar(text))
    except StructuralTagError as error:
        raise GrammarError(str(error)) from error


def _lark(text: str) -> str:
    return text if text.lstrip().startswith("{") else LLMatcher.grammar_from_lark(text)


_KINDS: Mapping[str, Callable[[Any], str]] = {
    "regex": LLMatcher.grammar_from_regex,
    "lark": _lark,
    "choice": _choice,
    "structural_tag": _structural_tag,
    "ebnf": _ebnf,
}


class OverBudget(GrammarError):
    """Compiling a grammar takes more than it may at this time; the message says what is allowed."""


def compiled(constraint: Constraint) -> str:
    """llguidance's grammar for a constraint that has one (`kind`), found to be enforceable.

    Raises:
        GrammarError: it cannot be enforced.
    """
    grammar = grammar_of(constraint)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    if failed:
        raise GrammarError(reason(messages[0]))
    if _TOKEN not in grammar:
        matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=limits())
        matcher.compute_bitmask()  # the first is the most expensive one
        if matcher.is_error():
            raise GrammarError(reason(matcher.get_error()))
    return grammar


@cache
def _bytes() -> LLTokenizer:
    """Returns a vocabulary of one token per byte, for grammars that ask for no token by its id."""
    return LLTokenizer("byte")


class GrammarCheck:
    """Whether constraints can be enforced; remembers its latest answers. Any thread may ask."""

    def __init__(
        self, remembered: int = _REMEMBERED, compiler: Callable[[Constraint], object] = compiled
    ) -> None:
        """`compiler`: raises GrammarError for what cannot be enforced; what else it raises is not kept."""
        self._remembered = remembered
        self._compiler = compiler
        self._answers: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, constraint: Constraint) -> None:
        """Raises GrammarError for a constraint whose grammar cannot be enforced."""
        key = hashlib.sha256(constraint.SerializeToString(deterministic=True)).digest()
        with self._lock:
            problem = self._answers.get(key)
            if problem is not None:
                self._answers.move_to_end(key)
        if problem is None:
            problem = ""
            try:
                self._compiler(constraint)
            except OverBudget:  # which depends on what the request has left
                raise
            except GrammarError as error:
                problem = str(error)
            with self._lock:
                self._answers[key] = problem
                if len(self._answers) > self._remembered:
                    self._answers.popitem(last=False)
        if problem:
            raise GrammarError(problem)


def reason(message: str) -> str:
    """Returns what llguidance says, in one line."""
    found = _UNIMPLEMENTED.search(message)
    if found is not None:
        return f"{_NO_KEYWORD} {', '.join(json.loads(found.group(1)))}"
    if message.startswith("NoExtension"):
        return "no token of the vocabulary can go on"
    if "Unsatisfiable schema" in message:
        return f"no value satisfies it ({message.split(': ', 1)[-1]})"[:_LONGEST_REASON]
    return " ".join(message.split())[:_LONGEST_REASON] or _ENDLESS


def unsupported_keywords(error: GrammarError) -> frozenset[str]:
    """Returns the keywords of a schema that an error of `check` is about; empty: it is about
    something else.
    """
    message = str(error)
    if not message.startswith(_NO_KEYWORD):
        return frozenset()
    return frozenset(message.removeprefix(_NO_KEYWORD).strip().split(", "))
