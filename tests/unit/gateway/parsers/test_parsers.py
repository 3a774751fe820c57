"""Guards how outputs are read: thoughts, content and calls, the same however the output is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from cProfile import Profile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from gateway.constraints.tool_calls import tool_call_constraint
from gateway.parsers.detection import chosen_parsers
from gateway.parsers.events import OutputPlan, ToolCallArguments, ToolSpec
from gateway.parsers.framing import ToolFraming
from gateway.parsers.registry import REASONING, TOOLS, make_parser, think_format, tool_format
from gateway.parsers.scanner import Mark
from gateway.text.conversation import ChatTemplate
from moebius.config.parser_names import REASONING_PARSERS, TOOL_CALL_PARSERS, parser_name
from moebius.grammar.compile import grammar_of
from tests.helpers.parser_streams import (
    MEANING,
    NAMES,
    RECORDED,
    SCHEMA,
    THINKING,
    Parsed,
    check_spoilt,
    in_bytes,
    in_characters,
    in_tokens,
    parsed,
    plan_for,
    read,
    tokens_of,
    whole,
)

TEXT_FORMATS = (
    "llama3_json",
    "pythonic",
    "deepseek_v32",
    "deepseek_v4",
    "minimax_m3",
)  # whose calls need no token


def recorded_plan(name: str) -> OutputPlan:
    """Returns the plan that reads the recorded output of a format."""
    return plan_for(name, "gpt_oss" if name == "gpt_oss" else None)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_output_means_the_same_however_it_is_cut(name: str) -> None:
    """Whole, per character, per byte and per token; and in two at every place."""
    plan, text = recorded_plan(name), RECORDED[name]
    assert parsed(read(plan, whole(text))) == MEANING[name]
    assert parsed(read(plan, in_characters(text))) == MEANING[name]
    assert parsed(read(plan, in_bytes(text))) == MEANING[name]
    tokens = tokens_of(plan)
    assert parsed(read(plan, in_tokens(text, tokens), tokens)) == MEANING[name]
    for place in range(len(text)):
        assert parsed(read(plan, [(text[:place], False), (text[place:], False)])) == MEANING[name], place


@pytest.mark.parametrize("name", [name for name in RECORDED if name != "gpt_oss"])
@pytest.mark.parametrize("is_open", [False, True])
def test_thoughts_come_before_any_format(name: str, is_open: bool) -> None:
    """Thoughts are found whether the prompt opened them or the model does; the frame's white space belongs to
    nothing.
    """
    for reasoning in THINKING:
        think = think_format(reasoning)
        assert think is not None
        plan = plan_for(name, reasoning, starts_in_reasoning=is_open)
        text = f"{'' if is_open else think.begin}\n1 < 2\nso\n{think.end}\n\n{RECORDED[name]}"
        expected = Parsed(MEANING[name].content, "1 < 2\nso", MEANING[name].calls)
        assert parsed(read(plan, in_characters(text))) == expected
        tokens = tokens_of(plan)
        assert parsed(read(plan, in_tokens(text, tokens), tokens)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_arguments_stream(name: str) -> None:
    """A long argument comes in pieces while it is made, rather than once it is whole."""
    text = RECORDED[name].replace("Zürich", "Zürich" + " and on" * 50)
    events = read(recorded_plan(name), in_characters(text))
    pieces = [event for event in events if isinstance(event, ToolCallArguments)]
    # A Python argument is a literal that has to be whole.
    assert len(pieces) > (5 if name in ("pythonic", "lfm2") else 300)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TEXT_FORMATS])
def test_markers_in_letters_are_text_where_there_are_tokens(name: str) -> None:
    """A model that explains its format makes no call; in forced outputs letters count, too."""
    plan, tokens = recorded_plan(name), tokens_of(recorded_plan(name))
    text = RECORDED[name]
    if name != "qwen3_coder" and name != "step3p5":
        assert parsed(read(plan, in_characters(text), tokens)) == Parsed(text)
    forced = plan_for(name, plan.reasoning_parser, forced=True)
    assert parsed(read(forced, in_characters(text), tokens)) == MEANING[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_calls_is_bounded(name: str) -> None:
    """After `max_calls` the parser is full, and what follows is dropped."""
    plan = plan_for(name, recorded_plan(name).reasoning_parser, max_calls=1)
    parser = make_parser(plan, ())
    assert parser is not None
    parser.feed(RECORDED[name])
    assert parser.sink.is_full
    parser.feed("fox" + RECORDED[name])
    parser.finish()
    result = parsed(parser.sink.take())
    assert result.calls == MEANING[name].calls[:1]
    assert "fox" not in result.content


@pytest.mark.parametrize("name", NAMES)
def test_text_without_markers_is_content_at_once(name: str) -> None:
    """Nothing is held back for longer than it may begin a marker, and no white space is lost."""
    parser = make_parser(recorded_plan(name), ())
    assert parser is not None
    shown = ""
    text = " The fox, 1 < 2, runs:\n\n- a [link](x)\n"
    for character in text:
        parser.feed(character)
        shown += parsed(parser.sink.take()).content
        assert len(shown) > 0 or not character.isalpha()
    parser.finish()
    assert shown + parsed(parser.sink.take()).content == text


MALFORMED = {
    "hermes": [
        "<tool_call>none</tool_call>",
        '<tool_call>\n{"a": 1}\n</tool_call>',
        '<tool_call>{"name": 1}',
    ],
    "qwen3_coder": ["<tool_call>fox</tool_call>", "<function=other>", "<tool_call>\n<function=a\nb>"],
    "glm45": ["<tool_call>the fox runs</tool_call>", "<tool_call>"],
    "kimi_k2": ["<|tool_call_begin|>functions.f:0<|tool_call_end|>", "<|tool_calls_section_begin|>fox"],
    "minimax_m1": ["<tool_calls>fox", "<tool_calls>\n[1]", '<tool_calls>\n{"a": 1}\n</tool_calls>'],
    "minimax_m2": ["<minimax:tool_call>fox", "<invoke>"],
    "minimax_m3": ["]<]minimax[>[<tool_call>fox", "]<]minimax[>[<invoke>", "]<]minimax[>[<city>"],
    "deepseek_v3": [
        "<｜tool▁call▁begin｜>fox<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>\n{}",
    ],
    "deepseek_v31": [
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>fox",
        "<｜tool▁call▁begin｜>fox<｜tool▁call▁end｜>",
    ],
    "deepseek_v32": ["<｜DSML｜function_calls>fox", "<｜DSML｜invoke>"],
    "deepseek_v4": ["<｜DSML｜tool_calls>fox", "<｜DSML｜invoke>"],
    "gemma4": ["<|tool_call>fox<tool_call|>", "<|tool_call>call:<tool_call|>", "<|tool_call>call:fox"],
    "hunyuan_a13b": ["<tool_calls>fox", "<tool_calls>[1]"],
    "jamba": ["<tool_calls>fox", "<tool_calls>[1]"],
    "longcat": ["<longcat_tool_call>fox", '<longcat_tool_call>{"name": 1}'],
    "longcat_keys": ["<longcat_tool_call>the fox runs</longcat_tool_call>", "<longcat_tool_call>"],
    "hy_v3": ["<tool_call>the fox runs</tool_call>", "<tool_calls>fox"],
    "hy_v4": ["<tool_calls>fox", "<tool_call>"],
    "hy_v3:opensource": ["<tool_calls:opensource>fox", "<tool_call:opensource>", "<tool_call>"],
    "hy_v4:6124c78e": ["<tool_calls:6124c78e>fox", "<tool_call:6124c78e>", "<tool_call:opensource>"],
    "granite": ["<|tool_call|>the fox", "<tool_call>fox"],
    "lfm2": ["<|tool_call_start|>fox", "[get_weather()]"],
    "solar_open": ["<|tool_calls|>fox", "<|tool_call:begin|>a<|tool_call:end|>"],
    "mistral": ["[TOOL_CALLS]fox", "[TOOL_CALLS][1, 2]", '[TOOL_CALLS]{"a": 1}'],
    "llama3_json": ['{"a": 1}', '{"name": "fox"', "{}"],
    "pythonic": ["[1, 2]", "[link](https://fox)", "[other(a=1)]"],
    "gpt_oss": ["fox<|constrain|>"],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_call_is_content(name: str) -> None:
    """Malformed calls are shown as they were written, whatever their cut."""
    for text in MALFORMED[name]:
        result = parsed(read(recorded_plan(name), in_characters(f"{text}")))
        if name == "llama3_json" and text == '{"name": "fox"':
            assert result.calls == (("fox", ""),)  # cut off after the name: the call is known
            continue
        if name == "gpt_oss":
            assert result == Parsed("fox")  # markers of the format never show
            continue
        assert result == Parsed(text), text


VALUES: list[tuple[dict[str, Any], str, Any]] = [
    ({"type": "string"}, "12", "12"),
    ({"type": "string"}, "null", "null"),
    ({"type": "integer"}, " 12 ", 12),
    ({"type": "integer"}, "12.0", 12),
    ({"type": "integer"}, "twelve", "twelve"),
    ({"type": "number"}, "1", 1),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "0", False),
    ({"type": "object"}, "{'a': None}", {"a": None}),
    ({"type": "array"}, '["a"]', ["a"]),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "nullable", "nullable"),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": ["string", "null"]}, "", ""),
    ({"type": ["string", "integer"]}, "5", 5),
    ({"type": ["string", "integer"]}, "5a", "5a"),
    ({"enum": ["a", "b"]}, "1", "1"),
    ({"const": 3}, "3", 3),
    ({"allOf": [{"description": "x"}, {"type": "integer"}]}, "3", 3),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "3x", "3x"),
    ({}, "12", 12),
    ({}, "None", "None"),
    ({}, '"quoted"', '"quoted"'),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_plain_text_becomes_the_schemas_type(schema: dict[str, Any], text: str, value: Any) -> None:
    """And a string where it cannot be read as one of the types."""
    tools = (ToolSpec("f", {"type": "object", "properties": {"v": schema}}),)
    plan = OutputPlan(tool_parser="minimax_m2", tools=tools)
    written = f'<invoke name="f"><parameter name="v">{text}</parameter></invoke>'
    assert parsed(read(plan, in_characters(written))).calls == (("f", {"v": value}),)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**64 - 1))
def test_any_output_is_read_alike_however_it_is_cut(name: str, seed: int) -> None:
    """Recorded outputs with faults, and texts of their pieces; tests/tools/fuzz_parsers.py does more."""
    check_spoilt(name, random.Random(seed))


def framed(framing: ToolFraming, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a framing describes them."""
    texts = []
    for number, (name, arguments) in enumerate(calls):
        written = json.dumps(arguments, ensure_ascii=False)
        if framing.arguments == "parameters":
            parts = []
            for key, value in arguments.items():
                is_raw = framing.values == "raw" and isinstance(value, str)
                quote = framing.quote if is_raw else ""
                begin = framing.parameter_begin.replace("{name}", key)
                text = value if is_raw else json.dumps(value, ensure_ascii=False)
                text = repr(value) if framing.values == "python" and isinstance(value, bool) else text
                end = framing.parameter_end.replace("{name}", key)
                parts.append(begin.replace("{string}", str(is_raw).lower()) + quote + text + quote + end)
            written = framing.parameter_separator.join(parts)
        begin = framing.call_begin.replace("{name}", name).replace("{index}", str(number))
        texts.append(begin + written + framing.call_end)
    return framing.begin + framing.separator.join(texts) + framing.end


