"""Checks that a container's command line is one of ours."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import typer.main

from app.cli import app
from moebius.config.loader import load_config


@cache  # a tenth of a second: two thousand options
def _commands() -> Any:
    return typer.main.get_command(app)


def check_command(container: dict[str, Any], config: Path) -> None:
    """`moebius` has the command and its options; the settings that it is given can be read."""
    words = [str(word) for word in container["args"]]
    if container.get("command"):
        text = words[0].removeprefix("exec moebius ")
        words = re.sub(r"\$\(\(.*?\)\)|\$\w+", "1", text).split()
    command = _commands()
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {name: option for option in command.params for name in option.opts if name.startswith("--")}
    flags: dict[str, str] = {}
    for position, word in enumerate(words):
        if word.startswith("--"):
            assert word in options, f"{container['name']}: {word}"
            if not options[word].is_flag:
                flags[word.removeprefix("--").replace("-", "_")] = words[position + 1]
    if words[0].startswith("--config") and container["name"] not in ("preflight", "download"):
        flags.pop("config")
        load_config(config, {name: value for name, value in flags.items() if "$(" not in value})
