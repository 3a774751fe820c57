"""Contexts of llama-server's slots, which clients save, restore and erase by name.

A context is the tokens that the last completion of a slot read and wrote. What was computed of them is in the
engine's prefix cache and its tiers, so a file has tokens alone, as JSON: restoring one lets the engine fetch
or compute the rest. Each API key has a directory of its own, with files of slots beside those with names.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gateway.apis.formats import Output, Usage
from gateway.apis.native import LlamaFormat
from gateway.parsers.events import ParsedDelta
from gateway.schemas.errors import ApiError, bad_request
from moebius.replace_file import replace_file

# No beginning with a dot, which files of slots have.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_MOST_FILES = 1024


class SavedSlots:
    """The contexts of one client. Calls block; those that write raise OSError."""

    def __init__(self, directory: Path, owner: str, model: str) -> None:
        """`owner`: whose the files are; `model`: of what the tokens are, with any other they are refused."""
        self._directory, self._model = directory / owner, model

    def note(self, slot: int, token_ids: Sequence[int]) -> None:
        """A slot's context is these tokens from now on."""
        self._write(self._of_slot(slot), token_ids)

    def save(self, slot: int, name: str) -> tuple[int, int]:
        """Writes a slot's context to a file; returns its tokens and bytes. Raises ApiError."""
        path = self._named(name)
        token_ids = self._read(self._of_slot(slot))
        if token_ids is None:
            raise bad_request(f"slot {slot} has no context: no /completion has used it", "id_slot")
        if not path.exists() and sum(1 for _ in self._directory.glob("[!.]*")) >= _MOST_FILES:
            raise bad_request(f"{_MOST_FILES} contexts are saved already, which is the most", "filename")
        return len(token_ids), self._write(path, token_ids)

    def load(self, name: str) -> tuple[list[int], int]:
        """Returns the tokens of a file, and its bytes. Raises ApiError."""
        path = self._named(name)
        token_ids = self._read(path)
        if token_ids is None:
            raise bad_request(f"no context is saved as {name!r} of the served model", "filename")
        return token_ids, path.stat().st_size

    def erase(self, slot: int) -> int:
        """Forgets a slot's context; returns its tokens."""
        token_ids = self._read(self._of_slot(slot))
        self._of_slot(slot).unlink(missing_ok=True)
        return len(token_ids or ())

    def _of_slot(self, slot: int) -> Path:
        return self._directory / f".slot-{slot}"

    def _named(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise bad_request(
                "'filename' is not allowed; allowed: 1 to 128 letters, digits, '.', '_', '-'; no '.' first",
                "filename",
            )
        return self._directory / name

    def _write(self, path: Path, token_ids: Sequence[int]) -> int:
        text = json.dumps({"model": self._model, "tokens": list(token_ids)})
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, text)
        return len(text)

    def _read(self, path: Path) -> list[int] | None:
        """None: there is no such file, or it is of something else."""
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(found, dict) or found.get("model") != self._model:
            return None
        token_ids = found.get("tokens")
        is_whole = isinstance(token_ids, list) and all(type(token) is int for token in token_ids)
        return token_ids if is_whole else None


class SlotFormat(LlamaFormat):
    """llama-server's answer to one prompt, whose tokens become a slot's context once it is complete."""

    def keep_in(self, slots: SavedSlots, slot: int, prompt_ids: Sequence[int]) -> None:
        """Says where the context goes; called before anything else."""
        self._slots, self._slot = slots, slot
        self._token_ids = list(prompt_ids)

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any] | list[dict[str, Any]]:
        self._token_ids += outputs[0].token_ids
        return super().whole(outputs, usage)

    def stream_delta(self, delta: ParsedDelta, usage: Callable[[], Usage]) -> bytes:
        self._token_ids += delta.token_ids
        return super().stream_delta(delta, usage)

    async def settle(self) -> None:
        try:
            await asyncio.to_thread(self._slots.note, self._slot, self._token_ids)
        except OSError as error:
            raise unusable(error) from None


def unusable(error: OSError) -> ApiError:
    """Returns the failure of a directory that contexts cannot be written to or read from."""
    return ApiError(500, f"slot_save_path: {error.strerror or error}", code="slots_unavailable")
