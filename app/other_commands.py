"""Whole command lines that start other servers: which server it is, its variables, and its options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moebius.errors import UserError
from moebius.other_servers.translation import Translation, Translator
from moebius.other_servers.variables import LIBRARIES

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.S)
_OLLAMA_NAME = re.compile(r"[a-z0-9][\w.-]*(:[\w.-]+)?")
# What stands before a server's own words, and how many values each of its options takes.
_WRAPPERS = frozenset({"sudo", "nohup", "exec", "env", "time", "uv", "run", "setsid", "stdbuf"})
_BINDERS = frozenset({"numactl", "taskset"})
# What begins the part of a line that is the shell's.
_SHELL = re.compile(r"[0-9&]?[<>].*|\|\|?|&&?|;")
# Programs that serve models otherwise, and programs that start what no table here knows.
_UNKNOWN = frozenset({"llama-swap", "ktransformers", "lmdeploy", "trtllm-serve", "tabbyapi", "bash", "sh"})
_SUBCOMMANDS = frozenset({"vllm", "sglang", "kt", "ollama", "moebius"})
_MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.cli.main": "vllm",
    "sglang.launch_server": "sglang",
    "sglang.srt.launch_server": "sglang",
}
_IMAGES = {
    "vllm/": "vllm",
    "lmsysorg/sglang": "sglang",
    "llama.cpp": "llama-server",
    "ollama/ollama": "ollama",
}
# Options of `ollama run` about the request that it makes.
_OF_REQUESTS = {
    "--verbose": "figures of a request are in its usage, and of all at /metrics",
    "--think": "reasoning_effort and chat_template_kwargs are fields of each request",
}
_WITH_VALUES = frozenset({"--keepalive", "--format"})
# Where each server listens if nothing says so; clients know these ports.
_PORTS = {"vllm": 8000, "sglang": 30000, "llama-server": 8080, "ollama": 11434, "kt": 30000}
_OUR_PORT = 8000


@dataclass(frozen=True)
class OtherCommand:
    """A command line that starts a server; filled by `read_command`."""

    server: str  # vllm, sglang, llama-server, ollama or kt; empty: none of these.
    variables: Mapping[str, str]
    arguments: list[str]  # The server's own.
    left_out: list[str]  # What stood before it and has no place here: what, and why.


def read_command(words: list[str]) -> OtherCommand:
    """Returns the parts of a command line as a shell divides it into words.

    Raises UserError for a program that is known to be none of these servers.
    """
    end = next((at for at, word in enumerate(words) if at and _SHELL.fullmatch(word)), len(words))
    variables, left_out, rest = dict[str, str](), list[str](), list(words[:end])
    while rest:
        if (found := _ASSIGNMENT.fullmatch(rest[0])) is not None:
            variables[found[1]] = found[2]
            rest = rest[1:]
        elif rest[0] in _WRAPPERS:
            rest = rest[1:]
        elif rest[0] in _BINDERS:
            bound = _after_options(rest, 1)
            left_out.append(f"{shlex.join(rest[:bound])}: expert servers are pinned to their NUMA nodes")
            rest = rest[bound:]
        elif rest[0] in ("docker", "podman"):
            return _container(rest, variables, left_out)
        else:
            break
    server, arguments = _server(rest)
    return OtherCommand(server, variables, arguments, left_out)


def translate_command(
    words: list[str], options: Mapping[str, bool], count_servers: Callable[[], int]
) -> tuple[list[str], Translation]:
    """Returns the words of our command that serves the same, and what differs.

    `options`: of `moebius serve`, and whether each takes a value. Variables that libraries read stay.
    """
    command = read_command(words)
    translator = Translator(options, count_servers, keeps_wrong=False)
    arguments = command.arguments
    if command.server == "ollama":
        arguments = _ollama_model(arguments, translator)
    if command.server == "vllm":
        arguments = _one_key(arguments, translator)
    translator.words(_with_names(arguments, command.server))
    kept = list[str]()
    for name, value in command.variables.items():
        if name.startswith(LIBRARIES):
            kept.append(f"{name}={value}")
            continue
        try:
            translator.variable(name, value)
        except KeyError:
            translator.differ(f"{name}={value}", "no such variable is known here")
    for text in command.left_out:
        translator.differ(*text.split(": ", 1))
    found = translator.finish()
    ours = [word.removeprefix("hf.co/").removeprefix("https://huggingface.co/") for word in found.arguments]
    port = _PORTS.get(command.server, _OUR_PORT)
    if port != _OUR_PORT and not any(word.partition("=")[0] == "--port" for word in ours):
        ours += ["--port", str(port)]
    return [*kept, "moebius", "serve", *ours], found


def _after_options(words: list[str], begin: int) -> int:
    """Returns where a program's options, and a value of each short one, end."""
    at = begin
    while at < len(words) and words[at].startswith("-"):
        at += 1 if "=" in words[at] or words[at].startswith("--") or len(words[at]) > 2 else 2
    return at


