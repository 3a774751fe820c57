"""Command lines with the options that people know from vLLM, SGLang, llama.cpp, KTransformers and LvLLM."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Mapping

from moebius.config_loader import leaves
from moebius.other_names import OtherName, note, other_name

_NUMBER = re.compile(r"-\d")
# What OpenTelemetry's variables are set for; the settings of all processes come from one place.
_OPENTELEMETRY = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "--otlp-endpoint",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "--otlp-endpoint",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "--otlp-endpoint",
    "OTEL_METRIC_EXPORT_INTERVAL": "--otlp-metrics-interval-s",
    "OTEL_TRACES_SAMPLER_ARG": "--trace-sample-ratio",
}
# What others call the argument MODEL.
MODEL_OPTIONS = frozenset({"model", "model-path", "m", "hf", "hf-repo"})


def translated(arguments: list[str], options: Mapping[str, bool]) -> list[str]:
    """The command line in our options; what has no effect here is left out, with a line on stderr.

    `options`: those of the command, and whether each takes a value. They are never touched, nor are
    unknown ones, which the command refuses.

    Raises:
        ConfigError: an option is known, but something else does it here, which is named.
    """
    waiting, result = deque(arguments), list[str]()
    while waiting:
        argument = waiting.popleft()
        name, has_value, value = argument.partition("=")
        if argument == "--":
            return [*result, argument, *waiting]
        if name in options or not _is_option(name):
            result.append(argument)
            if options.get(name) and not has_value and waiting:
                value = waiting.popleft()
                result.append(value)
            _note_meaning(name, value)
            continue
        is_model, other = name.lstrip("-") in MODEL_OPTIONS, other_name(name)
        if other is None and not is_model:
            result.append(argument)
            continue
        # Some take a value in newer versions only, and none of theirs begins with a dash.
        takes_value = is_model or (other is not None and other.takes_value and not other.refusal)
        if takes_value and not has_value and waiting and not _is_option(waiting[0]):
            value = waiting.popleft()
        result += [value] if other is None else _ours(name, other, value)
    return result


def note_variables(environment: Collection[str]) -> None:
    """Says of variables that others would read that they are not read, and what does it here: other servers'
    and OpenTelemetry's. Those of the Hugging Face hub (HF_HOME, HF_TOKEN, …) are its library's, and read."""
    for variable in sorted(environment):
        if variable in _OPENTELEMETRY:
            note(f"the environment variable {variable} is not read: set {_OPENTELEMETRY[variable]}")
        if not variable.startswith(("LVLLM_", "LK_")):
            continue
        other = other_name(variable)
        if other is None:
            hint = "see moebius serve --help"
        elif other.leaf:
            hint = f"set --{other.leaf.replace('_', '-')}"
        else:
            hint = other.no_effect or other.refusal
        note(f"the environment variable {variable} is not read: {hint}")


def _note_meaning(name: str, value: str) -> None:
    """Says where an option of ours has a value that llama.cpp takes for something else."""
    if name == "--gpu-layers" and value.isdecimal():
        count = int(value)
        theirs = f"llama.cpp's first {count} layers are --gpu-layers 0-{count - 1}" if count else "'' is none"
        note(f"--gpu-layers {value} puts the experts of layer {value} on the GPU; {theirs}")


def _is_option(text: str) -> bool:
    return text.startswith("-") and len(text) > 1 and not _NUMBER.match(text)


def _ours(name: str, other: OtherName, value: str) -> list[str]:
    """What to type instead of an option of another server. Raises ConfigError."""
    if other.refusal:
        other.refuse(name)
    if other.no_effect:
        note(f"{name} has no effect: {other.no_effect}")
        return []
    leaf = next(leaf for leaf in leaves() if leaf.name == other.leaf)
    text = other.value(name, value) if other.fixed is None else other.fixed
    if leaf.annotation is bool:
        return [leaf.flag if leaf.parse(text) else f"--no-{leaf.flag[2:]}"]
    return [leaf.flag, text]