@pytest.mark.parametrize("name", [*NAMES, "json"])
def test_what_the_grammar_makes_is_what_the_parser_reads(name: str) -> None:
    """A format's framing, its grammar and its parser describe the same calls."""
    schema = {
        "type": "object",
        "properties": {key: SCHEMA["properties"][key] for key in ("city", "days", "exact", "points")},
        "required": ["city"],
    }
    tools = (ToolSpec("get_weather", schema), ToolSpec("get_time"))
    calls = [
        ("get_weather", {"city": 'Zürich "x"\n<b>', "days": 3, "exact": True, "points": [1.5, 2]}),
        ("get_time", {}),
        ("get_weather", {"city": ""}),
    ]
    framing = tool_format(name).framing
    constraint = tool_call_constraint(framing, tools, at_least_one=True, parallel=True, added_tokens={})
    for some in (calls[:1],) if name == "gpt_oss" else (calls, calls[1:2]):
        text = framed(framing, some)
        matcher = LLMatcher(LLTokenizer("byte"), grammar_of(constraint), log_level=0)
        data = list(text.encode())
        assert matcher.try_consume_tokens(data) == len(data), text
        assert matcher.is_accepting()
        plan = OutputPlan(tool_parser=name, tools=tools, forced=True)
        assert parsed(read(plan, in_characters(text))) == Parsed(calls=tuple(some)), text


