"""Settings by the names that vLLM, SGLang, llama.cpp, KTransformers, LvLLM and ollama have for them.

Each name stands for one of our settings, or asks for what is so here, or is refused with what does it here.
Command lines and flat configuration files are translated by `moebius/other_servers/translation.py`.
"""

from __future__ import annotations

import sys

from moebius.other_servers import hybrids, llama_cpp, serving, variables, vllm_sglang
from moebius.other_servers.name import OtherName, fulfilled
from moebius.other_servers.values import OTHER_VALUES

__all__ = ["OTHER_NAMES", "OTHER_VALUES", "OtherName", "field_name", "note", "other_name", "other_variable"]

# One table for all, since people type what they are used to.
OTHER_NAMES = {
    name: other
    for table in (vllm_sglang, serving, llama_cpp, hybrids, variables)
    for names, other in table.TABLE.items()
    for name in names.split()
}


def other_name(name: str) -> OtherName | None:
    """Returns what an option or a key of another server means here; None: it is unknown.

    A field of an object (`speculative-config.method`) that has no meaning of its own has the object's.
    """
    spelling = _spelling(name)
    other = OTHER_NAMES.get(spelling)
    if other is None and spelling.startswith("no-"):
        positive = OTHER_NAMES.get(spelling.removeprefix("no-"))
        if positive is not None and not positive.takes_value and positive.refusal:
            other = fulfilled(f"it is never on; {positive.refusal}")
    while other is None and "." in spelling:
        spelling = spelling.rpartition(".")[0]
        other = OTHER_NAMES.get(spelling)
    return other


def field_name(name: str, key: str) -> OtherName | None:
    """Returns what a field of another server's object means by itself; None: it is not known."""
    return OTHER_NAMES.get(_spelling(f"{name}.{key}"))


def _spelling(name: str) -> str:
    # Short options differ by case: -c is a context's length, -C a mask of CPUs.
    short = name.startswith("-") and not name.startswith("--") and "." not in name
    spelling = (name if short else name.lower()).lstrip("-").replace("_", "-")
    return spelling.replace("cc.", "compilation-config.", 1) if spelling.startswith("cc.") else spelling


def other_variable(name: str) -> OtherName | None:
    """Returns what an environment variable of another server means here; None: it is unknown."""
    if (leaf := variables.OPENTELEMETRY.get(name)) is not None:
        return OtherName(leaf)
    if not name.startswith(variables.PREFIXES):
        return None
    spelling = name.lower().replace("_", "-")
    if spelling.startswith("llama-arg-"):
        option = spelling.removeprefix("llama-arg-")
        return OTHER_NAMES.get(variables.LLAMA_ARGUMENTS.get(option, option))
    return OTHER_NAMES.get(spelling)


def note(text: str) -> None:
    """Prints one line on stderr for the person who typed or wrote the name."""
    print(f"moebius: note: {text}", file=sys.stderr, flush=True)
