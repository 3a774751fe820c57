"""Guards that what is written under a JSON schema satisfies it, to the last digit, or that it is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal, localcontext
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from llguidance import LLMatcher
from pydantic import BaseModel, Field

from gateway.constraints.tool_calls import tool_call_constraint
from gateway.parsers.events import ToolSpec
from gateway.parsers.framing import ToolFraming
from moebius.grammar.compile import GrammarError, compiled, grammar_of
from moebius.grammar.numbers import MOST_DIGITS
from protos.engine_pb2 import Constraint
from tests.unit.gateway.constraints.test_response_format import BYTES, schema_format, takes
from tests.unit.gateway.constraints.test_response_format import constraint_of as asked

NAMES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
EDGES = [0, 1, -1, 9, 10, 2**31, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**64, -(10**30), 10**39]
whole = st.one_of(
    st.integers(-120, 120),
    st.builds(lambda edge, step: edge + step, st.sampled_from(EDGES), st.integers(-3, 3)),
    st.integers(-(10**38), 10**38),
)
decimal = st.builds(lambda value, places: round(value, places), st.floats(-1000, 1000), st.integers(0, 4))


def constraint(schema: Any, **more: Any) -> Constraint:
    return Constraint(json_schema=json.dumps(schema), **more)


class Texts:
    """Which texts a schema allows; one compilation for many."""

    def __init__(self, schema: Any) -> None:
        self._matcher = LLMatcher(BYTES, grammar_of(constraint(schema)), log_level=0)
        assert not self._matcher.is_error(), (schema, self._matcher.get_error())

    def take(self, text: str) -> bool:
        matcher, data = self._matcher.deep_copy(), list(text.encode())
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def texts(schema: Any) -> Texts | None:
    """None: no value satisfies the schema."""
    try:
        return Texts(schema)
    except GrammarError as error:
        if "no value satisfies it" not in str(error):
            raise
        return None


def is_within(value: Decimal, bounds: Mapping[str, float]) -> bool:
    """Returns whether it is, as JSON schemas define the four keywords."""
    tests = {
        "minimum": lambda bound: value >= bound,
        "maximum": lambda bound: value <= bound,
        "exclusiveMinimum": lambda bound: value > bound,
        "exclusiveMaximum": lambda bound: value < bound,
    }
    return all(tests[name](Decimal(str(bound))) for name, bound in bounds.items())


@given(bounds=st.dictionaries(st.sampled_from(NAMES), st.one_of(whole, decimal), max_size=3), other=whole)
@example(bounds={"minimum": 9007199254740990, "maximum": 9007199254740999}, other=9007199254741000)
@example(bounds={"minimum": -(2**63), "maximum": 2**63 - 1}, other=2**63)
@example(bounds={"exclusiveMaximum": 2**64}, other=2**64)
def test_integers_are_exactly_those_within_bounds(bounds: dict[str, float], other: int) -> None:
    """Around each bound, however large it is: bounds are no float64."""
    found = texts({"type": "integer", **bounds})
    near = {int(bound) + step for bound in bounds.values() for step in (-2, -1, 0, 1, 2)} | {other, 0}
    for value in near:
        allowed = found is not None and found.take(str(value))
        assert allowed == is_within(Decimal(value), bounds), value


@given(bounds=st.dictionaries(st.sampled_from(NAMES), st.one_of(decimal, whole), max_size=3), other=decimal)
@example(bounds={"minimum": 0.1, "exclusiveMaximum": 0.25}, other=0.2)
@example(bounds={"exclusiveMinimum": -0.0}, other=0.0)
@example(bounds={"minimum": 1e-7}, other=0.0)
def test_numbers_are_exactly_those_within_bounds(bounds: dict[str, float], other: float) -> None:
    """Numbers within bounds are allowed with and without a fraction, and with zeros at its end."""
    found = texts({"type": "number", **bounds})
    with localcontext(prec=200):
        check_numbers(found, bounds, other)


def check_numbers(found: Texts | None, bounds: Mapping[str, float], other: float) -> None:
    steps = [Decimal(step) for step in ("0", "1", "-1", "0.5", "-0.5", "0.0001", "-0.0001", "-0.00000000001")]
    near = {Decimal(str(bound)) + step for bound in bounds.values() for step in steps} | {Decimal(str(other))}
    for value in near:
        text = f"{value:f}"
        if value == 0 and text.startswith("-"):
            continue
        for spelled in (text, text + ("00" if "." in text else ".0")):
            allowed = found is not None and found.take(spelled)
            assert allowed == is_within(value, bounds), spelled


@given(
    step=st.one_of(st.integers(1, 60), st.sampled_from([0.1, 0.25, 1.5, 0.3, 1e-30, 2**33])),
    bounds=st.dictionaries(st.sampled_from(NAMES), whole, max_size=2),
    kind=st.sampled_from(["integer", "number"]),
)
def test_multiples_are_multiples(step: float, bounds: dict[str, float], kind: str) -> None:
    """What is allowed is a multiple within the bounds; what cannot be expressed is refused by its name."""
    schema = {"type": kind, "multipleOf": step, **bounds}
    try:
        compiled(constraint(schema))
    except GrammarError as error:
        if not any(word in str(error) for word in ("multipleOf", "imum", "no value satisfies it")):
            raise
        return
    found = texts(schema)
    assert found is not None
    exact = Decimal(str(step))
    for factor in (-3, -1, 0, 1, 2, 7, 1000):
        for value in (exact * factor, exact * factor + 1, exact * factor / 2):
            is_valid = value % exact == 0 and is_within(value, bounds)
            is_valid &= kind == "number" or value == int(value)
            assert is_valid or not found.take(f"{value:f}"), value


@given(values=st.lists(st.one_of(whole, decimal, st.sampled_from(["a", None, True])), min_size=1, max_size=4))
@example(values=[9007199254740993])
@example(values=[2**64 + 1, 1.0])
def test_constants_are_exact(values: list[Any]) -> None:
    """Numbers, too, which are equal or not however they are spelled."""
    found = texts({"enum": values})
    assert found is not None
    for value in values:
        if not isinstance(value, float):
            assert found.take(json.dumps(value))
        if isinstance(value, int) and not isinstance(value, bool):
            assert found.take(str(value + 1)) == (value + 1 in values)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "integer", "minimum": 2**53 + 1}, {"maximum": 2**60}]},
        {"type": "integer", "multipleOf": 3, "maximum": 2**53 + 3},
        {"enum": [{"id": 2**53 + 1}]},
        {"type": "object", "patternProperties": {"^a": {"type": "integer", "minimum": 2**53 + 1}}},
        {"allOf": [{"type": "integer", "multipleOf": 99991}, {"multipleOf": 99989}]},
        {"type": "integer", "minimum": 10**200},
        {"type": "number", "minimum": 1e-300},
    ],
)
def test_numbers_that_can_not_be_exact_are_refused(schema: Any) -> None:
    """Numbers are refused where llguidance writes them, as among combined schemas, with what is allowed."""
    with pytest.raises(GrammarError, match=r"numbers are between|digits|the product of all is at most"):
        compiled(constraint(schema))


@pytest.mark.parametrize("kind", ["integer", "number", None])
def test_digits_are_bounded(kind: str | None) -> None:
    """A model that goes on with digits, as some do, has to go on with something else."""
    found = Texts({"type": kind} if kind else {})
    assert found.take("1" * MOST_DIGITS)
    assert not found.take("1" * (MOST_DIGITS + 1))
    assert found.take("-17")
    if kind != "integer":
        assert found.take("0." + "3" * MOST_DIGITS)
        assert not found.take("0." + "3" * (MOST_DIGITS + 1))
        assert found.take("6.02e23")
        assert found.take("1E-7")
        for text in ("1e999", "123456789e299", "1e0000001"):  # infinite, or nearly; or without end
            assert not found.take(text)


FRAMING = ToolFraming(call_begin='<tool_call>{"name": "{name}", "arguments": ', call_end="}</tool_call>")


def call_of(schema: dict[str, Any]) -> Constraint:
    return tool_call_constraint(
        FRAMING, [ToolSpec("f", schema)], at_least_one=True, parallel=False, added_tokens={}
    )


def test_digits_and_white_space_are_bounded_everywhere() -> None:
    """In tool calls, in tags, where a schema brings options of its own, and in any JSON."""
    schema = {"type": "object", "properties": {"x": {"type": "number"}}}
    tag = {"begin": "<", "schema": schema, "end": ">"}
    lenient = {**schema, "x-guidance": {"lenient": True, "whitespace_flexible": True}}
    before, after = '<tool_call>{"name": "f", "arguments": ', "}</tool_call>"
    for one, start, end in (
        (asked(response_format={"type": "json_object"}), "", ""),
        (asked(response_format=schema_format(schema)), "", ""),
        (asked(response_format=schema_format(schema, strict=False)), "", ""),
        (asked(guided_json=lenient), "", ""),
        (
            asked(response_format={"type": "structural_tag", "structures": [tag], "triggers": ["<"]}),
            "a<",
            ">",
        ),
        (call_of(schema), before, after),
        (call_of(lenient), before, after),
    ):
        assert takes(one, f'{start}{{"x": 1.5}}{end}')
        assert takes(one, f'{start}{{\n  "x":\t1}}{end}') is False
        assert not takes(one, f'{start}{{\n\n"x": 1}}{end}')
        assert not takes(one, f'{start}{{"x":  1}}{end}')
        assert not takes(one, f'{start}{{"x": {"1" * 400}}}{end}')
        assert not takes(one, f'{start}{{"x": 0.{"3" * 400}}}{end}')


COLOURS = ["red", "green", "blue"]


@pytest.mark.parametrize(
    ("items", "good", "bad"),
    [
        (
            {"enum": COLOURS},
            ['["red"]', '["blue", "red"]'],
            ['["red","red"]', '["blue","red","blue"]', '["x"]'],
        ),
        ({"type": "string", "enum": COLOURS}, ["[]"], ['["red","red"]']),
        ({"type": "integer", "minimum": 1, "maximum": 12}, ["[1,12,2]"], ["[1,12,1]", "[13]"]),
        ({"type": "boolean"}, ["[true,false]"], ["[true,false,true]"]),
        ({"enum": [1, 1.0, True, None]}, ["[1,true,null]"], ["[1,1]", "[true,true]"]),
        ({"anyOf": [{"$ref": "#/$defs/c"}, {"type": "null"}]}, ['[null,"red"]'], ["[null,null]"]),
    ],
)
def test_unique_items_of_few_values(items: Any, good: Sequence[str], bad: Sequence[str]) -> None:
    """Each value once, in any order."""
    found = Texts({"type": "array", "items": items, "uniqueItems": True, "$defs": {"c": {"enum": COLOURS}}})
    assert all(map(found.take, good))
    assert not any(map(found.take, bad))


@given(count=st.integers(1, 6), least=st.integers(0, 4), most=st.integers(0, 7), drawn=st.data())
def test_unique_items_are_counted(count: int, least: int, most: int, drawn: st.DataObject) -> None:
    """Unique items are counted together with minItems and maxItems."""
    schema = {"type": "array", "uniqueItems": True, "items": {"enum": list(range(count))}}
    schema |= {"minItems": least, "maxItems": most}
    found = texts(schema)
    values = drawn.draw(st.lists(st.integers(0, count), max_size=7))
    is_valid = jsonschema.Draft202012Validator(schema).is_valid(values)
    assert is_valid == (found is not None and found.take(json.dumps(values)))


def test_unique_items_of_many_values_are_refused_by_name() -> None:
    """Which of infinitely many there were is nothing that a grammar knows; at most one is no question."""
    for items in ({"type": "string"}, {}, {"type": "integer"}, {"enum": list(range(65))}):
        schema = {
            "type": "object",
            "properties": {"tags": {"type": "array", "items": items, "uniqueItems": True}},
        }
        with pytest.raises(GrammarError, match=r"uniqueItems \(at properties.tags\)"):
            compiled(constraint(schema))
    assert Texts({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1}).take(
        '["a"]'
    )


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)] = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str
    friends: list[Cat | Dog] = []


class Owner(BaseModel):
    name: str
    account: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
    rate: Annotated[float, Field(gt=0, lt=1)] | None = None
    days: set[Literal["mon", "tue", "wed"]] = set()
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    more: dict[str, list[int]] = {}


def test_pydantic_models() -> None:
    """Sets, unions that a property tells apart, 64-bit integers, recursion."""
    found = Texts(Owner.model_json_schema())
    dog = Dog(kind="dog", name="Rex", friends=[Cat(kind="cat"), Dog(kind="dog", name="Max")])
    owner = Owner(name="Zoë", account=2**63 - 1, rate=0.5, days={"tue", "mon"}, pet=dog, more={"a": [1, 2]})
    assert found.take(owner.model_dump_json())
    assert found.take(json.dumps(owner.model_dump(mode="json"), indent=2, ensure_ascii=False))
    dumped = owner.model_dump(mode="json")
    for change in ({"account": 2**63}, {"rate": 1.0}, {"days": ["mon", "mon"]}, {"pet": {"kind": "fox"}}):
        assert not found.take(json.dumps(dumped | change, ensure_ascii=False))


leaves = st.sampled_from(
    [
        True, {}, {"type": "integer"}, {"type": "number", "minimum": 1}, {"type": "string", "maxLength": 2},
        {"enum": ["a", 1, None, [1]]}, {"const": 2}, {"type": ["null", "boolean"]}, {"$ref": "#/$defs/d"},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 3}, {"minimum": 2}, {"maxLength": 1}, False,
        {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", 1]}}, {"$ref": "#"},
    ]
)  # fmt: skip


def grown(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas that have others in them."""
    names = st.sampled_from(["p", "q", "r"])
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(names, parts, max_size=3)},
        optional={"required": st.lists(names, unique=True, max_size=2), "additionalProperties": parts},
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": parts},
        optional={
            "prefixItems": st.lists(parts, max_size=2),
            "minItems": st.integers(0, 3),
            "maxItems": st.integers(0, 3),
        },
    )
    combined = st.builds(lambda name, some: {name: some}, st.sampled_from(["anyOf", "allOf", "oneOf"]),
                         st.lists(parts, min_size=1, max_size=3))  # fmt: skip
    beside = st.builds(
        lambda one, other: {**(one if isinstance(one, dict) else {}), **other}, combined, objects
    )
    return st.one_of(objects, arrays, combined, beside)


