"""Converts `response_format` and its relatives to the engine's `Constraint` on an answer.

A constraint is compiled here, in a prompt process, so that what cannot be enforced is a 400 that names the
parameter and the keyword; the engine compiles it again for its masks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from gateway.schemas.errors import bad_request
from gateway.schemas.structured import (
    JsonSchema,
    ResponseFormat,
    StructuredFields,
    StructuredOutputs,
)
from moebius.grammar.compile import GrammarCheck, GrammarError, unsupported_keywords
from protos.engine_pb2 import Choice, Constraint

Wanted = list[tuple[str, Constraint]]  # with the parameter that each comes from


class GrammarTakesLong(Exception):
    """Compiling a grammar takes longer than other requests should wait: another process compiles it."""


class _Checker:
    """Holds the check of constraints in this process; `check_with` replaces it."""

    check = GrammarCheck()


def check_with(compiler: Callable[[Constraint], object]) -> None:
    """Compiles constraints with this function from now on; it raises GrammarError or GrammarTakesLong."""
    _Checker.check = GrammarCheck(compiler=compiler)


def response_format_constraint(body: StructuredFields) -> Constraint | None:
    """Returns the constraint that the request's fields ask for, or None without any.

    Raises:
        ApiError: 400 naming parameter and keyword; it cannot be enforced, or two fields ask for different
            things.
    """
    wanted: Wanted = []
    if body.response_format is not None:
        wanted += _response_format(body.response_format)
    if body.structured_outputs is not None:
        wanted += _structured_outputs(body.structured_outputs)
    wanted += _older_fields(body)
    if not wanted:
        return None
    param, constraint = wanted[0]
    for other, asked in wanted[1:]:
        if asked != constraint:  # clients send one grammar under the names of several servers
            raise bad_request(f"{param!r} and {other!r} ask for different outputs: send one", other)
    check_constraint(constraint, param)
    return constraint


def check_constraint(constraint: Constraint, param: str) -> None:
    """Raises ApiError 400, naming `param`, when the constraint cannot be enforced."""
    try:
        _Checker.check.check(constraint)
    except GrammarError as error:
        raise bad_request(
            f"{param!r} cannot be enforced: {error}{_where(constraint, error)}", param
        ) from None


def _where(constraint: Constraint, error: GrammarError) -> str:
    """Returns where in a schema the keyword at fault is, or an empty string."""
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
            return [("response_format.schema", json_constraint(wanted.schema_))]
        return [("response_format", Constraint(json_object=True))]
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise bad_request(
                "a 'response_format' of type 'json_schema' needs 'json_schema'", "response_format"
            )
        schema = wanted.json_schema.schema_
        lenient = {} if wanted.json_schema.strict is not False else {"lenient": True}
        made = json_constraint({"type": "object"} if schema is None else schema, lenient)
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
        kinds.append(("json", json_constraint(schema, options)))
    if wanted.json_object:
        kinds.append(("json_object", json_constraint({"type": "object"}, options)))
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
            kinds.append((name, json_constraint(_parsed_schema(schema, name), options)))
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


def json_constraint(schema: JsonSchema, options: Mapping[str, Any] | None = None) -> Constraint:
    """Returns a constraint for a schema; `options` are llguidance's for compiling it."""
    if options and isinstance(schema, dict):
        own = schema.get("x-guidance")
        schema = {**schema, "x-guidance": {**(own if isinstance(own, dict) else {}), **options}}
    return Constraint(json_schema=json.dumps(schema, ensure_ascii=False))


def _closed(schema: Any) -> Any:
    """Returns the schema with `additionalProperties` false where it does not set it."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if schema.get("type") == "object" or "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed
