"""What an output has to look like, as the engine's `Constraint`: from `response_format` and its relatives,
and from tools that have to be called.

A constraint is compiled here, in a prompt process, so that what can not be enforced is a 400 that names the
parameter and the keyword; the engine compiles it again for its masks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.errors import ApiError, bad_request
from gateway.parsers.events import ToolSpec
from gateway.schemas.structured import (
    JsonSchema,
    ResponseFormat,
    StructuredFields,
    StructuredOutputs,
)
from moebius.grammar.compile import GrammarCheck, GrammarError, unsupported_keywords
from moebius.grammar.lark import ANY_TEXT, LarkGrammar
from protos.engine_pb2 import Choice, Constraint

_check = GrammarCheck()
Wanted = list[tuple[str, Constraint]]  # each with its parameter


def response_format_constraint(body: StructuredFields) -> Constraint | None:
    """What `response_format`, `structured_outputs` and the older fields ask for; None: nothing.

    Raises:
        ApiError: 400 naming parameter and keyword; it can not be enforced, or two fields ask for something.
    """
    wanted: Wanted = []
    if body.response_format is not None:
        wanted += _response_format(body.response_format)
    if body.structured_outputs is not None:
        wanted += _structured_outputs(body.structured_outputs)
    wanted += _older_fields(body)
    if not wanted:
        return None
    if len(wanted) > 1:
        (first, _), (second, _) = wanted[:2]
        raise bad_request(f"{first!r} and {second!r} both say what the output is: send one", second)
    param, constraint = wanted[0]
    check_constraint(constraint, param)
    return constraint


def check_constraint(constraint: Constraint, param: str) -> None:
    """Raises ApiError 400, naming `param`, when the constraint can not be enforced."""
    try:
        _check.check(constraint)
    except GrammarError as error:
        raise bad_request(
            f"{param!r} can not be enforced: {error}{_where(constraint, error)}", param
        ) from None


def _where(constraint: Constraint, error: GrammarError) -> str:
    """Where in a schema the keyword at fault is, if that can be said."""
    keywords = unsupported_keywords(error)
    if not keywords or constraint.WhichOneof("kind") != "json_schema":
        return ""
    waiting: list[tuple[str, Any]] = [("", json.loads(constraint.json_schema))]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            if keywords & value.keys():
                return f" (at {place or 'the top'})"
            waiting += [(f"{place}.{key}" if place else str(key), part) for key, part in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{place}[{index}]", part) for index, part in enumerate(value)]
    return ""


def _response_format(wanted: ResponseFormat) -> Wanted:
    if wanted.type == "text":
        return []
    if wanted.type == "json_object":
        if wanted.schema_ is not None:
            return [("response_format.schema", _json_constraint(wanted.schema_))]
        return [("response_format", Constraint(json_object=True))]
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise bad_request(
                "a 'response_format' of type 'json_schema' needs 'json_schema'", "response_format"
            )
        schema = wanted.json_schema.schema_
        lenient = {} if wanted.json_schema.strict is not False else {"lenient": True}
        made = _json_constraint({"type": "object"} if schema is None else schema, lenient)
        return [("response_format.json_schema.schema", made)]
    tag = {"format": wanted.format, "structures": wanted.structures, "triggers": wanted.triggers}
    given = {key: value for key, value in tag.items() if value is not None}
    return [("response_format", Constraint(structural_tag=json.dumps(given)))]


def _structured_outputs(wanted: StructuredOutputs) -> Wanted:
    options: dict[str, Any] = {}
    if wanted.whitespace_pattern is not None:
        options["whitespace_pattern"] = wanted.whitespace_pattern
    kinds: Wanted = []
    if wanted.json_ is not None:
        schema = _parsed_schema(wanted.json_, "structured_outputs.json")
        if wanted.disable_additional_properties:
            schema = _closed(schema)
        kinds.append(("json", _json_constraint(schema, options)))
    if wanted.json_object:
        kinds.append(("json_object", _json_constraint({"type": "object"}, options)))
    if wanted.regex is not None:
        kinds.append(("regex", Constraint(regex=wanted.regex)))
    if wanted.choice is not None:
        kinds.append(("choice", Constraint(choice=Choice(options=wanted.choice))))
    if wanted.grammar is not None:
        kinds.append(("grammar", Constraint(ebnf=wanted.grammar)))
    if wanted.structural_tag is not None:
        tag = wanted.structural_tag
        text = tag if isinstance(tag, str) else json.dumps(tag)
        kinds.append(("structural_tag", Constraint(structural_tag=text)))
    for _, constraint in kinds:
        constraint.no_whitespace = wanted.disable_any_whitespace
    if not kinds:
        raise bad_request(
            "'structured_outputs' needs one of 'json', 'json_object', 'regex', 'choice', 'grammar' and "
            "'structural_tag'",
            "structured_outputs",
        )
    return [(f"structured_outputs.{name}", constraint) for name, constraint in kinds]


def _older_fields(body: StructuredFields) -> Wanted:
    options: dict[str, Any] = {}
    if body.guided_whitespace_pattern is not None:
        options["whitespace_pattern"] = body.guided_whitespace_pattern
    kinds: Wanted = []
    for name, schema in (("guided_json", body.guided_json), ("json_schema", body.json_schema)):
        if schema is not None:
            kinds.append((name, _json_constraint(_parsed_schema(schema, name), options)))
    for name, regex in (("guided_regex", body.guided_regex), ("regex", body.regex)):
        if regex is not None:
            kinds.append((name, Constraint(regex=regex)))
    for name, grammar in (("guided_grammar", body.guided_grammar), ("ebnf", body.ebnf)):
        if grammar is not None:
            kinds.append((name, Constraint(ebnf=grammar)))
    if body.guided_choice is not None:
        kinds.append(("guided_choice", Constraint(choice=Choice(options=body.guided_choice))))
    return kinds


def _parsed_schema(schema: str | JsonSchema, param: str) -> JsonSchema:
    if not isinstance(schema, str):
        return schema
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{param!r} is not valid JSON: {error}", param) from None
    if not isinstance(parsed, dict | bool):
        raise bad_request(f"{param!r} is not a JSON schema, which is an object", param)
    return parsed


def _json_constraint(schema: JsonSchema, options: Mapping[str, Any] | None = None) -> Constraint:
    """`options`: of llguidance's compiler, for this schema."""
    if options and isinstance(schema, dict):
        own = schema.get("x-guidance")
        schema = {**schema, "x-guidance": {**(own if isinstance(own, dict) else {}), **options}}
    return Constraint(json_schema=json.dumps(schema, ensure_ascii=False))


def _closed(schema: Any) -> Any:
    """Objects of the schema take no other properties, unless it says which."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if schema.get("type") == "object" or "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


@dataclass(frozen=True)
class ToolFraming:
    """How a model writes tool calls; each tool parser gives its own.

    `{name}` stands for the tool's name, in a parameter's text for the parameter's; `{index}` for the call's
    number; `{string}` for true where the parameter is written raw, else false. Tokens of the tokenizer that
    appear in these texts are forced as tokens.
    """

    call_begin: str  # from the call's beginning to its arguments, the name included
    call_end: str  # after the arguments
    begin: str = ""  # before the first call
    separator: str = ""  # between two calls
    end: str = ""  # after the last call
    # One JSON object, or each argument with a text of its own before and after it.
    arguments: Literal["json", "parameters"] = "json"
    parameter_begin: str = ""
    parameter_end: str = ""
    parameter_separator: str = ""
    # How values of parameters are written: strings without quotes, all else as JSON; all as JSON; or as
    # Python's literals.
    values: Literal["raw", "json", "python"] = "raw"


def tool_call_constraint(
    framing: ToolFraming,
    tools: Sequence[ToolSpec],
    *,
    at_least_one: bool,
    parallel: bool,
    added_tokens: Mapping[str, int],
    special_ids: frozenset[int] = frozenset(),
    answer_schema: JsonSchema | None = None,
) -> Constraint:
    """Calls of `tools`, as the model writes them, whose arguments satisfy their schemas.

    Args:
        framing: of the model's tool parser.
        tools: those that may be called; of a named choice just that one.
        at_least_one: the output consists of calls; else text may come before the calls, or instead.
        parallel: whether more than one call may be made.
        added_tokens: ids of the tokenizer's added tokens by their text (`Tokenizer.added_tokens`).
        special_ids: which of them no text spells (`Tokenizer.special_ids`).
        answer_schema: instead of calls there may be JSON of this schema, and no other text.

    The caller sets `after_token_ids` and what belongs to it where the model thinks first.

    Raises:
        ApiError: 400 naming the tool and the keyword of its schema that can not be enforced.
    """
    if not tools:
        raise bad_request("there is no tool that could be called", "tools")
    for number, tool in enumerate(tools):
        _check_parameters(tool, f"tools[{number}].function.parameters")
    calls = _Calls(framing, LarkGrammar(added_tokens))
    if answer_schema is not None:
        lark = calls.grammar_or_json(tools, parallel, answer_schema)
    else:
        lark = calls.grammar(tools, at_least_one, parallel, special_ids)
    constraint = Constraint(lark=lark)
    check_constraint(constraint, "tools")
    return constraint


def _check_parameters(tool: ToolSpec, param: str) -> None:
    """The schema alone, so that the tool is named."""
    try:
        check_constraint(_json_constraint(_object_schema(tool)), param)
    except ApiError as error:
        raise bad_request(f"tool {tool.name!r}: {error.message}", param) from None


def _object_schema(tool: ToolSpec) -> dict[str, Any]:
    return {"type": "object", **tool.parameters}


class _Calls:
    """The grammar of calls in one framing."""

    def __init__(self, framing: ToolFraming, grammar: LarkGrammar) -> None:
        self._framing = framing
        self._lark = grammar

    def grammar(
        self, tools: Sequence[ToolSpec], at_least_one: bool, parallel: bool, special_ids: frozenset[int]
    ) -> str:
        """Lark's text."""
        framing, lark = self._framing, self._lark
        call = lark.any_of([self._call(tool) for tool in tools])
        more = f"({lark.literal(framing.separator)} {call})*" if parallel else ""
        if at_least_one:
            return lark.render(f"{lark.literal(framing.begin)} {call} {more} {lark.literal(framing.end)}")
        # Text in which calls may begin: what begins as they do is one.
        marker = lark.first_piece((framing.begin or framing.call_begin).split("{name}")[0])
        if framing.begin:
            first = f"{lark.literal(framing.begin[len(marker) :])} {call}"
        else:
            first = lark.any_of([self._call(tool, len(marker)) for tool in tools])
        calls = lark.rule(f"{first} {more} {lark.literal(framing.end)}")
        if lark.token_id(marker) in special_ids:  # no text contains it
            text = f"{lark.rule(ANY_TEXT)} {lark.literal(marker)}"
        else:
            text = lark.until(marker)
        return lark.render(f"{lark.rule(text)} {calls} | {lark.rule(ANY_TEXT)}")

    def grammar_or_json(self, tools: Sequence[ToolSpec], parallel: bool, schema: JsonSchema) -> str:
        """Lark's text: calls alone, or a value of the schema."""
        framing, lark = self._framing, self._lark
        call = lark.any_of([self._call(tool) for tool in tools])
        more = f"({lark.literal(framing.separator)} {call})*" if parallel else ""
        calls = lark.rule(f"{lark.literal(framing.begin)} {call} {more} {lark.literal(framing.end)}")
        return lark.render(f"{calls} | {lark.json(schema)}")

    def _call(self, tool: ToolSpec, skipped: int = 0) -> str:
        """`skipped`: characters of the beginning that were read already."""
        begin, end = self._framing.call_begin[skipped:].replace("{name}", tool.name), self._framing.call_end
        schema = _object_schema(tool)
        arguments = self._lark.json(schema) if self._framing.arguments == "json" else self._parameters(schema)
        return self._lark.rule(f"{self._indexed(begin)} {arguments} {self._indexed(end)}")

    def _indexed(self, text: str) -> str:
        return " /[0-9]{1,3}/ ".join(self._lark.literal(part) for part in text.split("{index}"))

    def _parameters(self, schema: dict[str, Any]) -> str:
        """Each parameter in its own text, in the schema's order, from the last one on."""
        lark, properties = self._lark, schema.get("properties") or {}
        required = set(schema.get("required") or ())
        definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        separator = lark.literal(self._framing.parameter_separator)
        # What may follow where nothing was written yet, and where something was.
        fresh = later = lark.rule("")
        for name in reversed(list(properties)):
            one = self._parameter(name, properties[name], definitions)
            left_out = [] if name in required else [fresh]
            fresh, later = (
                lark.any_of([f"{one} {later}", *left_out]),
                lark.any_of([f"{separator} {one} {later}", *([] if name in required else [later])]),
            )
        return fresh

    def _parameter(self, name: str, schema: Any, definitions: dict[str, Any]) -> str:
        framing, lark = self._framing, self._lark
        described = schema if isinstance(schema, dict) else {}
        is_raw = framing.values == "raw" and _is_text(described)
        begin = framing.parameter_begin.replace("{name}", name)
        begin = lark.literal(begin.replace("{string}", "true" if is_raw else "false"))
        end = framing.parameter_end
        choices = described.get("enum", [described["const"]] if "const" in described else None)
        if is_raw and choices:
            texts = lark.any_of([lark.literal(str(choice)) for choice in choices])
            return lark.rule(f"{begin} {texts} {lark.literal(end)}")
        if is_raw:
            return lark.rule(f"{begin} {lark.until(end)}")
        if framing.values == "python" and described.get("type") in _PYTHON_WORDS:
            words = [lark.literal(word) for word in _PYTHON_WORDS[str(described["type"])]]
            return lark.rule(f"{begin} {lark.any_of(words)} {lark.literal(end)}")
        value = lark.json({**definitions, **described})
        return lark.rule(f"{begin} {value} {lark.literal(end)}")


_PYTHON_WORDS = {"boolean": ("True", "False"), "null": ("None",)}


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a parameter takes strings, and is therefore written without quotes."""
    kind = schema.get("type")
    if kind is None:
        choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
        parts = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
        return bool(choices and all(isinstance(choice, str) for choice in choices)) or any(
            isinstance(part, dict) and _is_text(part) for part in parts
        )
    return kind == "string" or (isinstance(kind, list) and "string" in kind)
