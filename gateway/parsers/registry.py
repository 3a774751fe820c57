"""Maps names to parsers, and makes parsers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gateway.parsers.events import OutputPlan
from gateway.parsers.gemma_calls import Gemma4
from gateway.parsers.harmony import Harmony, HarmonyParser
from gateway.parsers.json_calls import (
    DeepseekV3,
    DeepseekV31,
    Granite,
    Hermes,
    HunyuanA13b,
    Jamba,
    JsonList,
    KimiK2,
    LlamaJson,
    Longcat,
    MinimaxM1,
    Mistral,
    SolarOpen,
)
from gateway.parsers.machine import StreamParser, ThinkFormat, ToolFormat
from gateway.parsers.nested_calls import MinimaxM3
from gateway.parsers.python_calls import Lfm2, Pythonic
from gateway.parsers.sink import OutputParser
from gateway.parsers.xml_calls import (
    DeepseekV4,
    DeepseekV32,
    Glm45,
    Glm47,
    HyV3,
    HyV4,
    KeyedCalls,
    LongcatKeys,
    MinimaxM2,
    Qwen3Coder,
    Step3p5,
    suffixed,
    with_tag_suffix,
)
from gateway.text.tokenizer import Tokenizer

_THINK = ThinkFormat("<think>", "</think>", ends_at_calls=True)
REASONING: dict[str, ThinkFormat] = {
    "qwen3": _THINK,
    "deepseek_r1": ThinkFormat("<think>", "</think>", always=True),
    "deepseek_v31": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "minimax_m2": ThinkFormat("<think>", "</think>", ends_at_calls=True, always=True),
    "minimax_m3": ThinkFormat("<mm:think>", "</mm:think>"),
    "gemma4": ThinkFormat("<|channel>", "<channel|>", ends_at_calls=True, label="thought\n"),
    "hunyuan_a13b": ThinkFormat(
        "<think>", "</think>", before_answer=("<answer>",), after_answer=("</answer>",)
    ),
    "hy_v4": _THINK,
    "ernie45": ThinkFormat(
        "<think>", "</think>", before_answer=("<response>",), after_answer=("</response>",)
    ),
    "longcat": ThinkFormat("<longcat_think>", "</longcat_think>", ends_at_calls=True),
    "solar_open": ThinkFormat(
        "<|think|>",
        "<|end|>",
        before_answer=("<|content|>", "<|begin|>assistant"),
        after_answer=("<|end|>", "<|flush|>", "<|begin|>assistant"),
        inner=("<|begin|>",),
        to_answer="<|begin|>assistant<|content|>",
        to_calls="<|begin|>assistant",
    ),
    "step3p5": ThinkFormat("<think>", "</think>", ends_at_calls=True, always=True),
    "mistral": ThinkFormat("[THINK]", "[/THINK]"),
}
TOOLS: dict[str, type[ToolFormat]] = {
    "hermes": Hermes,
    "granite": Granite,
    "qwen3_coder": Qwen3Coder,
    "glm45": Glm45,
    "glm47": Glm47,
    "kimi_k2": KimiK2,
    "minimax_m1": MinimaxM1,
    "minimax_m2": MinimaxM2,
    "minimax_m3": MinimaxM3,
    "gemma4": Gemma4,
    "hunyuan_a13b": HunyuanA13b,
    "hy_v3": HyV3,
    "hy_v4": HyV4,
    "jamba": Jamba,
    "longcat": Longcat,
    "longcat_keys": LongcatKeys,
    "solar_open": SolarOpen,
    "deepseek_v3": DeepseekV3,
    "deepseek_v31": DeepseekV31,
    "deepseek_v32": DeepseekV32,
    "deepseek_v4": DeepseekV4,
    "step3p5": Step3p5,
    "gpt_oss": Harmony,
    "mistral": Mistral,
    "llama3_json": LlamaJson,
    "pythonic": Pythonic,
    "lfm2": Lfm2,
}
HARMONY = "gpt_oss"  # one format for everything: a reasoning parser, too
# For forced calls of models whose own format is unknown.
JSON_LIST = "json"


def tool_format(name: str) -> type[ToolFormat]:
    """Returns the tool format of a parser named in an `OutputPlan`; `hy_v3:suffix` has it in its tags."""
    if name == JSON_LIST:
        return JsonList
    base, _, suffix = name.partition(":")
    form = TOOLS[base]
    if not suffix:
        return form
    assert issubclass(form, KeyedCalls), f"{base} has no tags with suffixes"
    return suffixed(form, suffix)


def think_format(name: str) -> ThinkFormat | None:
    """Returns a reasoning parser's format of thoughts; None: every part has its own opener."""
    base, _, suffix = name.partition(":")
    think = REASONING.get(base)
    if think is None or not suffix:
        return think
    return replace(think, begin=with_tag_suffix(think.begin, suffix), end=with_tag_suffix(think.end, suffix))


def kept_tokens(plan: OutputPlan) -> frozenset[str]:
    """Returns the texts of the plan's formats, for which tokenizers may have special tokens."""
    if HARMONY in (plan.reasoning_parser, plan.tool_parser):
        return Harmony.texts()
    think = think_format(plan.reasoning_parser or "")
    texts = frozenset[str]() if think is None else think.tokens
    return texts | (tool_format(plan.tool_parser).texts() if plan.tool_parser else frozenset())


def make_parser(plan: OutputPlan, added_tokens: Collection[str]) -> OutputParser | None:
    """Returns a parser for one output; None when the plan names none.

    `added_tokens`: the texts of the tokenizer's added tokens.
    """
    if plan.reasoning_parser is None and plan.tool_parser is None:
        return None
    tokens = kept_tokens(plan) & frozenset(added_tokens)
    if HARMONY in (plan.reasoning_parser, plan.tool_parser):
        return HarmonyParser(plan, tokens)
    think = think_format(plan.reasoning_parser or "")
    tools = tool_format(plan.tool_parser) if plan.tool_parser else None
    return StreamParser(plan, think, tools, tokens)


@dataclass(frozen=True)
class ThoughtBounds:
    """The token ids around a thought, as `Constraint` has them; filled by `thought_bounds`."""

    begin: tuple[int, ...]  # empty: the prompt contains it
    end: tuple[int, ...]
    forced: tuple[int, ...] = ()  # ends a thought that is too long, if `end` does not suffice


def thought_bounds(parser: str, is_open: bool, calls_only: bool, tokenizer: Tokenizer) -> ThoughtBounds:
    """Returns the token ids that begin and end the thought.

    Args:
        parser: the reasoning parser.
        is_open: the prompt opened the thought.
        calls_only: only tool calls follow.
        tokenizer: encodes the texts.
    """

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()

    if parser == HARMONY:
        # An answer begins with its channel's header; a call has a header of its own.
        next_message = "<|end|><|start|>assistant"
        if calls_only:
            return ThoughtBounds(ids("<|channel|>analysis<|message|>"), ids(next_message))
        answer = "<|channel|>final<|message|>"
        return ThoughtBounds((), ids(answer), ids(next_message + answer))
    think = think_format(parser)
    assert think is not None, f"no reasoning parser {parser}"
    end = think.end + (think.to_calls if calls_only else think.to_answer)
    return ThoughtBounds(ids("" if is_open else think.begin + think.label), ids(end))