def work(plan: OutputPlan, text: str, tokens: list[str], size: int) -> int:
    """Returns functions called, and characters looked at, to read `text` in pieces of `size` tokens."""
    parser = make_parser(plan, tokens)
    assert parser is not None
    pieces = in_tokens(text, tokens)
    fed: list[tuple[str, list[Mark]]] = []
    length = 0
    for start in range(0, len(pieces), size):
        marks = []
        for piece, is_token in pieces[start : start + size]:
            if is_token:
                marks.append(Mark(length, piece))
            length += len(piece)
        fed.append(("".join(piece for piece, _ in pieces[start : start + size]), marks))
    with Profile() as profile:
        for piece, marks in fed:
            parser.feed(piece, marks)
            parser.sink.take()
        parser.finish()
    return sum(entry.callcount for entry in profile.getstats()) + parser.scan.work


@pytest.mark.parametrize("name", NAMES)
def test_work_doubles_when_the_output_does(name: str) -> None:
    """Parsing takes linear time for calls, for one long argument, for white space and for markers that begin
    nothing.
    """
    plan = recorded_plan(name)
    tokens = tokens_of(plan)
    form = tool_format(name)
    opener = (*form.openers, *form.sections, "<|channel|>")[0]
    for unit in (RECORDED[name] + "\n", "\n \n", opener + "<" + opener[:-1]):
        for size in (1, 1 << 30):
            once, twice = work(plan, unit * 6, tokens, size), work(plan, unit * 12, tokens, size)
            assert twice < 2.3 * once, (unit[:40], size, once, twice)
    long = RECORDED[name].replace("Zürich", "a <\n" * 100), RECORDED[name].replace("Zürich", "a <\n" * 200)
    assert work(plan, long[1], tokens, 1) < 2.3 * work(plan, long[0], tokens, 1)


