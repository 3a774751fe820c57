"""Conversations: lists of items that responses go on from and add to, in the file of stored responses."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.apis.stored_responses import ResponseStore, not_found, trimming
from gateway.schemas.errors import ApiError

_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS conversations (
        id TEXT PRIMARY KEY, created INTEGER NOT NULL, used REAL NOT NULL, bytes INTEGER NOT NULL,
        metadata TEXT NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS conversation_items (
        place INTEGER PRIMARY KEY AUTOINCREMENT, conversation TEXT NOT NULL, id TEXT NOT NULL,
        data TEXT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS items_by_conversation ON conversation_items (conversation, place)",
)
# The conversations used last that fit are kept.
_TRIM = trimming("conversations", "used")
_TRIM_ITEMS = "DELETE FROM conversation_items WHERE conversation NOT IN (SELECT id FROM conversations)"
MOST_ITEMS = 20  # that a request may add


@dataclass(frozen=True)
class Conversations:
    """The conversations of a store's owner, within its limits by themselves; methods block on the disk.

    Methods raise ApiError 404 for a conversation that is not there, or not any more, and 503 when the file
    cannot be used: unlike a response that could not be stored, a conversation is what was asked for.
    """

    store: ResponseStore

    def create(self, items: Sequence[dict[str, Any]], metadata: dict[str, str]) -> dict[str, Any]:
        """Makes a conversation of these items. Returns it as clients see it."""
        conversation_id, now = f"conv_{uuid.uuid4().hex}", time.time()
        with self._opened() as connection:
            row = (self.store.key(conversation_id), int(now), now, 0, json.dumps(metadata))
            connection.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?)", row)
            self._add(connection, conversation_id, items)
        return _shown(conversation_id, int(now), metadata)

    def find(self, conversation_id: str) -> dict[str, Any]:
        """Returns a conversation as clients see it, without its items."""
        with self._opened() as connection:
            created, metadata = self._row(connection, conversation_id)
        return _shown(conversation_id, created, json.loads(metadata))

    def update(self, conversation_id: str, metadata: dict[str, str]) -> dict[str, Any]:
        """Replaces what is noted of a conversation."""
        with self._opened() as connection:
            created, _ = self._row(connection, conversation_id)
            values = (json.dumps(metadata), self.store.key(conversation_id))
            connection.execute("UPDATE conversations SET metadata = ? WHERE id = ?", values)
        return _shown(conversation_id, created, metadata)

    def delete(self, conversation_id: str) -> None:
        """Deletes a conversation with its items."""
        with self._opened() as connection:
            self._row(connection, conversation_id)
            key = self.store.key(conversation_id)
            connection.execute("DELETE FROM conversations WHERE id = ?", (key,))
            connection.execute(_TRIM_ITEMS)

    def items(self, conversation_id: str) -> list[dict[str, Any]]:
        """Returns all items, oldest first."""
        with self._opened() as connection:
            self._row(connection, conversation_id)
            rows = connection.execute(
                "SELECT data FROM conversation_items WHERE conversation = ? ORDER BY place",
                (self.store.key(conversation_id),),
            ).fetchall()
        return [json.loads(data) for (data,) in rows]

    def append(self, conversation_id: str, items: Sequence[dict[str, Any]]) -> None:
        """Adds items at the end."""
        with self._opened() as connection:
            self._row(connection, conversation_id)
            self._add(connection, conversation_id, items)

    def delete_item(self, conversation_id: str, item_id: str) -> None:
        """Deletes one item."""
        with self._opened() as connection:
            self._row(connection, conversation_id)
            done = connection.execute(
                "DELETE FROM conversation_items WHERE conversation = ? AND id = ?",
                (self.store.key(conversation_id), item_id),
            )
            if not done.rowcount:
                raise no_item(item_id)

    def _add(
        self, connection: sqlite3.Connection, conversation_id: str, items: Sequence[dict[str, Any]]
    ) -> None:
        key = self.store.key(conversation_id)
        rows = [(key, item["id"], json.dumps(item, ensure_ascii=False)) for item in items]
        connection.executemany(
            "INSERT INTO conversation_items (conversation, id, data) VALUES (?, ?, ?)", rows
        )
        size, now = sum(len(data.encode()) for _, _, data in rows), time.time()
        changed = "UPDATE conversations SET used = ?, bytes = bytes + ? WHERE id = ?"
        connection.execute(changed, (now, size, key))
        limits = self.store.limits
        connection.execute(_TRIM, (now - limits.age_s, limits.size, limits.count))
        connection.execute(_TRIM_ITEMS)

    def _row(self, connection: sqlite3.Connection, conversation_id: str) -> tuple[int, str]:
        oldest = time.time() - self.store.limits.age_s
        found: tuple[int, str] | None = connection.execute(
            "SELECT created, metadata FROM conversations WHERE id = ? AND used >= ?",
            (self.store.key(conversation_id), oldest),
        ).fetchone()
        if found is None:
            raise not_found("conversation", conversation_id, "conversation", "conversation_not_found")
        return found

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        if not self.store.keeps:
            raise ApiError(
                404,
                "this server keeps no conversations (stored_responses is 0)",
                param="conversation",
                code="conversation_not_found",
            )
        try:
            with self.store.opened(_SCHEMA) as connection:
                yield connection
        except (sqlite3.Error, OSError) as error:
            message = f"conversations cannot be stored or read at the moment: {error}"
            raise ApiError(503, message, code="storage_unavailable", retry_after_s=2) from error


def no_item(item_id: str) -> ApiError:
    """Returns the 404 for an item that a conversation does not have."""
    return not_found("item", item_id, "item_id", "item_not_found")


def _shown(conversation_id: str, created: int, metadata: dict[str, str]) -> dict[str, Any]:
    return {"id": conversation_id, "object": "conversation", "created_at": created, "metadata": metadata}
