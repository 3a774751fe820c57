"""Puts other contents in the place of a model's files, as who updates it under a running server does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def put(file: Path, content: str | bytes) -> None:
    """Writes a new file of that name, so that half of it is never read."""
    made = file.with_name(f"{file.name}.made")
    made.write_bytes(content.encode() if isinstance(content, str) else content)
    made.replace(file)


def swap_tokens(file: Path) -> None:
    """A vocabulary of the same size and pieces, in which they have one another's ids."""
    described = json.loads(file.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = described["model"]["vocab"]
    added = {token["content"] for token in described["added_tokens"]}
    pieces = [piece for piece in vocabulary if piece not in added]
    numbers = [vocabulary[piece] for piece in pieces]
    vocabulary.update(zip(pieces, numbers[1:] + numbers[:1], strict=True))
    put(file, json.dumps(described))


def edit_json(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Changes the object that is in the file."""
    content = json.loads(file.read_text(encoding="utf-8"))
    edit(content)
    put(file, json.dumps(content))
