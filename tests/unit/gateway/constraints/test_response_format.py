"""Guards that what clients ask of an output's form is enforced exactly, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.constraints.response_format import response_format_constraint
from gateway.schemas.errors import ApiError
from gateway.schemas.requests import CompletionRequest
from moebius.grammar.compile import GrammarCheck, GrammarError, compiled, grammar_of
from protos.engine_pb2 import Constraint

# A token per byte: every text is that of exactly one sequence of tokens.
BYTES = LLTokenizer("byte")
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}


def constraint_of(**fields: Any) -> Constraint | None:
    """Returns the gateway's constraint for a request with these fields."""
    return response_format_constraint(CompletionRequest.model_validate({"prompt": "x", **fields}))


def takes(constraint: Constraint | None, text: str) -> bool:
    """Returns whether an output may be exactly this text."""
    assert constraint is not None
    matcher = LLMatcher(BYTES, grammar_of(constraint), log_level=0)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}},
            '{\n  "x": 1\n}',
            '{"x": "1"}',
        ),
        ({"response_format": {"type": "json_object", "schema": POINT}}, '{"x":1}', '{"y":1}'),
        ({"structured_outputs": {"json": POINT}}, '{"x": 1}', "{}"),
        ({"structured_outputs": {"json": json.dumps(POINT)}}, '{"x": 1}', "{}"),
        ({"structured_outputs": {"json": POINT, "disable_any_whitespace": True}}, '{"x":1}', '{"x": 1}'),
        ({"structured_outputs": {"json": POINT, "whitespace_pattern": " "}}, '{"x": 1}', '{\n"x":1}'),
        ({"structured_outputs": {"json_object": True}}, "{}", "3"),
        ({"structured_outputs": {"regex": "[ab]+c"}}, "abbc", "ab"),
        ({"structured_outputs": {"choice": ["yes", 'n"o\n', "日本"]}}, 'n"o\n', "no"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}}, "a12", "a"),
        ({"structured_outputs": {"grammar": 'start: "a" /[0-9]/'}}, "a1", "a12"),
        ({"guided_json": POINT}, '{"x": 1}', "{}"),
        ({"guided_regex": "a|b"}, "b", "c"),
        ({"guided_choice": ["one", "two"]}, "two", "three"),
        ({"guided_grammar": 'root ::= "x" | "y"'}, "y", "z"),
        ({"regex": "a|b"}, "a", "ab"),
        ({"ebnf": 'root ::= "x" | "y"'}, "x", "xy"),
        ({"json_schema": json.dumps(POINT)}, '{"x": 1}', "{}"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_each_field_is_enforced(fields: dict[str, Any], good: str, bad: str) -> None:
    """What each of the fields allows is allowed, and nothing else."""
    constraint = constraint_of(**fields)
    assert takes(constraint, good)
    assert not takes(constraint, bad)


def test_no_field_means_no_constraint() -> None:
    """Requests that ask for nothing are not masked."""
    assert constraint_of() is None
    assert constraint_of(response_format={"type": "text"}) is None
    assert constraint_of(response_format=None, guided_json=None) is None


def test_white_space_is_bounded() -> None:
    """A model that continues with line breaks for ever, as some do, has to continue with JSON."""
    constraint = constraint_of(guided_json=POINT)
    assert takes(constraint, '{ "x" : 1 }')
    assert takes(constraint, '{\n    "x": 1\n}')
    assert not takes(constraint, '{\n\n\n\n"x": 1}')
    assert not takes(constraint, "{" + " " * 500 + '"x": 1}')


def test_a_text_format_may_come_with_another_field() -> None:
    """Clients send their default along."""
    assert takes(constraint_of(response_format={"type": "text"}, guided_choice=["a"]), "a")


def test_equal_values_by_several_names_are_one() -> None:
    """guidance's `VLLMModel` sends its grammar by vLLM's old and new name; other values are refused."""
    grammar = '%llguidance {}\n\nstart: "a" /[0-9]/\n'
    sent = {"guided_decoding_backend": "guidance", "guided_grammar": grammar}
    assert takes(constraint_of(**sent, structured_outputs={"grammar": grammar}), "a1")
    assert takes(constraint_of(guided_json=json.dumps(POINT), structured_outputs={"json": POINT}), '{"x": 1}')
    with pytest.raises(ApiError) as caught:
        constraint_of(**sent, structured_outputs={"grammar": 'start: "b"'})
    assert caught.value.param == "guided_grammar"
    assert "'structured_outputs.grammar'" in caught.value.message


def test_unlisted_properties_can_be_closed() -> None:
    """`disable_additional_properties` reaches nested objects, and leaves what a schema says itself."""
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    schema = {"type": "object", "properties": {"p": inner}, "required": ["p"], "additionalProperties": True}
    text = '{"p": {"x": 1, "y": 2}, "q": 3}'
    assert takes(constraint_of(structured_outputs={"json": schema}), text)
    closed = constraint_of(structured_outputs={"json": schema, "disable_additional_properties": True})
    assert not takes(closed, text)
    assert takes(closed, '{"p": {"x": 1}, "q": 3}')


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    """`response_format` with a schema."""
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        (
            {"response_format": schema_format({"type": "object", "properties": {"a": {"not": {}}}})},
            "response_format.json_schema.schema",
            "not (at properties.a)",
        ),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems (at the top)"),
        ({"guided_json": {"type": "nothing"}}, "guided_json", "type is 'nothing'; allowed: null"),
        ({"guided_json": {"$ref": "http://host/x"}}, "guided_json", "http://host/x"),
        ({"guided_json": {"enum": []}}, "guided_json", "no value satisfies it"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": "3"}, "guided_json", "an object"),
        ({"guided_regex": "a(?=b)"}, "guided_regex", "look-around"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "root ="}, "guided_grammar", "cannot be read"),
        ({"guided_grammar": "start: nobody"}, "guided_grammar", "nobody"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "empty"),
        ({"guided_regex": "a" * 300_000}, "guided_regex", "at most"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "send one"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "send one"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs 'json_schema'"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structures"),
    ],
)
def test_what_can_not_be_enforced_is_refused(fields: dict[str, Any], param: str, part: str) -> None:
    """A 400 that names the parameter and the keyword, never an output in any other form."""
    with pytest.raises(ApiError) as caught:
        constraint_of(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert part in caught.value.message


def test_a_schema_that_is_not_strict_leaves_out_what_can_not_be_enforced() -> None:
    """`strict: false`, said outright, is the promise to take less."""
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(ApiError):
        constraint_of(response_format=schema_format(schema))
    with pytest.raises(ApiError):
        constraint_of(response_format=schema_format(schema, strict=True))
    constraint = constraint_of(response_format=schema_format(schema, strict=False))
    assert takes(constraint, "[1, 1]")
    assert not takes(constraint, '["1"]')


TAG = {"begin": "<f=point>", "schema": POINT, "end": "</f>"}
FORMATS = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [{"begin": "<f=point>", "content": {"type": "json_schema", "json_schema": POINT}, "end": "</f>"}],
}


