"""The file in the user's cache where measurements of this host are kept: a JSON object of lists by name."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moebius.replace_file import replace_file


def read_section(path: Path, name: str) -> list[Any]:
    """Returns the list of that name; empty where there is no file.

    Raises OSError, ValueError for another file.
    """
    try:
        section = _read(path).get(name, [])
    except FileNotFoundError:
        return []
    if not isinstance(section, list):
        raise ValueError(f"{path} is not a file of measurements: {name} is no list")
    return section


def change_section(path: Path, name: str, change: Callable[[], list[Any]]) -> None:
    """Replaces the list of that name by what `change` returns, which is called while others are kept out.

    Processes that write at once wait for one another; a reader finds the old file or the new one. A file that
    is none of ours is replaced. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            document = _read(path)
        except (FileNotFoundError, ValueError):
            document = {}
        document[name] = change()
        replace_file(path, json.dumps(document, indent=1) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path} is not a file of measurements: {error!r}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} is not a file of measurements, but a JSON {type(document).__name__}")
    return document
