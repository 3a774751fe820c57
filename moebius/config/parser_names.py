"""The names of tool-call and reasoning parsers, and what users of other servers call them."""

from __future__ import annotations

from collections.abc import Mapping

AUTO, NONE = "auto", "none"

TOOL_CALL_PARSERS: Mapping[str, tuple[str, ...]] = {
    "hermes": ("qwen", "qwen25", "qwen2_5", "qwen3", "qwen3_json", "ernie45", "granite4", "trinity"),
    "granite": (),
    "qwen3_coder": ("qwen3_xml", "mimo"),
    "glm45": ("glm", "glm4", "glm4_moe", "poolside_v1", "ling3"),
    "glm47": ("glm47_moe", "glm5"),
    "kimi_k2": ("kimi", "kimi_k25"),
    "minimax_m1": ("minimax",),
    "minimax_m2": (),
    "minimax_m3": (),
    "gemma4": (),
    "hunyuan_a13b": ("hunyuan",),
    "hy_v3": ("hunyuan_v3", "hy_v3_opensource"),
    "hy_v4": (),
    "jamba": (),
    "longcat": (),
    "longcat_keys": (),
    "solar_open": (),
    "deepseek_v3": ("deepseekv3", "deepseek_r1", "deepseek"),
    "deepseek_v31": ("deepseekv31",),
    "deepseek_v32": ("deepseekv32",),
    "deepseek_v4": ("deepseekv4",),
    "step3p5": ("step3_5",),
    "gpt_oss": ("gptoss", "openai", "openai_gptoss", "harmony"),
    "mistral": (),
    "llama3_json": ("llama3", "llama", "llama4_json"),
    "pythonic": ("llama4_pythonic", "llama4"),
    "lfm2": (),
}
REASONING_PARSERS: Mapping[str, tuple[str, ...]] = {
    "qwen3": ("qwen3_thinking", "qwen", "mimo", "nano_v3", "nemotron_3", "nemotron_v3", "super_v3"),
    "deepseek_r1": ("deepseekr1",),
    "deepseek_v31": (
        "deepseek_v3",
        "deepseekv3",
        "deepseekv31",
        "deepseek_v32",
        "deepseekv32",
        "deepseek_v4",
        "deepseekv4",
    ),
    "glm45": ("glm", "glm4", "glm47", "glm5", "poolside_v1", "ling3"),
    "kimi_k2": ("kimi", "kimi_k25"),
    "minimax_m2": ("minimax",),
    "minimax_m3": (),
    "gemma4": (),
    "hunyuan_a13b": ("hunyuan",),
    "hy_v4": ("hy_v3", "hunyuan_v3"),
    "ernie45": (),
    "longcat": (),
    "solar_open": (),
    "step3p5": ("step3", "step3_5"),
    "gpt_oss": ("gptoss", "openai", "openai_gptoss", "harmony"),
    "mistral": (),
}


def parser_name(value: str, parsers: Mapping[str, tuple[str, ...]]) -> str:
    """Returns the parser that a user means, or `auto` or `none`; ValueError listing what there is."""
    written = value.strip().lower().replace("-", "_").replace(".", "_")
    for name, aliases in parsers.items():
        if written == name or written in aliases:
            return name
    if written in (AUTO, NONE):
        return written
    raise ValueError(f"allowed are {', '.join((AUTO, NONE, *sorted(parsers)))}")
