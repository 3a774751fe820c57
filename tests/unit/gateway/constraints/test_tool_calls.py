"""Guards that calls which a grammar allows satisfy their schemas once they are parsed, in every format."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from gateway.constraints.tool_calls import tool_call_constraint
from gateway.parsers.events import OutputPlan, ToolSpec
from gateway.parsers.registry import TOOLS, tool_format
from gateway.schemas.errors import ApiError
from moebius.grammar.compile import grammar_of
from protos.engine_pb2 import Constraint
from tests.helpers.parser_streams import Parsed, in_characters, parsed, read
from tests.helpers.tiny_tokenizer import byte_level_tokenizer

BYTES = LLTokenizer("byte")
RAW = tuple(
    name for name, form in TOOLS.items() if form.framing.arguments != "json" and form.framing.values == "raw"
)
PATCH = """start: begin hunk+ end
begin: "*** Begin Patch" LF
hunk: "*** Add File: " filename LF added+
filename: /(.+)/
added: "+" /(.*)/ LF -> line
end: "*** End Patch" LF?
%import common.LF
"""
EXPRESSION = """start: expr
?expr: term (("+" | "-") term)*
?term: NUMBER | "(" expr ")" | ESCAPED_STRING
%import common (NUMBER, ESCAPED_STRING)
%import common.WS
%ignore WS
"""


def constraint_of(name: str, tools: tuple[ToolSpec, ...], **more: Any) -> Constraint:
    """Calls as a format writes them."""
    form = tool_format(name)
    openers = (*form.openers, *form.sections)
    given = {"at_least_one": True, "parallel": False, "openers": openers, "added_tokens": {}, **more}
    return tool_call_constraint(form.framing, tools, **given)


def takes(constraint: Constraint, text: str) -> bool:
    """Returns whether an output may be exactly this text."""
    matcher = LLMatcher(BYTES, grammar_of(constraint), log_level=0)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def call(name: str, tool: str, arguments: dict[str, str]) -> str:
    """Returns a call in a format, its arguments as the model writes them."""
    framing = tool_format(name).framing
    begin = framing.begin + framing.call_begin.replace("{name}", tool).replace("{index}", "0")
    if framing.arguments == "json":
        written = "{" + ", ".join(f'"{key}": {value}' for key, value in arguments.items()) + "}"
    else:
        written = framing.parameter_separator.join(
            framing.parameter_begin.replace("{name}", key).replace("{string}", "true")
            + (value if value.isdigit() else framing.quote + value + framing.quote)
            + framing.parameter_end.replace("{name}", key)
            for key, value in arguments.items()
        )
    return begin + written + framing.call_end + framing.end


STRINGS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, ["AB-1"], ["ab-1", "AB-1x", ""]),
    ({"type": "string", "pattern": "b+"}, ["b", "a\nbb c"], ["a", ""]),
    ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb"], ["xax"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü", "a\nb"], ["a", "abcd"]),
    ({"type": "string", "format": "date"}, ["2026-11-22"], ["22.11.2026", "2026-13-01"]),
    ({"type": "string", "enum": ["red", "a\nb"]}, ["red", "a\nb"], ["blue", "re"]),
    ({"$ref": "#/$defs/code"}, ["x1"], ["x", "1x"]),
    ({"allOf": [{"$ref": "#/$defs/code"}, {"maxLength": 2}]}, ["x1"], ["x11"]),
    ({"anyOf": [{"type": "string", "maxLength": 1}, {"const": "long"}]}, ["l", "long"], ["lo"]),
]
DEFINITIONS = {"$defs": {"code": {"type": "string", "pattern": "^x[0-9]+$"}}}


def one_parameter(schema: dict[str, Any]) -> ToolSpec:
    """Returns a tool with one required parameter."""
    return ToolSpec("f", {"properties": {"v": schema}, "required": ["v"], **DEFINITIONS})


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize(("schema", "good", "bad"), STRINGS, ids=lambda value: "")
def test_strings_without_quotes_satisfy_their_schema(
    name: str, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """Patterns, lengths, formats, references: what is allowed is read as it was meant, nothing else is."""
    tool = one_parameter(schema)
    constraint = constraint_of(name, (tool,))
    for text in good:
        written = call(name, "f", {"v": text})
        assert takes(constraint, written), text
        plan = OutputPlan(tool_parser=name, tools=(tool,), forced=True)
        assert parsed(read(plan, in_characters(written))) == Parsed(calls=(("f", {"v": text}),))
    for text in bad:
        assert not takes(constraint, call(name, "f", {"v": text})), text


@pytest.mark.parametrize("name", RAW)
def test_a_value_ends_where_the_parser_ends_it(name: str) -> None:
    """A text that contains the end of its parameter would be cut off there."""
    framing = tool_format(name).framing
    close = framing.quote or framing.parameter_end.replace("{name}", "v").strip()
    for schema in ({"type": "string"}, {"type": "string", "minLength": 1}):
        constraint = constraint_of(name, (one_parameter(schema),))
        assert not takes(constraint, call(name, "f", {"v": f"a{close}b"}))
        assert takes(constraint, call(name, "f", {"v": "a</p>b"}))


UNIONS: list[dict[str, Any]] = [
    {"anyOf": [{"type": "string", "minLength": 3}, {"type": "integer", "minimum": 10}]},
    {"type": ["string", "null"], "pattern": "^[n-z]*$"},
    {"enum": ["no", "12", 7, True, None]},
    {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string", "maxLength": 4}]},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^t"}]},
    {"minLength": 2},
    {"type": ["string", "integer"]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "string", "pattern": '^[a-c<\\\\/"]{0,6}$'},
]


def walk(matcher: LLMatcher, dice: random.Random, ends: list[str]) -> str:
    """Returns a random text that a grammar allows; `ends`: what is tried when it has become long enough."""
    alphabet = 'abnot127-<>/\\"\n {}[]:,.eruls'
    text = b""
    while not matcher.is_accepting() and len(text) < 2000:
        if dice.random() < 0.3 or len(text) > 200:
            for end in dice.sample(ends, len(ends)):
                data = list(end.encode())
                if matcher.validate_tokens(data) == len(data):
                    matcher.consume_tokens(data)
                    text += end.encode()
                    break
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> (byte % 8) & 1]
        likely = [byte for byte in allowed if byte in alphabet.encode()]
        if not allowed or matcher.is_accepting():
            break
        byte = dice.choice(likely or allowed)
        matcher.consume_token(byte)
        text += bytes([byte])
    return text.decode(errors="replace")


@pytest.mark.parametrize("name", [name for name in TOOLS if name != "gpt_oss"])
@pytest.mark.parametrize("number", range(len(UNIONS)))
def test_whatever_a_grammar_allows_is_valid_once_parsed(
    name: str, number: int, pytestconfig: pytest.Config
) -> None:
    """Random outputs of the grammar, read by the format's parser, satisfy the schema: the first three that
    come to an end, or in `make test-all` those of a dozen."""
    tool = one_parameter(UNIONS[number])
    matcher = LLMatcher(BYTES, grammar_of(constraint_of(name, (tool,))), log_level=0)
    framing = tool_format(name).framing
    end = framing.parameter_end.replace("{name}", "v")
    ends = [framing.quote + end + framing.call_end + framing.end, end + framing.call_end, '"', "}", "]"]
    validator = jsonschema.Draft202012Validator({"type": "object", **tool.parameters})
    plan = OutputPlan(tool_parser=name, tools=(tool,), forced=True)
    finished, enough = 0, 12 if pytestconfig.getoption("--full") else 3
    for seed in range(12):
        if finished == enough:
            break
        one = matcher.deep_copy()
        text = walk(one, random.Random(seed), [end for end in ends if end])
        if not one.is_accepting():
            continue
        finished += 1
        (found,) = parsed(read(plan, in_characters(text))).calls
        assert validator.is_valid(found[1]), (text, found)
    assert finished >= 3


@pytest.mark.parametrize("name", RAW)
def test_objects_with_combinations_are_followed_or_refused(name: str) -> None:
    """What is said of the object as a whole: alternatives and references are forms, the rest a 400."""
    either = ToolSpec(
        "f",
        {
            "$ref": "#/$defs/base",
            "anyOf": [{"required": ["b"], "properties": {"b": {"type": "integer"}}}, {"required": ["c"]}],
            "$defs": {"base": {"properties": {"a": {"type": "string"}}, "required": ["a"]}},
        },
    )
    constraint = constraint_of(name, (either,))
    if name not in ("deepseek_v32", "deepseek_v4"):  # whose attributes say that these are strings
        assert takes(constraint, call(name, "f", {"a": "x", "b": "3"}))
    assert takes(constraint, call(name, "f", {"a": "x", "c": "any"}))
    assert not takes(constraint, call(name, "f", {"a": "x"}))
    assert not takes(constraint, call(name, "f", {"c": "any"}))
    of_names = {"properties": {"a": {}}, "required": ["a"], "patternProperties": {"^b": {"type": "integer"}}}
    with pytest.raises(ApiError) as caught:
        constraint_of(name, (ToolSpec("f", of_names),))
    assert "patternProperties" in caught.value.message
    with pytest.raises(ApiError) as caught:
        constraint_of(name, (one_parameter({"type": "string", "pattern": "a(^b)"}),))
    assert "'f'" in caught.value.message
    assert "^" in caught.value.message


@pytest.mark.parametrize("name", list(TOOLS))
def test_texts_of_custom_tools_follow_their_grammar(name: str) -> None:
    """Texts are spelled as the format spells a string; the text that the client gets is one of the
    grammar's.
    """
    patch = '*** Begin Patch\n*** Add File: a "b".py\n+\tx = "\\n" </p>\n+\n*** End Patch'
    texts = {
        ("lark", PATCH): ([patch, patch + "\n"], ["*** Begin Patch\n*** End Patch", patch + "x"]),
        ("regex", r'SELECT [^;]+;|"x\ny"'): (["SELECT a\n;", '"x\ny"'], ["SELECT ;", "SELECT a;;"]),
        ("lark", EXPRESSION): (['1 + (2 -\n"a\\"b")', "(1)"], ["1 +", "(1"]),
    }
    for text, (good, bad) in texts.items():
        tool = ToolSpec("edit", text=text)
        constraint = constraint_of(name, (tool,))
        is_raw = tool_format(name).framing.values == "raw" and tool_format(name).framing.arguments != "json"
        plan = OutputPlan(tool_parser=name, tools=(ToolSpec("edit", INPUT_SCHEMA, text=text),), forced=True)
        for content in (*good, *bad):
            written = content if is_raw else json.dumps(content, ensure_ascii=False)
            output = call(name, "edit", {"input": written})
            assert takes(constraint, output) == (content in good), output
            if content in good:
                assert parsed(read(plan, in_characters(output))).calls == (("edit", {"input": content}),)


INPUT_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (("lark", "start: nobody"), "nobody"),
        (("lark", "begin: /a/"), "no rule 'start'"),
        (("lark", 'start: "a'), "line 1"),
        (("lark", "start: A\n%declare A"), "%declare is not supported"),
        (("lark", "start: A\n%import python.A"), "only Lark's 'common'"),
        (("lark", "start: /a(?=b)/"), "look-around"),
        (("regex", r"(a)\1"), r"\1 is not supported"),
        (("lark", "start: a\na: A a | A\nA: /[^;]+/"), "recursive"),
        (("ebnf", "start: x"), "'lark' or 'regex'"),
    ],
)
def test_grammars_that_can_not_be_enforced_are_refused(text: tuple[str, str], part: str) -> None:
    """A 400 that names the tool and what is wrong."""
    with pytest.raises(ApiError) as caught:
        constraint_of("hermes", (ToolSpec("edit", text=text),))
    assert caught.value.status == 400
    assert "'edit'" in caught.value.message
    assert part in caught.value.message


STRICT = ToolSpec("strict", {"properties": {"n": {"type": "integer"}}, "required": ["n"]})
FREE = ToolSpec("free", {"properties": {"n": {"not": {}}}}, strict=False)


@pytest.mark.parametrize("name", list(TOOLS))
def test_strict_tools_of_free_choice(name: str) -> None:
    """Where the model may also answer, calls of strict tools satisfy their schemas, others have any."""
    constraint = constraint_of(name, (STRICT, FREE), at_least_one=False)
    is_json = tool_format(name).framing.arguments == "json"
    answer = "<|channel|>final<|message|>It rains." if name == "gpt_oss" else "It rains."
    assert takes(constraint, answer)
    good = call(name, "strict", {"n": "3"})
    good = good.replace('string="true"', 'string="false"')
    assert takes(constraint, good)
    assert not takes(
        constraint, good.replace("3", "some", 1) if name != "step3p5" else call(name, "strict", {})
    )
    assert takes(
        constraint, call(name, "free", {"n": '"x"' if is_json or name in ("pythonic", "lfm2") else "x"})
    )
    if name == "gpt_oss":
        thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        assert takes(constraint, thought + good)
        assert takes(constraint, thought * 2 + answer)
        assert not takes(constraint, thought)
        assert not takes(constraint, f"<|channel|>analysis<|message|>{good}")
    plan = OutputPlan(tool_parser=name, tools=(STRICT, FREE))
    assert parsed(read(plan, in_characters(good))).calls == (("strict", {"n": 3}),)


@pytest.mark.parametrize("name", [name for name in TOOLS if name != "gpt_oss"])
def test_text_of_free_choice_is_no_call(name: str) -> None:
    """What the parser would read as a call of a strict tool cannot be written as text."""
    constraint = constraint_of(name, (STRICT,), at_least_one=False)
    matcher = LLMatcher(BYTES, grammar_of(constraint), log_level=0)
    form = tool_format(name)
    plan = OutputPlan(tool_parser=name, tools=(STRICT,))
    starts = [*form.openers, *form.sections, "", " "]
    for start in starts:
        one = matcher.deep_copy()
        wrong = start + form.framing.call_begin.replace("{name}", "strict").split(">")[-1] + '{"n": "x"}'
        data = list(wrong.encode())
        if one.try_consume_tokens(data) == len(data):
            for _, arguments in parsed(read(plan, in_characters(wrong))).calls:
                assert isinstance(arguments.get("n"), int), wrong


def test_a_json_answer_next_to_calls_of_gpt_oss() -> None:
    """The final message is of the answer's schema, thoughts and calls come before it."""
    constraint = constraint_of("gpt_oss", (STRICT,), at_least_one=False, answer_schema=INPUT_SCHEMA)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert takes(constraint, f'{thought}<|channel|>final<|message|>{{"input": "x"}}')
    assert not takes(constraint, f"{thought}<|channel|>final<|message|>It rains.")
    assert takes(constraint, thought + call("gpt_oss", "strict", {"n": "1"}))


