"""Records on disk: a directory for each, with a JSON file of facts and files of data beside it.

All processes that share the directory see the same records. A record appears as a whole, by a rename, and
disappears so; what a killed process left half made is found by its lock and removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from moebius.replace_file import replace_file, sync

_FACTS = "facts.json"
_NEW, _GONE = ".new-", ".gone-"
_ID = re.compile(r"[a-z]+[_-][0-9a-f]{40}")
_RANDOM_BYTES = 12


def new_id(prefix: str) -> str:
    """Returns an id that cannot be guessed; ids sort by the time at which they were made."""
    return f"{prefix}{time.time_ns() // 1000:016x}{secrets.token_hex(_RANDOM_BYTES)}"


class Records:
    """The records of one kind, by owner. Methods block on the disk: the event loop calls them in threads."""

    def __init__(self, root: Path, kind: str) -> None:
        """`root`: the shared directory; `kind`: the name of the records' directory below each owner's."""
        self._root = root
        self._kind = kind

    def _place(self, owner: str) -> Path:
        return self._root / "owners" / owner / self._kind

    def path(self, owner: str, record_id: str) -> Path:
        """Returns the record's directory, whether it is there or not."""
        return self._place(owner) / record_id

    @contextlib.contextmanager
    def new(self, owner: str, record_id: str) -> Iterator[Path]:
        """Yields a directory to fill, which becomes the record at the end of the context.

        `write_facts` has to be called for it. After an exception nothing is left. Raises OSError.
        """
        place = self._place(owner)
        make_private(place)
        made = place / f"{_NEW}{record_id}"
        made.mkdir(mode=0o700)
        descriptor = os.open(made, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # until the rename: see `sweep`
            yield made
            os.fsync(descriptor)
            made.rename(place / record_id)
            sync(place)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        finally:
            os.close(descriptor)

    def facts(self, owner: str, record_id: str) -> dict[str, Any] | None:
        """Returns the record's facts, or None if this owner has no such record. Raises OSError."""
        if _ID.fullmatch(record_id) is None:  # a path into another directory
            return None
        try:
            facts: dict[str, Any] = json.loads((self.path(owner, record_id) / _FACTS).read_bytes())
        except FileNotFoundError:
            return None
        return facts

    def ids(self, owner: str) -> list[str]:
        """Returns the ids of an owner's records, oldest first."""
        try:
            found = os.listdir(self._place(owner))
        except FileNotFoundError:
            return []
        return sorted(name for name in found if _ID.fullmatch(name))

    def owners(self) -> list[str]:
        """Returns the names of all owners."""
        try:
            return os.listdir(self._root / "owners")
        except FileNotFoundError:
            return []

    def delete(self, owner: str, record_id: str) -> bool:
        """Deletes a record. Returns whether it was there."""
        if _ID.fullmatch(record_id) is None:
            return False
        gone = self._place(owner) / f"{_GONE}{record_id}"
        try:
            self.path(owner, record_id).rename(gone)
        except FileNotFoundError:
            return False
        shutil.rmtree(gone, ignore_errors=True)
        return True

    def sweep(self) -> None:
        """Removes what killed processes have left half made or half deleted."""
        for owner in self.owners():
            with contextlib.suppress(FileNotFoundError):
                for entry in os.scandir(self._place(owner)):
                    if entry.name.startswith(_GONE) or (
                        entry.name.startswith(_NEW) and _is_abandoned(entry.path)
                    ):
                        shutil.rmtree(entry.path, ignore_errors=True)


def make_private(path: Path) -> None:
    """Creates a directory, and those above it that are missing, for this user alone. Raises OSError."""
    missing = list(takewhile(lambda place: not place.exists(), (path, *path.parents)))
    for place in reversed(missing):  # `parents=True` would let others list those above
        place.mkdir(mode=0o700, exist_ok=True)


def write_facts(directory: Path, facts: dict[str, Any]) -> None:
    """Writes or replaces a record's facts, durably. Raises OSError."""
    replace_file(directory / _FACTS, json.dumps(facts, ensure_ascii=False))


def _is_abandoned(path: str) -> bool:
    """Returns whether no process fills the directory; one that was made just now has no lock yet."""
    try:
        if time.time() - os.stat(path).st_mtime < 60:
            return False
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