@pytest.mark.parametrize(
    "tag", [{"structures": [TAG], "triggers": ["<f="]}, {"format": FORMATS}], ids=["older", "newer"]
)
def test_structural_tags(tag: dict[str, Any]) -> None:
    """Text is free until a trigger; then a tag follows, whose inside satisfies its schema."""
    for constraint in (
        constraint_of(response_format={"type": "structural_tag", **tag}),
        constraint_of(structured_outputs={"structural_tag": json.dumps({"type": "structural_tag", **tag})}),
    ):
        assert takes(constraint, "any text < f")
        assert takes(constraint, 'text <f=point>{"x": 1}</f> and <f=point>{"x": 2}</f>.')
        assert not takes(constraint, "text <f=other>")
        assert not takes(constraint, 'text <f=point>{"y": 1}</f>')


@pytest.mark.parametrize(
    ("described", "part"),
    [
        ({"format": {"type": "nothing"}}, "allowed: const_string"),
        ({"format": {"type": "sequence", "elements": []}}, "format.elements is empty"),
        ({"format": {"type": "or", "elements": [{"type": "regex"}]}}, "format.elements[0].pattern"),
        ({"structures": [{"begin": "<g>"}], "triggers": ["<f"]}, "triggers"),
        ({"structures": [3], "triggers": []}, "something else than objects"),
        ({}, "neither"),
    ],
)
def test_malformed_structural_tags_are_named(described: dict[str, Any], part: str) -> None:
    """The message says where."""
    with pytest.raises(GrammarError) as caught:
        GrammarCheck().check(Constraint(structural_tag=json.dumps(described)))
    assert part in str(caught.value)


def test_answers_are_remembered_within_a_bound() -> None:
    """The same schema is compiled once while it is among the latest; refusals are remembered, too."""
    done: list[Constraint] = []

    def counting(constraint: Constraint) -> str:
        done.append(constraint)
        return compiled(constraint)

    check = GrammarCheck(remembered=2, compiler=counting)
    bad = Constraint(json_schema='{"not": {}}')
    for _ in range(3):
        check.check(Constraint(json_object=True))
        with pytest.raises(GrammarError, match="not"):
            check.check(bad)
    assert len(done) == 2
    check.check(Constraint(json_schema='{"type": "null"}'))
    check.check(Constraint(json_object=True))
    assert len(done) == 4