def with_special(texts: tuple[str, ...]) -> Tokenizer:
    """Returns a tokenizer that keeps some texts whole, as tokens that no text spells."""
    tokenizer = byte_level_tokenizer(300)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    return tokenizer


SPECIAL = {
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "hy_v4:6124c78e": (
        "<tool_calls:6124c78e>",
        "</tool_calls:6124c78e>",
        "<tool_call:6124c78e>",
        "</tool_call:6124c78e>",
        "<arg_key:6124c78e>",
        "</arg_key:6124c78e>",
        "<arg_value:6124c78e>",
        "</arg_value:6124c78e>",
    ),
    "solar_open": (
        "<|tool_calls|>",
        "<|tool_call:begin|>",
        "<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
    ),
    "deepseek_v32": ("｜DSML｜",),
    "deepseek_v4": ("｜DSML｜",),
    "gpt_oss": ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>", "<|call|>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "llama3_json": ("<|python_tag|>",),
    "glm45": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>", "</tool_call>"),
}


@pytest.mark.parametrize("name", list(SPECIAL))
@pytest.mark.parametrize("at_least_one", [True, False], ids=["forced", "free"])
def test_markers_that_no_text_spells(name: str, at_least_one: bool) -> None:
    """Where a format's markers are special tokens, calls have those, and all other text stays possible."""
    tokenizer = with_special(SPECIAL[name])
    ids = {text: tokenizer.token_to_id(text) for text in SPECIAL[name]}
    call_id = ids.get("<|call|>")
    machine = LLTokenizer(tokenizer.to_str(), eos_token=[2, *([call_id] if call_id is not None else [])])
    tool = one_parameter({"type": "string", "minLength": 1})
    patch = ToolSpec("edit", INPUT_SCHEMA, text=("lark", PATCH))
    constraint = constraint_of(
        name, (tool, patch), at_least_one=at_least_one, added_tokens=ids, special_ids=frozenset(ids.values())
    )
    matcher = LLMatcher(machine, grammar_of(constraint), log_level=0)

    def accepts(text: str) -> bool:
        one, tokens = matcher.deep_copy(), tokenizer.encode(text, add_special_tokens=False).ids
        return one.try_consume_tokens(tokens) == len(tokens) and (one.is_accepting() or one.is_stopped())

    is_raw = tool_format(name).framing.arguments != "json"
    written = "*** Begin Patch\n*** Add File: a\n+<b>\n*** End Patch"
    given = written if is_raw else json.dumps(written)
    assert accepts(call(name, "f", {"v": "a b" if is_raw else '"a b"'}))
    assert accepts(call(name, "edit", {"input": given}))
    assert not accepts(call(name, "edit", {"input": given.replace("Add", "Ask")}))
    assert not accepts(call(name, "f", {"v": "" if is_raw else '""'}))
    answer = "<|channel|>final<|message|>a < b </ c" if name == "gpt_oss" else "a < b </ c"
    assert accepts(answer) is not at_least_one
    if not at_least_one and name not in ("gpt_oss", "llama3_json"):
        assert accepts(f"{answer}{call(name, 'edit', {'input': given})}")
