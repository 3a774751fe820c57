"""Recorded outputs of each format, what they mean, and ways to cut, spoil and read them."""

from __future__ import annotations

import codecs
import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.parsers.events import (
    ContentDelta,
    OutputEvent,
    OutputPlan,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    ToolSpec,
)
from gateway.parsers.registry import REASONING, TOOLS, kept_tokens, make_parser
from gateway.parsers.scanner import Mark
from gateway.parsers.xml_calls import with_tag_suffix

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "points": {"type": "array", "items": {"type": "number"}},
        "options": {"$ref": "#/$defs/options"},
    },
    "$defs": {"options": {"type": "object"}},
}
TOOLS_SENT = (ToolSpec("get_weather", SCHEMA), ToolSpec("get_time"))
ARGUMENTS = {
    "city": 'Zürich "北京"\n<b>&amp; {x}',
    "days": 3,
    "exact": True,
    "unit": None,
    "points": [1.5, 2],
    "options": {"a": {"b": "}"}},
}
_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)


@dataclass(frozen=True)
class Parsed:
    """What an output means."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()  # name, arguments: read as JSON, or the text if it is none
    ids: tuple[str, ...] = field(default=(), compare=False)


def parsed(events: Iterable[OutputEvent]) -> Parsed:
    """Adds events up; checks what every client relies on: order, indices, no empty text."""
    content, reasoning = "", ""
    names: list[str] = []
    ids: list[str] = []
    arguments: list[str] = []
    for event in events:
        match event:
            case ContentDelta(text):
                assert text
                content += text
            case ReasoningDelta(text):
                assert text
                reasoning += text
            case ToolCallStart(index, call_id, name):
                assert index == len(names)
                assert call_id
                assert name
                names.append(name)
                ids.append(call_id)
                arguments.append("")
            case ToolCallArguments(index, text):
                assert index == len(names) - 1
                assert text
                arguments[index] += text
    values = []
    for text in arguments:
        try:
            values.append(json.loads(text))
        except ValueError:
            values.append(text)
    return Parsed(content, reasoning, tuple(zip(names, values, strict=True)), tuple(ids))


def plan_for(tools: str | None, reasoning: str | None = None, **more: Any) -> OutputPlan:
    """Returns a plan with the tools of the recorded outputs."""
    return OutputPlan(reasoning_parser=reasoning, tool_parser=tools, tools=TOOLS_SENT, **more)


def read(
    plan: OutputPlan, pieces: Iterable[tuple[str, bool]], tokens: Sequence[str] = ()
) -> list[OutputEvent]:
    """Returns all events of an output in pieces (text, whether it is one token of `tokens`)."""
    parser = make_parser(plan, tokens)
    assert parser is not None
    events: list[OutputEvent] = []
    length = 0
    for text, is_token in pieces:
        parser.feed(text, (Mark(length, text),) if is_token else ())
        length += len(text)
        events += parser.sink.take()
    parser.finish()
    return events + parser.sink.take()


def whole(text: str) -> list[tuple[str, bool]]:
    """Returns one piece."""
    return [(text, False)]


def in_characters(text: str) -> list[tuple[str, bool]]:
    """Returns a piece per character."""
    return [(character, False) for character in text]


def in_bytes(text: str) -> list[tuple[str, bool]]:
    """Returns a piece per byte, decoded as they come: some are empty."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    return [(decoder.decode(bytes((byte,))), False) for byte in text.encode()]


def in_tokens(text: str, tokens: Iterable[str]) -> list[tuple[str, bool]]:
    """Returns a piece per token: those of the format, and words."""
    listed = sorted(tokens, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, listed), r"\s?\w+|\s+|."])
    return [(piece, piece in listed) for piece in re.findall(pattern, text, re.DOTALL)]


def tokens_of(plan: OutputPlan) -> list[str]:
    """What a tokenizer made for the plan's formats has tokens for."""
    return sorted(kept_tokens(plan))


_TAGS = {
    "city": ARGUMENTS["city"],
    "days": "3",
    "exact": "True",
    "unit": "null",
    "points": "[1.5, 2]",
    "options": '{"a": {"b": "}"}}',
}


def _tagged(template: str, between: str = "\n") -> str:
    return between.join(
        template.replace("KEY", key).replace("VALUE", str(text)) for key, text in _TAGS.items()
    )


def _dsml() -> str:
    tags = '<｜DSML｜parameter name="KEY" string="{}">VALUE</｜DSML｜parameter>'
    return "\n".join(
        tags.format("true" if key == "city" else "false").replace("KEY", key).replace("VALUE", str(text))
        for key, text in {**_TAGS, "exact": "true"}.items()
    )


