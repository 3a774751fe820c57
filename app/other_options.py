"""Command lines with the options that people know from vLLM, SGLang, llama.cpp, KTransformers and LvLLM."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from moebius.config.leaves import Leaf, leaves
from moebius.errors import all_problems
from moebius.other_servers.setting_names import note, other_variable
from moebius.other_servers.translation import Translation, Translator, servers_of_host
from moebius.other_servers.variables import OPENTELEMETRY, PREFIXES


def translated(
    arguments: list[str],
    options: Mapping[str, bool],
    count_servers: Callable[[], int] = servers_of_host,
    command: str = "serve",
) -> list[str]:
    """Returns the command line in our options; what needs no setting here is left out, with a line on stderr.

    `options`: those of `command`, and whether each takes a value. Unknown ones are kept, which the
    command refuses.

    Raises:
        ConfigError: something is done otherwise here; it names all of that, and the command line without it.
    """
    translation = Translator(options, count_servers).words(arguments).finish()
    for text in (*translation.notes, *_meanings(translation.arguments, options)):
        note(text)
    if translation.differences:
        rest = shlex.join(["moebius", command, *translation.arguments])
        raise all_problems(translation.differences, f"without these it is: {rest}")
    return translation.arguments


def note_variables(environment: Mapping[str, str]) -> None:
    """Says of variables that others would read that they are not read, and what does it here: other servers'
    and OpenTelemetry's. Those of the Hugging Face hub (HF_HOME, HF_TOKEN, …) are its library's, and read."""
    for variable in sorted(environment):
        if variable in OPENTELEMETRY:
            note(f"the environment variable {variable} is not read: set {_flag(OPENTELEMETRY[variable])}")
        elif variable.startswith(PREFIXES):
            note(f"the environment variable {variable} is not read: {_hint(variable, environment[variable])}")


def _hint(variable: str, value: str) -> str:
    """Returns what to set instead of another server's variable."""
    if other_variable(variable) is None:
        return "see moebius serve --help-all"
    found: Translation = Translator({}, servers_of_host).variable(variable, value).finish()
    if found.arguments:
        return f"set {shlex.join(found.arguments)}"
    said = [text.partition(": ")[2] for text in (*found.differences, *found.notes)]
    return "; ".join(said) or "its value asks for nothing"


def _flag(leaf: str) -> str:
    return _leaf(leaf).flag


def _leaf(name: str) -> Leaf:
    return next(leaf for leaf in leaves() if leaf.name == name)


def _meanings(arguments: list[str], options: Mapping[str, bool]) -> list[str]:
    """Returns a note where an option of ours has a value that llama.cpp takes for something else."""
    found = Translator(options, servers_of_host).words(arguments).own.get("gpu_layers", "")
    if not found.isdecimal():
        return []
    count = int(found)
    theirs = f"llama.cpp's first {count} layers are --gpu-layers 0-{count - 1}" if count else "'' is none"
    return [f"--gpu-layers {found} puts the experts of layer {found} on the GPU; {theirs}"]