def test_every_name_has_a_parser_and_users_spellings_find_it() -> None:
    """What the settings take is what there is; other servers' names are understood, unknown ones refused."""
    assert set(TOOL_CALL_PARSERS) == set(TOOLS)
    assert set(REASONING_PARSERS) == {*REASONING, "gpt_oss"}
    spellings = {
        "qwen25": "hermes",
        "qwen3_xml": "qwen3_coder",
        "deepseekv3": "deepseek_v3",
        "openai": "gpt_oss",
    }
    for written, name in {**spellings, "kimi": "kimi_k2", "Minimax-M2": "minimax_m2"}.items():
        assert parser_name(written, TOOL_CALL_PARSERS) == name
    with pytest.raises(ValueError, match=r"allowed are auto, none, deepseek_v3.*qwen3_coder"):
        parser_name("qwen9", TOOL_CALL_PARSERS)


@pytest.mark.parametrize(
    ("model_type", "template", "tools", "reasoning"),
    [
        ("qwen3_moe", "<think> </think> <tool_call>", "hermes", "qwen3"),
        ("qwen3_moe", "<tool_call> <function=x> <parameter=y>", "qwen3_coder", None),
        ("step3p5", "<think> <tool_call> <function=x> <parameter=y>", "step3p5", "step3p5"),
        ("glm4_moe", "<think> <tool_call> <arg_key>a</arg_key>\n<arg_value>", "glm45", "glm45"),
        ("glm4_moe_lite", "<think> <tool_call> <arg_key>a</arg_key><arg_value>", "glm47", "glm45"),
        ("minimax_m1", "tools in <tool_calls></tool_calls>", "minimax_m1", "qwen3"),
        ("minimax_m2", "<think> <minimax:tool_call> <invoke>", "minimax_m2", "minimax_m2"),
        ("minimax_m3_vl", "]<]minimax[>[ <tool_call> <mm:think>", "minimax_m3", "minimax_m3"),
        ("kimi_k2", "<|tool_calls_section_begin|> <think>", "kimi_k2", "kimi_k2"),
        ("deepseek_v3", "<｜tool▁sep｜> ```json </think>", "deepseek_v3", "deepseek_v31"),
        ("deepseek_v3", "<｜tool▁sep｜> </think>", "deepseek_v31", "deepseek_v31"),
        ("deepseek_v32", "<｜DSML｜invoke> </think>", "deepseek_v32", "deepseek_v31"),
        ("deepseek_v4", "<｜DSML｜tool_calls> </think>", "deepseek_v4", "deepseek_v31"),
        ("deepseek_v4", "<｜DSML｜ calls> <｜DSML｜ invoke </think>", None, "qwen3"),  # V4.1's
        ("gpt_oss", "<|channel|> analysis", "gpt_oss", "gpt_oss"),
        ("mixtral", "[TOOL_CALLS]", "mistral", None),
        ("gemma4", "'<|tool_call>call:' <|channel>thought", "gemma4", "gemma4"),
        ("hunyuan_v1_moe", "<think> <answer> <tool_call> <tool_calls>", "hunyuan_a13b", "hunyuan_a13b"),
        ("hy_v3", "<think> <tool_calls> <tool_call>a<tool_sep> <arg_key>", "hy_v3", "qwen3"),
        ("hy_v3", "<think:opensource> <tool_sep:opensource>", "hy_v3:opensource", "hy_v4:opensource"),
        ("hy_v4", "<think:6124c78e> <arg_key:6124c78e>", "hy_v4:6124c78e", "hy_v4:6124c78e"),
        ("hy_v4", "<think> <arg_key>a</arg_key><arg_value>", "hy_v4", "qwen3"),
        ("granitemoe", "with <|tool_call|> followed by a JSON list", "granite", None),
        ("lfm2_moe", "{{ tools }}", "lfm2", None),
        ("jamba", "<tool_calls>[", "jamba", None),
        ("longcat_flash", "<longcat_tool_call>", "longcat", None),
        ("longcat_flash", "<longcat_think> <longcat_arg_key>", "longcat_keys", "longcat"),
        ("solar_open", "<|think|> <|content|> <|tool_call:begin|>", "solar_open", "solar_open"),
        ("ernie4_5_moe", "<think> <response> <tool_call>", "hermes", "ernie45"),
        ("kimi_linear", "<|tool_calls_section_begin|>", "kimi_k2", None),
        ("mimo_v2_flash", "<think> <tool_call> <function=a> <parameter=b>", "qwen3_coder", "qwen3"),
        ("exaone_moe", "<think> <tool_call>", "hermes", "qwen3"),
        ("nemotron_h", "<think> <tool_call> <function=a> <parameter=b>", "qwen3_coder", "qwen3"),
        ("laguna", "<think> <tool_call>a\n<arg_key>b</arg_key>\n<arg_value>", "glm45", "glm45"),
        ("granitemoehybrid", "<tool_call>", "hermes", None),
        ("bailing_hybrid", "<think> <tool_call>", "hermes", "qwen3"),
        ("bailing_hybrid", "<think> <tool_call> <arg_key>a</arg_key>\n<arg_value>", "glm45", "glm45"),
        ("llama4", "[func_name1(params", "pythonic", None),
        ("step3p7", "<think> <tool_call> <function=x> <parameter=y>", "step3p5", "step3p5"),
        ("qwen2_moe", "<|im_start|>", None, None),
    ],
)
def test_a_model_gets_the_parsers_that_its_template_calls_for(
    model_type: str, template: str, tools: str | None, reasoning: str | None
) -> None:
    """Parsers follow what the template teaches; settings override it, and `none` switches a parser off."""
    assert chosen_parsers("auto", "auto", model_type, template) == (tools, reasoning)
    assert chosen_parsers("pythonic", "none", model_type, template) == ("pythonic", None)
    assert chosen_parsers("none", "qwen3", model_type, template) == (None, "qwen3")