def _minimax_m3() -> str:
    """Objects and arrays as elements, as its chat template writes them."""
    tags = _TAGS | {
        "points": "NS<item>1.5NS</item>NS<item>2NS</item>",
        "options": "NS<a>NS<b>}NS</b>NS</a>",
    }
    values = "".join(f"NS<{key}>{text}NS</{key}>" for key, text in tags.items())
    calls = f'NS<invoke name="get_weather">{values}NS</invoke>\nNS<invoke name="get_time">NS</invoke>\n'
    return f"NS<tool_call>\n{calls}NS</tool_call>".replace("NS", "]<]minimax[>[")


def _gemma(value: object) -> str:
    """Returns the text as Gemma 4's chat template writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return json.dumps(value)


_HARMONY_CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
)
_KEYWORDS = ", ".join(f"{key}={value!r}" for key, value in ARGUMENTS.items())
# For each format: content, a call with arguments of all types, and one without, as models write them.
RECORDED: dict[str, str] = {
    "hermes": "Let me see.\n<tool_call>\n" + f'{{"name": "get_weather", "arguments": {_JSON}}}'
    "\n</tool_call>\n<tool_call>\n"
    '{"name": "get_time", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "Let me see.\n<tool_call>\n<function=get_weather>\n"
    + _tagged("<parameter=KEY>\nVALUE\n</parameter>")
    + "\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    "glm45": "Let me see.\n<tool_call>get_weather\n"
    + _tagged("<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>")
    + "\n</tool_call>\n<tool_call>get_time\n</tool_call>",
    "glm47": "Let me see.<tool_call>get_weather"
    + _tagged("<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>", "")
    + "</tool_call><tool_call>get_time</tool_call>",
    "kimi_k2": "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{_JSON}<|tool_call_end|><|tool_call_begin|>functions.get_time:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": 'Let me see.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
    + _tagged('<parameter name="KEY">VALUE</parameter>')
    + '\n</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": "Let me see.\n" + _minimax_m3(),
    "deepseek_v3": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    f"```json\n{_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n"
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    f"{_JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v32": 'Let me see.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    + _dsml()
    + '\n</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v4": 'Let me see.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
    + _dsml()
    + '\n</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "step3p5": "Let me see.\n<tool_call>\n<function=get_weather>\n"
    + _tagged("<parameter=KEY>\nVALUE\n</parameter>")
    + "\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    "mistral": f"Let me see.[TOOL_CALLS]get_weather[ARGS]{_JSON}[TOOL_CALLS]get_time[ARGS]{{}}",
    "llama3_json": f'{{"name": "get_weather", "parameters": {_JSON}}}; '
    '{"name": "get_time", "parameters": {}}',
    "pythonic": f"[get_weather({_KEYWORDS}), get_time()]",
    "gpt_oss": "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>Let me see.<|end|>" + _HARMONY_CALL.format("get_weather", _JSON),
    "gemma4": "Let me see.<|tool_call>call:get_weather{"
    + ",".join(f"{key}:{_gemma(value)}" for key, value in ARGUMENTS.items())
    + "}<tool_call|><|tool_call>call:get_time{}<tool_call|>",
    "hunyuan_a13b": f'Let me see.\n<tool_calls>[{{"name": "get_weather", "arguments": {_JSON}}}, '
    '{"name": "get_time", "arguments": {}}]</tool_calls>',
    "jamba": f'Let me see.\n<tool_calls>[\n{{"name": "get_weather", "arguments": {_JSON}}},\n'
    '{"name": "get_time", "arguments": {}}\n]</tool_calls>',
    "minimax_m1": f'Let me see.\n<tool_calls>\n{{"name": "get_weather", "arguments": {_JSON}}}\n'
    '{"name": "get_time", "arguments": {}}\n</tool_calls>',
    "longcat": "Let me see.\n<longcat_tool_call>\n" + f'{{"name": "get_weather", "arguments": {_JSON}}}'
    "\n</longcat_tool_call>\n<longcat_tool_call>\n"
    '{"name": "get_time", "arguments": {}}\n</longcat_tool_call>',
    "longcat_keys": "Let me see.\n<longcat_tool_call>get_weather\n"
    + _tagged("<longcat_arg_key>KEY</longcat_arg_key>\n<longcat_arg_value>VALUE</longcat_arg_value>")
    + "\n</longcat_tool_call>\n<longcat_tool_call>get_time\n</longcat_tool_call>",
    "hy_v3": "Let me see.\n<tool_calls>\n<tool_call>get_weather<tool_sep>\n"
    + _tagged("<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>")
    + "\n</tool_call>\n<tool_call>get_time<tool_sep>\n</tool_call>\n</tool_calls>",
    "hy_v4": "Let me see.<tool_calls><tool_call>get_weather"
    + _tagged("<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>", "")
    + "</tool_call><tool_call>get_time</tool_call></tool_calls>",
    "solar_open": "Let me see.<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather"
    f"<|tool_call:args|>{_JSON}<|tool_call:end|><|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>get_time"
    "<|tool_call:args|>{}<|tool_call:end|>",
    "granite": f'Let me see.<|tool_call|>[{{"name": "get_weather", "arguments": {_JSON}}}, '
    '{"name": "get_time", "arguments": {}}]',
    "lfm2": f"Let me see.<|tool_call_start|>[get_weather({_KEYWORDS}), get_time()]<|tool_call_end|>",
    "json": f'[{{"name": "get_weather", "parameters": {_JSON}}}, {{"name": "get_time", "parameters": {{}}}}]',
}
# As Hy3's and Hy4's checkpoints have them.
RECORDED |= {
    f"{name}:{suffix}": with_tag_suffix(RECORDED[name], suffix).replace(f"<b:{suffix}>", "<b>")
    for name, suffix in (("hy_v3", "opensource"), ("hy_v4", "6124c78e"))
}
_BARE = ("llama3_json", "pythonic", "json")  # outputs are calls alone
_BOTH = (("get_weather", ARGUMENTS), ("get_time", {}))
MEANING: dict[str, Parsed] = {
    name: Parsed("" if name in _BARE else "Let me see.", "", _BOTH) for name in RECORDED if name != "gpt_oss"
} | {"gpt_oss": Parsed("Let me see.", "Look it up.", _BOTH[:1])}
NAMES = [name for name in RECORDED if name.partition(":")[0] in TOOLS]
THINKING = [*sorted(REASONING), "hy_v4:6124c78e"]

_PIECES = [
    "{",
    "}",
    "[",
    "]",
    '"',
    ",",
    ":",
    "\\",
    "\n",
    " ",
    "(",
    ")",
    "'",
    "=",
    "<",
    ">",
    "1",
    "a",
    "ü",
    "😀",
]
_WORDS = [
    "get_weather",
    "get_time",
    "name",
    '"name"',
    '"arguments"',
    "functions.",
    "assistant",
    "null",
    "city",
]


def spoilt(name: str, plan: OutputPlan, draw: random.Random) -> str:
    """Returns an output of the format, recorded or made of its texts, with random faults."""
    markers = [*tokens_of(plan), "<parameter=", "</function>", "</parameter>", "<think>", "</think>", "```"]
    if draw.random() < 0.4:
        parts = in_tokens(RECORDED[name], tokens_of(plan))
        first, last = sorted((draw.randrange(len(parts) + 1), draw.randrange(len(parts) + 1)))
        texts = [
            text for text, _ in (parts[first:last] if draw.random() < 0.5 else parts[:first] + parts[last:])
        ]
        for _ in range(draw.randrange(4)):
            texts.insert(draw.randrange(len(texts) + 1), draw.choice([*markers, *_PIECES]))
        return "".join(texts)
    sources = [markers, _PIECES, _WORDS, in_tokens(RECORDED[name], ())]
    picked = (draw.choice(draw.choice(sources)) for _ in range(draw.randrange(40)))
    return "".join(item if isinstance(item, str) else item[0] for item in picked)


def check_spoilt(name: str, draw: random.Random) -> None:
    """Any output is read without a failure, and alike however it is cut; AssertionError with it otherwise."""
    plan = plan_for(
        name,
        "gpt_oss" if name == "gpt_oss" else draw.choice([None, *THINKING]),
        starts_in_reasoning=draw.random() < 0.3,
        max_calls=draw.choice([None, None, 1]),
        forced=draw.random() < 0.2,
    )
    tokens = tokens_of(plan) if draw.random() < 0.7 else []
    text = spoilt(name, plan, draw)
    pieces = in_tokens(text, tokens)
    expected = parsed(read(plan, pieces, tokens))
    finer = [part for piece in pieces for part in ([piece] if piece[1] else in_characters(piece[0]))]
    assert parsed(read(plan, finer, tokens)) == expected, (plan, text)
    if not tokens:
        assert parsed(read(plan, whole(text))) == expected, (plan, text)