def _server(words: list[str]) -> tuple[str, list[str]]:
    """Returns the server that the words start, and its arguments."""
    program = words[0].replace("\\", "/").rpartition("/")[2].removesuffix(".exe") if words else ""
    if re.fullmatch(r"python[\d.]*", program) and "-m" in words:
        at = words.index("-m")
        module = words[at + 1] if at + 1 < len(words) else ""
        rest = words[at + 2 :]
        if module in _MODULES:
            return _MODULES[module], rest[1:] if rest[:1] == ["serve"] else rest
    if program in _SUBCOMMANDS and words[1:2] in (["serve"], ["run"], ["start"]):
        return program, words[2:]
    if program in ("llama-server", "llama-cli", "server"):
        return "llama-server", words[1:]
    if program in _UNKNOWN | _SUBCOMMANDS or re.fullmatch(r"python[\d.]*", program):
        what = shlex.join(words[: 1 if program in _UNKNOWN else 2])
        raise UserError(
            f"{what}: it starts no server that is known here; known are vllm serve, sglang serve, python -m "
            "sglang.launch_server, kt run, llama-server, ollama serve, and docker run of their images"
        )
    return "", words


def _container(words: list[str], variables: dict[str, str], left_out: list[str]) -> OtherCommand:
    """Returns the parts of `docker run … IMAGE ARGUMENTS`: variables are those of its options."""
    for at, word in enumerate(words):
        if word in ("-e", "--env") and (found := _ASSIGNMENT.fullmatch("".join(words[at + 1 : at + 2]))):
            variables[found[1]] = found[2]
        server = next(
            (name for image, name in _IMAGES.items() if image in word and not word.startswith("-")), ""
        )
        if server and at > 1 and words[at - 1] not in ("--name", "-v", "--volume", "-e"):
            left_out.append(f"{shlex.join(words[:2])}: docs/containers.md has the container")
            inner, arguments = _server(words[at + 1 :])
            return OtherCommand(inner or server, variables, arguments, left_out)
    return OtherCommand("", variables, words, left_out)


def _ollama_model(arguments: list[str], translator: Translator) -> list[str]:
    """Returns the arguments without a name that only ollama's library has, and without a prompt."""
    kept, has_model, before = list[str](), False, ""
    for word in arguments:
        if word.partition("=")[0] in _OF_REQUESTS:
            translator.differ(word, _OF_REQUESTS[word.partition("=")[0]])
        elif word.startswith("-") or before in _WITH_VALUES:
            kept.append(word)
        elif has_model:
            translator.differ(shlex.quote(word), "a prompt is given to a server that runs, by moebius chat")
        elif "/" not in word and _OLLAMA_NAME.fullmatch(word):
            translator.differ(word, "it is a name of ollama's library; MODEL is owner/name:Q4_K_M or a path")
        else:
            kept.append(word)
        has_model = has_model or not (word.startswith("-") or before in _WITH_VALUES)
        before = word
    return kept


def _one_key(arguments: list[str], translator: Translator) -> list[str]:
    """Returns vLLM's arguments with the first of several API keys."""
    if "--api-key" not in arguments:
        return arguments
    first = arguments.index("--api-key") + 1
    end = next((at for at in range(first, len(arguments)) if arguments[at].startswith("-")), len(arguments))
    if end > first + 1:
        translator.differ("--api-key", "one key is taken; several are lines of --api-key-file")
    return arguments[: first + 1] + arguments[end:]


def _with_names(arguments: list[str], server: str) -> list[str]:
    """Returns vLLM's and SGLang's arguments with all names but the first as further ones of the model."""
    flags = [at for at, word in enumerate(arguments) if word.replace("_", "-") == "--served-model-name"]
    if server not in ("vllm", "sglang") or not flags:
        return arguments
    first = flags[-1] + 1
    end = next((at for at in range(first, len(arguments)) if arguments[at].startswith("-")), len(arguments))
    further = arguments[first + 1 : end]
    aliases = ["--model-aliases", ",".join((*further, "claude-*"))] if further else []
    return [*arguments[: first + 1], *aliases, *arguments[end:]]