# As Hy3's template and DeepSeek-V4's begin, which never spell their tags.
_ASSEMBLED = {
    "hy_v3": (
        "{%- set HYTK = ':opensource' %}{%- set think = '<think{}>'.format(HYTK) %}"
        "{%- set sep = '<tool_sep{}>'.format(HYTK) %}{{ think + sep }}",
        ("hy_v3:opensource", "hy_v4:opensource"),
    ),
    "deepseek_v4": (
        "{%- set dsml = '｜DSML｜' -%}{%- set close = '</think>' -%}"
        "{{ '\\n\\n<' + dsml + 'tool_calls>\\n' ~ close }}",
        ("deepseek_v4", "deepseek_v31"),
    ),
}


@pytest.mark.parametrize("model_type", list(_ASSEMBLED))
def test_tags_that_a_template_puts_together_are_seen(model_type: str) -> None:
    """A template that never spells a tag in one piece, as published ones do, still names the parsers."""
    source, expected = _ASSEMBLED[model_type]
    spelled = ChatTemplate(source, {}).spelled_source
    assert chosen_parsers("auto", "auto", model_type, source) != expected
    assert chosen_parsers("auto", "auto", model_type, spelled) == expected


def test_a_template_that_doubles_a_text_takes_no_memory() -> None:
    """What a template puts together is looked at up to a length of tags."""
    lines = ["{% set a = 'x' * 1000000000 %}{% set b = 'yy' %}", *["{% set b = b + b %}"] * 60]
    assert len(ChatTemplate("".join(lines), {}).spelled_source) < 10_000


def test_a_suffix_may_be_known_to_the_tokenizer_alone() -> None:
    """The suffix is found where the template takes its tags from the tokenizer, and for parsers that a
    setting names.
    """
    tokens = ["<|endoftext|>", "</think:6124c78e>", "<think:6124c78e>", "<arg_key:6124c78e>"]
    chosen = chosen_parsers("hy_v4", "hy_v4", "hy_v4", "{{ think_begin_token }}", tokens)
    assert chosen == ("hy_v4:6124c78e", "hy_v4:6124c78e")
    assert chosen_parsers("hy_v4", "hermes", "hy_v4", "", ["<s>"]) == ("hy_v4", "hermes")
