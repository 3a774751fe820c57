"""What an option that does not exist was meant to be: by words of names and descriptions, not by letters."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Words that mean the same, in what people type and in what our options are called.
_SAME = (
    ("context", "ctx", "len", "length", "window"),
    ("memory", "mem", "vram", "ram", "gib", "gb"),
    ("dtype", "type", "format", "precision", "quant", "quantization", "quantize", "bits"),
    ("threads", "thread", "cores", "workers", "cpus"),
    ("batch", "seqs", "streams", "parallel", "concurrency", "slots", "batched"),
    ("kv", "cache"),
    ("prefill", "prompt", "prompts", "chunk"),
    ("placement", "offload", "resident", "ncmoe"),
    ("address", "addr", "url", "endpoint", "listen"),
    ("key", "token", "auth", "password"),
    ("log", "verbose", "verbosity", "quiet"),
    ("experts", "expert", "moe"),
    ("gpu", "gpus", "device", "cuda", "devices"),
    ("servers", "server", "nodes", "numa", "sockets"),
    ("layers", "layer"),
    ("name", "alias", "aliases", "served"),
)
_GROUPS = {word: group[0] for group in _SAME for word in group}
# They say nothing about what is meant.
_EMPTY = frozenset(
    {"", "num", "number", "n", "max", "min", "of", "the", "no", "size", "count", "enable", "use", "set"}
)
_TYPO = 0.83
# What does here what a command of another server, or of its manager, does there.
_OTHER_COMMANDS = {
    "serve MODEL": "server start up launch launch_server launch-server llama-server api_server",
    "run MODEL PROMPT": "cli complete completion generate ask llama-cli",
    "pull NAME": "download fetch get install",
    "top": "stats watch monitor",
    "logs": "log journal",
    "stop": "kill shutdown down",
    "list": "ls tags",
    "rm NAME": "remove delete",
    "update": "upgrade self-update",
    "disk": "du df cache uninstall",
    "show MODEL": "info inspect",
    "plan MODEL": "fit memory estimate",
    "bench": "benchmark perf llama-bench bench_serving",
    "doctor": "check check_env collect-env env",
    "--help": "help",
}
# Of the package `lab`, by the group that has them.
LAB_COMMANDS = {
    "moebius": {"verify"},
    "moebius models": {"random"},
    "moebius bench": {
        *("engine", "gateway", "host", "kernels", "load", "mailbox", "masks", "memory", "placement"),
        *("prefill", "plan", "quota", "replay", "speculation", "steps", "tiers", "topics"),
    },
}
_DOES = {name: command for command, names in _OTHER_COMMANDS.items() for name in names.split()}


def suggestions(name: str, known: Mapping[str, str]) -> list[str]:
    """At most three of the known options (flag -> description) that the unknown flag may mean, best first.

    One that differs by a letter or two is the only one. Empty: nothing is near in meaning.
    """
    if close := difflib.get_close_matches(name, known, n=1, cutoff=_TYPO):
        return close
    wanted = _words(name)
    scores = {flag: _score(wanted, flag, text) for flag, text in known.items()}
    found = [flag for flag, score in scores.items() if score >= 2]
    return sorted(found, key=lambda flag: (-scores[flag], len(flag), flag))[:3]


def unknown_option(error: Any) -> str | None:
    """Returns the message for typer's error of an option that a command lacks; None for any other error."""
    name, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if name is None or context is None or not hasattr(error, "possibilities"):
        return None
    known = {
        flag: str(getattr(option, "help", "") or "")
        for option in context.command.params
        for flag in option.opts
        if flag.startswith("--")
    }
    return _no_such_option(name, known, context.command_path)


def unknown_options(
    arguments: Sequence[str], options: Mapping[str, bool], known: Mapping[str, str], path: str
) -> list[str]:
    """Returns a message for each option of a command line that the command lacks, in their order.

    `options`: its options, and whether each takes a value; `known`: their descriptions; `path`: the command.
    """
    found, rest = list[str](), iter(arguments)
    for word in rest:
        name, equals, _ = word.partition("=")
        if word == "--":
            break
        if options.get(name) and not equals:
            next(rest, None)  # its value, whatever that begins with
        elif name.startswith("--") and name not in options:
            found.append(_no_such_option(name, known, path))
    return found


def _no_such_option(name: str, known: Mapping[str, str], path: str) -> str:
    found = suggestions(name, known)
    hint = f"did you mean {' or '.join(found)}?" if found else f"{path} --help lists its options"
    return f"{path} has no option {name}; {hint}"


def unknown_command(message: str, path: str = "moebius") -> str | None:
    """Returns what to write for a command that does not exist: another server's name for one of ours, or a
    model in its place; None for any other message. `path`: of the group of commands.
    """
    found = re.fullmatch(r"No such command '([^']+)'\.?( Did you mean .*)?", message)
    if found is None:
        return None
    name, near = found[1], found[2] or ""
    if name in LAB_COMMANDS.get(path, ()):
        return f"{path} {name} is in a package of its own: pip install moebius-lab, or lab/ of the repository"
    if path == "moebius" and name in _DOES:
        return f"{name} is no command; moebius {_DOES[name]} does that"
    if name.endswith(".gguf") or "/" in name or os.path.exists(name):
        return f"{name} is no command; moebius serve {name} serves a model"
    return f"{name} is no command;{near.replace(' Did', ' did') or f' {path} --help lists them'}"


def _words(text: str) -> set[str]:
    words = set(re.split(r"[^a-z0-9]+", text.lower())) - _EMPTY
    return {_GROUPS.get(word, word) for word in words}


def _score(wanted: set[str], flag: str, description: str) -> float:
    """Returns two for a word of the flag, one for a word of its description; flags that say much else come
    later.
    """
    own, described = _words(flag), _words(description)
    return 2 * len(wanted & own) + len((wanted & described) - own) - 0.1 * len(own - wanted)
