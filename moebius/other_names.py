"""Settings by the names that vLLM, SGLang, llama.cpp, KTransformers and LvLLM have for them.

Each name stands for one of our settings, or has no effect here, or is refused with what does it here. Used
for command lines (`moebius/app/other_options.py`), and for flat configuration files (`config_loader.py`).
"""

from __future__ import annotations

import sys

from moebius.other_names_table import TABLE, OtherName, no_effect, refused

__all__ = ["MEANINGS", "OTHER_NAMES", "OTHER_VALUES", "OtherName", "note", "other_name"]

OTHER_NAMES = {name: other for names, other in TABLE.items() for name in names.split()}

# Values that other servers have for our settings, by leaf.
OTHER_VALUES: dict[str, dict[str, str]] = {
    "max_model_len": {"auto": "none", "-1": "none"},
    "dtype": {
        "bf16": "bfloat16",
        "fp32": "float32",
        "float": "float32",
        "fp16": "float16",
        "half": "float16",
    },
    "kv_cache_dtype": {"fp8": "fp8_e4m3", "bf16": "auto", "bfloat16": "auto"},
    "device": {"gpu": "cuda"},
    "expert_dtype": {"bf16": "bfloat16", "fp32": "float32"},
}

_REQUEST = "it is a field of each request"

# What has another meaning here than people expect.
MEANINGS: dict[str, str] = {
    "top-k": "sampling is set in each request (top_k); experts per token: --experts-per-token",
    "n": "max_tokens is a field of each request",
    "predict": "max_tokens is a field of each request",
    "n-predict": "max_tokens is a field of each request",
    **dict.fromkeys(("temperature", "temp", "top-p", "min-p", "repeat-penalty", "samplers"), _REQUEST),
    **dict.fromkeys(("presence-penalty", "frequency-penalty", "logit-bias", "ignore-eos"), _REQUEST),
    **dict.fromkeys(("typical", "mirostat", "dry-multiplier", "xtc-probability"), "it is not supported"),
    "grammar": "response_format, structured_outputs and tools are fields of each request",
    "json-schema": "response_format is a field of each request",
}


def other_name(name: str) -> OtherName | None:
    """What an option, a key or an environment variable of another server means here; None: unknown."""
    # Short options differ by case: -c is a context's length, -C a mask of CPUs.
    short = name.startswith("-") and not name.startswith("--")
    spelling = (name if short else name.lower()).lstrip("-").replace("_", "-")
    if (meaning := MEANINGS.get(spelling)) is not None:
        return refused(meaning)
    other = OTHER_NAMES.get(spelling)
    if other is None and spelling.startswith("no-"):
        positive = OTHER_NAMES.get(spelling.removeprefix("no-"))
        if positive is not None and not positive.takes_value and not positive.leaf:
            other = no_effect(positive.no_effect or f"it is never on; {positive.refusal}")
    return other


def note(text: str) -> None:
    """One line on stderr for the person who typed or wrote the name."""
    print(f"moebius: note: {text}", file=sys.stderr, flush=True)
