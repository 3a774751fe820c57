"""Short names for the models of docs/recipes: what is typed for owner/name, as in `moebius run glm-4.7`."""

from __future__ import annotations

import difflib

# A page of docs/recipes each.
SHORT_NAMES = {
    "deepseek-v3.2": "deepseek-ai/DeepSeek-V3.2",
    "glm-4.7": "zai-org/GLM-4.7",
    "glm-5.3-flash": "zai-org/GLM-5.3-Flash",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "kimi-k2.5": "moonshotai/Kimi-K2.5",
    "minimax-m2": "MiniMaxAI/MiniMax-M2",
    "qwen3-coder-30b": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "qwen3-next-80b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
}
_CLOSE = 0.5


def full_name(given: str) -> str:
    """Returns a name as the hub has it, owner/name or owner/name:QUANTISATION; anything but a short name
    as it is. Capitals do not matter."""
    name, colon, quantisation = given.partition(":")
    found = SHORT_NAMES.get(name.lower())
    return given if found is None else f"{found}{colon}{quantisation}"


def hint(given: str) -> str:
    """Returns the end of a sentence about a model that is not known: the closest short names, or all of them;
    empty for what looks like a path."""
    if "/" in given or given.endswith(".gguf"):
        return ""
    close = difflib.get_close_matches(given.lower(), SHORT_NAMES, n=3, cutoff=_CLOSE)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; short names: {', '.join(SHORT_NAMES)}"
