"""The parsers by name, and how they are made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gateway.parsers.events import OutputPlan
from gateway.parsers.json_calls import (
    DeepseekV3,
    DeepseekV31,
    Hermes,
    JsonList,
    KimiK2,
    LlamaJson,
    Mistral,
)
from gateway.parsers.machine import StreamParser, ThinkFormat, ToolFormat
from gateway.parsers.sink import OutputParser
from gateway.text.tokenizer import Tokenizer

_THINK = ThinkFormat("<think>", "</think>")
REASONING: dict[str, ThinkFormat] = {
    "qwen3": ThinkFormat("<think>", "</think>", ends_at_calls=True),
    "deepseek_r1": ThinkFormat("<think>", "</think>", always=True),
    "deepseek_v31": _THINK,
    "glm45": _THINK,
    "kimi_k2": ThinkFormat("<think>", "</think>", ends_at_calls=True),
    "minimax_m2": ThinkFormat("<think>", "</think>", always=True),
    "step3p5": ThinkFormat("<think>", "</think>", always=True),
    "mistral": ThinkFormat("[THINK]", "[/THINK]"),
}
TOOLS: dict[str, type[ToolFormat]] = {
    "hermes": Hermes,
    "kimi_k2": KimiK2,
    "deepseek_v3": DeepseekV3,
    "deepseek_v31": DeepseekV31,
    "mistral": Mistral,
    "llama3_json": LlamaJson,
}
# For forced calls of models whose own format is not known; nobody else writes it.
JSON_LIST = "json"


def tool_format(name: str) -> type[ToolFormat]:
    """The tool format of a parser's name, as an `OutputPlan` has it."""
    return JsonList if name == JSON_LIST else TOOLS[name]


def kept_tokens(plan: OutputPlan) -> frozenset[str]:
    """The texts of the plan's formats, which tokenizers may have special tokens for."""
    think = REASONING[plan.reasoning_parser].tokens if plan.reasoning_parser else frozenset()
    return think | (tool_format(plan.tool_parser).texts() if plan.tool_parser else frozenset())


def make_parser(plan: OutputPlan, added_tokens: Collection[str]) -> OutputParser | None:
    """A parser for one output; None when the plan names none.

    `added_tokens`: the texts of the tokenizer's added tokens.
    """
    if plan.reasoning_parser is None and plan.tool_parser is None:
        return None
    think = REASONING[plan.reasoning_parser] if plan.reasoning_parser else None
    tools = tool_format(plan.tool_parser) if plan.tool_parser else None
    return StreamParser(plan, think, tools, kept_tokens(plan) & frozenset(added_tokens))


@dataclass(frozen=True)
class ThoughtBounds:
    """Token ids around a thought, as `Constraint` has them; filled by `thought_bounds`."""

    begin: tuple[int, ...]  # empty: the prompt opened it
    end: tuple[int, ...]
    forced: tuple[int, ...] = ()  # what ends a thought that is too long, where `end` alone would not do


def thought_bounds(parser: str, is_open: bool, calls_only: bool, tokenizer: Tokenizer) -> ThoughtBounds:
    """What begins and ends the thought.

    Args:
        parser: the reasoning parser.
        is_open: the prompt opened the thought.
        calls_only: tool calls follow, and no answer.
        tokenizer: spells it.
    """

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()

    think = REASONING[parser]
    return ThoughtBounds(ids("" if is_open else think.begin), ids(think.end))
