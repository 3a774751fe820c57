"""Detects a model's parsers from the formats in its chat template and from its family."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moebius.config.parser_names import AUTO, NONE

# The first text that a template contains determines its format of tool calls.
_TOOL_SIGNS: tuple[tuple[str, str | None], ...] = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("]<]minimax[>[", "minimax_m3"),
    ("<｜DSML｜ calls>", None),  # V4.1, with a blank in its tags
    ("<｜DSML｜tool_calls>", "deepseek_v4"),
    ("｜DSML｜", "deepseek_v32"),
    ("<|channel|>", "gpt_oss"),
    ("<|tool_call>call:", "gemma4"),
    ("<|tool_call:begin|>", "solar_open"),
    ("<longcat_arg_key>", "longcat_keys"),
    ("<longcat_tool_call>", "longcat"),
    ("<tool_sep", "hy_v3"),
    ("<arg_key:", "hy_v4"),
    ("</arg_key><arg_value>", "glm47"),
    ("<arg_key>", "glm45"),
    ("<parameter=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
    ("<tool_calls>", "jamba"),
)
_REASONING_OF_TOOLS = {
    "glm45": "glm45",
    "glm47": "glm45",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax_m2",
    "deepseek_v3": "deepseek_v31",  # `deepseek_r1` is for templates that leave the thought unopened
    "deepseek_v31": "deepseek_v31",
    "deepseek_v32": "deepseek_v31",
    "deepseek_v4": "deepseek_v31",
}
_REASONING_OF_FAMILIES = {"step3p5": "step3p5", "step3p7": "step3p5", "minimax_m2": "minimax_m2"}
# The texts around thoughts in a template, for formats that no other parser has.
_REASONING_SIGNS = (
    ("<|channel|>", "gpt_oss"),
    ("<|channel>", "gemma4"),
    ("[THINK]", "mistral"),
    ("<mm:think>", "minimax_m3"),
    ("<think:", "hy_v4"),
    ("<longcat_think>", "longcat"),
)
# Families whose lists of calls have another family's format, or whose answers are in tags.
_LISTS_OF_FAMILIES = {
    "hunyuan_v1_moe": "hunyuan_a13b",
    "jamba": "jamba",
    "minimax": "minimax_m1",
    "minimax_m1": "minimax_m1",
}
_ANSWERS = (("<response>", "ernie45"), ("<answer>", "hunyuan_a13b"))


# Formats whose tags end in a suffix of the checkpoint's own, with the text that shows it.
_SUFFIXED = frozenset({"hy_v3", "hy_v4"})
_SUFFIX = re.compile(r"<(?:think|tool_calls?|tool_sep|arg_key|arg_value):([\w.-]+)>")


def detected_tool_parser(model_type: str, template: str) -> str | None:
    """Returns the tool parser for a model, or None if its template shows no format that is known.

    Args:
        model_type: config.json's.
        template: the chat template's source, with the tags that it composes; empty: none.
    """
    if "<｜tool▁sep｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if model_type == "hy_v4" and "<arg_key" in template:
        return "hy_v4"
    if model_type.startswith("lfm2") and "tools" in template:
        return "lfm2"  # not all releases' templates show a call
    if "<tool_calls>" in template and model_type in _LISTS_OF_FAMILIES:
        return _LISTS_OF_FAMILIES[model_type]
    found = next((name for sign, name in _TOOL_SIGNS if sign in template), None)
    if found == "qwen3_coder" and model_type in ("step3p5", "step3p7"):
        return "step3p5"
    return found


def detected_reasoning_parser(model_type: str, template: str) -> str | None:
    """Returns the reasoning parser, or None if the template shows no thoughts. Arguments as above."""
    found = next((name for sign, name in _REASONING_SIGNS if sign in template), None)
    if found is not None:
        return found
    if "<|think|>" in template and "<|content|>" in template:
        return "solar_open"
    if model_type == "minimax_m1":
        return "qwen3"  # its template does not show a thought
    if "<think>" not in template and "</think>" not in template:
        return None
    if model_type in _REASONING_OF_FAMILIES:
        return _REASONING_OF_FAMILIES[model_type]
    in_tags = next((name for sign, name in _ANSWERS if sign in template and _uses_tags(model_type)), None)
    if in_tags is not None:
        return in_tags
    return _REASONING_OF_TOOLS.get(detected_tool_parser(model_type, template) or "", "qwen3")


def _uses_tags(model_type: str) -> bool:
    """Returns whether the family uses the tags; in other templates they are examples."""
    return model_type.startswith(("ernie4_5", "hunyuan", "granite"))


def chosen_parsers(
    tool_setting: str,
    reasoning_setting: str,
    model_type: str,
    template: str,
    added_tokens: Iterable[str] = (),
) -> tuple[str | None, str | None]:
    """Returns tool and reasoning parser, as an `OutputPlan` has them, each None if there is none.

    Args:
        tool_setting: `tool_call_parser`.
        reasoning_setting: `reasoning_parser`.
        model_type: config.json's.
        template: the chat template's source, with the tags that it composes; empty: none.
        added_tokens: texts of the tokenizer's added tokens, for a suffix that the template does not show.
    """
    tools = detected_tool_parser(model_type, template) if tool_setting == AUTO else tool_setting
    thoughts = detected_reasoning_parser(model_type, template)
    reasoning = thoughts if reasoning_setting == AUTO else reasoning_setting
    names = [None if name in (None, NONE) else name for name in (tools, reasoning)]
    if _SUFFIXED.intersection(names):
        found = _SUFFIX.search(template) or _SUFFIX.search("".join(added_tokens))
        suffix = "" if found is None else f":{found.group(1)}"
        names = [f"{name}{suffix}" if name in _SUFFIXED else name for name in names]
    return names[0], names[1]
