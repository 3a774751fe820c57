"""Responses that are generated in the background: their events, for any process that is asked for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.apis.stored_responses import ResponseStore

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS runs (id TEXT PRIMARY KEY, beat REAL NOT NULL, cancelled INTEGER NOT NULL)",
    """CREATE TABLE IF NOT EXISTS events (
        id TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (id, number)
    ) WITHOUT ROWID""",
)
_LOST_S = 30.0  # without a sign of life the process that generates a response is taken to have ended
_PAGE = 256  # events that are read at once
UNFINISHED = frozenset({"queued", "in_progress"})


@dataclass(frozen=True)
class ResponseEvents:
    """The events of a store's background responses; methods block on the disk and raise sqlite3.Error."""

    store: ResponseStore

    def begin(self, response: dict[str, Any], input_items: bytes) -> bool:
        """Stores a response that will be generated. Returns whether that was possible."""
        if not self.store.put(response, input_items):
            return False
        with self.store.opened(_SCHEMA) as connection:
            key = self.store.key(response["id"])
            connection.execute("INSERT INTO runs VALUES (?, ?, 0)", (key, time.time()))
            connection.execute("DELETE FROM events WHERE id NOT IN (SELECT id FROM responses)")
        return True

    def add(self, response_id: str, first: int, events: Sequence[bytes]) -> bool:
        """Stores events, the first with the number `first`, and notes that the process lives.

        Returns whether the response is to be cancelled, or has been deleted.
        """
        key = self.store.key(response_id)
        rows = [(key, number, data) for number, data in enumerate(events, first)]
        with self.store.opened(_SCHEMA) as connection:
            connection.executemany("INSERT OR REPLACE INTO events VALUES (?, ?, ?)", rows)
            connection.execute("UPDATE runs SET beat = ? WHERE id = ?", (time.time(), key))
            found = connection.execute(
                "SELECT cancelled FROM runs JOIN responses USING (id) WHERE id = ?", (key,)
            ).fetchone()
        return found is None or bool(found[0])

    def end(self, response_id: str) -> None:
        """Notes that no further events come; the events count as part of the response's size."""
        key = self.store.key(response_id)
        with self.store.opened(_SCHEMA) as connection:
            connection.execute("DELETE FROM runs WHERE id = ?", (key,))
            connection.execute(
                "UPDATE responses SET bytes = bytes + (SELECT COALESCE(SUM(LENGTH(data)), 0) FROM events "
                "WHERE events.id = responses.id) WHERE id = ?",
                (key,),
            )

    def after(self, response_id: str, number: int) -> tuple[list[tuple[int, bytes]], bool]:
        """Returns some events behind the one with this number, in order, and whether more may come."""
        key = self.store.key(response_id)
        with self.store.opened(_SCHEMA) as connection:
            # First: what was written between both looks would else be missed.
            running = connection.execute(
                "SELECT 1 FROM runs WHERE id = ? AND beat >= ?", (key, time.time() - _LOST_S)
            ).fetchone()
            found = connection.execute(
                "SELECT number, data FROM events WHERE id = ? AND number > ? ORDER BY number LIMIT ?",
                (key, number, _PAGE),
            ).fetchall()
        return found, running is not None or len(found) == _PAGE

    def cancel(self, response_id: str) -> None:
        """Asks the process that generates the response to end it."""
        with self.store.opened(_SCHEMA) as connection:
            key = self.store.key(response_id)
            connection.execute("UPDATE runs SET cancelled = 1 WHERE id = ?", (key,))

    def is_lost(self, response_id: str) -> bool:
        """Returns whether no process generates a response that is not finished."""
        return not self.after(response_id, 2**62)[1]


def lost(response: dict[str, Any]) -> dict[str, Any]:
    """Returns a response whose process has ended before it was complete."""
    message = "the server ended before the response was complete: send the request again"
    return {**response, "status": "failed", "error": {"code": "server_error", "message": message}}