values: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([0, 1, 2, 3, -1, 1.5, "", "a", "b", "abc", True, False, None, []]),
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.dictionaries(st.sampled_from(["p", "q", "r", "z"]), parts, max_size=3),
    ),
    max_leaves=5,
)


@given(schema=st.recursive(leaves, grown, max_leaves=6), some=st.lists(values, min_size=1, max_size=6))
def test_what_is_allowed_is_valid(schema: Any, some: list[Any]) -> None:
    """What any combination of keywords allows is valid; and what is valid is allowed, in the order of the
    schema's properties.

    The reference is the package `jsonschema`. Not every combination can be enforced: others are refused.
    """
    assume(isinstance(schema, dict))
    schema = {**schema, "$defs": {"d": {"type": "object", "properties": {"p": {"$ref": "#/$defs/d"}}}}}
    try:
        compiled(constraint(schema))
    except GrammarError:
        return
    found, validator = Texts(schema), jsonschema.Draft202012Validator(schema)
    for value in some:
        try:
            is_valid = validator.is_valid(value)
        except RecursionError:
            continue
        allowed = found.take(json.dumps(value))
        assert is_valid or not allowed, value
        if is_valid and not isinstance(value, dict | list):
            assert allowed, value


@pytest.mark.parametrize("needed", [[], ["p4999"]])
def test_wide_schemas_are_no_deep_ones(needed: list[str]) -> None:
    """llguidance descends on the stack, whose end would be the end of the process."""
    names = [f"p{number}" for number in range(5000)]
    integer = {"type": "integer"}
    wide = {"type": "object", "properties": dict.fromkeys(names, integer), "required": needed}
    assert not LLMatcher(BYTES, grammar_of(constraint(wide)), log_level=0).is_error()
    long = {"type": "array", "prefixItems": [integer] * 5000}
    assert not LLMatcher(BYTES, grammar_of(constraint(long)), log_level=0).is_error()
    few = {"type": "object", "properties": dict.fromkeys(names[:390], integer)}
    assert Texts(few).take('{"p7": 1, "p389": 2}')


def test_references_that_never_end_are_refused() -> None:
    """A definition that is itself has no text."""
    for schema in (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/missing"},
    ):
        with pytest.raises(GrammarError):
            compiled(constraint(schema))
