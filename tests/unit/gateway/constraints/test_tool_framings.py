"""Guards that calls have the framing of the model's format exactly, around arguments of their schemas."""

from __future__ import annotations

import pytest

from gateway.constraints.tool_calls import tool_call_constraint
from gateway.parsers.events import ToolSpec
from gateway.parsers.framing import ToolFraming
from gateway.schemas.errors import ApiError
from protos.engine_pb2 import Constraint
from tests.unit.gateway.constraints.test_response_format import POINT, takes

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
    """The error names the tool at fault of several, and its keyword."""
    bad = ToolSpec("odd", {"properties": {"a": {"not": {}}}})
    with pytest.raises(ApiError) as caught:
        tool_call_constraint(HERMES, [TIME, bad], at_least_one=True, parallel=True, added_tokens={})
    assert caught.value.param == "tools[1].function.parameters"
    assert "'odd'" in caught.value.message
    assert "not (at properties.a)" in caught.value.message
