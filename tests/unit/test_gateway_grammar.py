"""Guards that what clients ask of an output's form is enforced exactly, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.constraints.response_format import response_format_constraint
from gateway.constraints.tool_calls import tool_call_constraint
from gateway.parsers.events import ToolSpec
from gateway.parsers.framing import ToolFraming
from gateway.schemas.errors import ApiError
from gateway.schemas.requests import CompletionRequest
from moebius.grammar.compile import GrammarCheck, GrammarError, compiled, grammar_of, limits
from moebius.request_limits import MAX_CHOICES
from protos.engine_pb2 import Choice, Constraint

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


WEATHER = ToolSpec(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["c", "f"]},
            "now": {"type": "boolean"},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
TIME = ToolSpec("time")
HERMES = ToolFraming('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", separator="\n")
XML = ToolFraming(
    "<function={name}>\n",
    "</function>\n</tool_call>",
    begin="<tool_call>\n",
    arguments="parameters",
    parameter_begin="<parameter={name}>\n",
    parameter_end="\n</parameter>\n",
)
PYTHON = ToolFraming(
    "{name}(",
    ")",
    begin="[",
    separator=", ",
    end="]",
    arguments="parameters",
    parameter_begin="{name}=",
    parameter_separator=", ",
    values="python",
)
NUMBERED = ToolFraming("<|call|>f.{name}:{index}<|args|>", "<|/call|>", begin="<|calls|>", end="<|/calls|>")
DSML = ToolFraming(
    '<call name="{name}">',
    "</call>",
    arguments="parameters",
    parameter_begin='<p name="{name}" string="{string}">',
    parameter_end="</p>",
)


def calls_of(framing: ToolFraming, *, at_least_one: bool = True, parallel: bool = True) -> Constraint:
    """Calls of both tools."""
    return tool_call_constraint(
        framing, [WEATHER, TIME], at_least_one=at_least_one, parallel=parallel, added_tokens={}
    )


@pytest.mark.parametrize(
    ("framing", "good", "bad"),
    [
        (
            HERMES,
            [
                '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
                '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>\n'
                '<tool_call>\n{"name": "time", "arguments": {"any": 1}}\n</tool_call>',
            ],
            ["It rains.", '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'],
        ),
        (
            XML,
            [
                "<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\nYork\n</parameter>\n"
                "<parameter=days>\n3\n</parameter>\n<parameter=now>\ntrue\n</parameter>\n"
                "</function>\n</tool_call>",
                "<tool_call>\n<function=time>\n</function>\n</tool_call>",
            ],
            [
                "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>",
                "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
                "<parameter=days>\nsome\n</parameter>\n</function>\n</tool_call>",
                "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
                "<parameter=unit>\nk\n</parameter>\n</function>\n</tool_call>",
            ],
        ),
        (
            PYTHON,
            ['[get_weather(city="Rome", now=True), time()]', '[get_weather(city="Rome", unit="c")]'],
            ["[get_weather()]", '[get_weather(city="Rome", now=true)]', "[time(),]"],
        ),
        (
            NUMBERED,
            ["<|calls|><|call|>f.time:0<|args|>{}<|/call|><|call|>f.time:1<|args|>{}<|/call|><|/calls|>"],
            ["<|calls|><|call|>f.time:x<|args|>{}<|/call|><|/calls|>", "<|calls|><|/calls|>"],
        ),
        (
            DSML,
            [
                '<call name="get_weather"><p name="city" string="true">Rome</p>'
                '<p name="days" string="false">2</p></call>'
            ],
            ['<call name="get_weather"><p name="city" string="false">Rome</p></call>'],
        ),
    ],
    ids=["hermes", "xml", "python", "numbered", "dsml"],
)
def test_forced_calls_have_the_models_framing(framing: ToolFraming, good: list[str], bad: list[str]) -> None:
    """Calls as the model writes them, with arguments that satisfy their schemas, and no other text."""
    constraint = calls_of(framing)
    for text in good:
        assert takes(constraint, text), text
    for text in bad:
        assert not takes(constraint, text), text


def test_one_call_alone() -> None:
    """Without `parallel_tool_calls` the output is complete after one call."""
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    assert takes(calls_of(HERMES, parallel=False), call)
    assert not takes(calls_of(HERMES, parallel=False), f"{call}\n{call}")


@pytest.mark.parametrize("framing", [HERMES, XML], ids=["in the call", "before the calls"])
def test_calls_of_free_choice(framing: ToolFraming) -> None:
    """Text, or text and then calls that satisfy their schemas; text that only resembles one is text."""
    constraint = tool_call_constraint(
        framing, [TIME], at_least_one=False, parallel=True, added_tokens={"<tool_call>": 7}
    )
    # The added token's id is one that the byte tokenizer spells otherwise: rules by text are enough here.
    plain = Constraint(lark=constraint.lark.replace("<[7]>", '"<tool_call>"'))
    call = {
        HERMES: '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        XML: "<tool_call>\n<function=time>\n</function>\n</tool_call>",
    }[framing]
    assert takes(plain, "It is late.")
    assert takes(plain, f"Let me see. {call}")
    assert takes(plain, call)
    assert takes(plain, "The <tool is broken")
    assert not takes(plain, "<tool_call>\nlater")
    assert not takes(plain, f"{call} more text")


def test_calls_or_a_json_answer() -> None:
    """With a response format an output is calls or an answer of its schema; no other text, and not both."""
    constraint = tool_call_constraint(
        HERMES, [TIME], at_least_one=False, parallel=True, added_tokens={}, answer_schema=POINT
    )
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    assert takes(constraint, call)
    assert takes(constraint, f"{call}\n{call}")
    assert takes(constraint, '{"x": 1}')
    for text in ("It is late.", '{"y": 1}', f'{{"x": 1}}{call}', f'{call}{{"x": 1}}', f"Now: {call}"):
        assert not takes(constraint, text), text


def test_markers_that_are_tokens_are_asked_for_as_tokens() -> None:
    """What merely spells a marker would not be one for the parser."""
    constraint = tool_call_constraint(
        HERMES,
        [TIME],
        at_least_one=True,
        parallel=False,
        added_tokens={"<tool_call>": 300, "</tool_call>": 301},
    )
    assert "<[300]>" in constraint.lark
    assert "<[301]>" in constraint.lark
    assert "tool_call" not in constraint.lark


def test_a_tool_with_an_unsupported_schema_is_named() -> None:
    """Of several tools, the one at fault, and its keyword."""
    bad = ToolSpec("odd", {"properties": {"a": {"not": {}}}})
    with pytest.raises(ApiError) as caught:
        tool_call_constraint(HERMES, [TIME, bad], at_least_one=True, parallel=True, added_tokens={})
    assert caught.value.param == "tools[1].function.parameters"
    assert "'odd'" in caught.value.message
    assert "not (at properties.a)" in caught.value.message


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
