"""Stores responses that clients may continue: for a while, within bounds, in one file for all processes.

Prompt processes read earlier items in it, gateway processes write: an SQLite file in a directory that all
of them share, so that it does not matter which process a request reaches.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from gateway.schemas.errors import ApiError
from moebius.config import GatewayConfig, MoebiusConfig
from moebius.errors import ConfigError

logger = structlog.get_logger(__name__)

FILE = "responses.sqlite"
_BUSY_S = 5.0
_PREFIX = "moebius-responses-"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    created REAL NOT NULL,
    bytes INTEGER NOT NULL,
    input BLOB NOT NULL,
    response BLOB NOT NULL
)
"""


def trimming(table: str, time: str) -> str:
    """Returns the statement that leaves the newest rows of a table, by a column with their time: parameters
    are the earliest time, and the most bytes and rows of all together.
    """
    return f"""
DELETE FROM {table} WHERE {time} < ? OR id IN (
    SELECT id FROM (
        SELECT id, SUM(bytes) OVER newest AS total, ROW_NUMBER() OVER newest AS place
        FROM {table} WINDOW newest AS (ORDER BY {time} DESC, rowid DESC)
    ) WHERE total > ? OR place > ?
)
"""


_TRIM = trimming("responses", "created")


@dataclass(frozen=True)
class StoreLimits:
    """The store's limits; filled from the configuration."""

    count: int  # responses; 0: none
    size: int  # bytes of all together
    age_s: float


@dataclass(frozen=True)
class StoredResponse:
    """One stored response; filled by `ResponseStore.find`."""

    response: dict[str, Any]  # as it was sent
    input: list[dict[str, Any]]  # all items before its output, those of former responses included

    def items(self) -> list[dict[str, Any]]:
        """Returns the conversation up to the response's end."""
        return [*self.input, *self.response["output"]]


@dataclass(frozen=True)
class ResponseStore:
    """One owner's part of the file, made by `of`; every method opens it again and may be called in any thread
    and process.

    Errors of the file are logged and treated as if nothing were stored: they are no reason to refuse an
    answer.
    """

    directory: str
    limits: StoreLimits
    is_own: bool = False  # the directory is removed by `close`
    owner: str = ""  # as `owner_of` returns it

    def of_owner(self, owner: str) -> ResponseStore:
        """Returns another owner's part of the file; the limits are of all owners together."""
        return replace(self, owner=owner)

    def key(self, stored_id: str) -> str:
        """Returns the key in the file for the id of a response or conversation.

        The owner is a part of it, so that no statement can find what is another owner's.
        """
        return f"{self.owner}/{stored_id}"

    @classmethod
    def of(cls, settings: GatewayConfig) -> ResponseStore:
        """Returns the store in the configured directory or a private one; without room, one that stores none.

        Raises ConfigError when the configured directory cannot be used.
        """
        size = int(settings.stored_responses_mib * 2**20)
        limits = StoreLimits(settings.stored_responses, size, settings.stored_responses_s)
        chosen = settings.stored_responses_dir
        if not limits.count:
            return cls(chosen, limits)
        if chosen:
            check_store(settings)
            return cls(chosen, limits)
        own = _private_directory()
        return cls(own, limits if own else replace(limits, count=0), is_own=bool(own))

    def close(self) -> None:
        """Removes the private directory, if there is one."""
        if self.is_own:
            shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def _path(self) -> Path:
        return Path(self.directory) / FILE

    @property
    def keeps(self) -> bool:
        """Returns whether responses are stored."""
        return self.limits.count > 0

    @contextlib.contextmanager
    def opened(self, further_schema: Sequence[str] = ()) -> Iterator[sqlite3.Connection]:
        """Yields the file in a transaction; `further_schema` makes tables. Raises sqlite3.Error, OSError."""
        connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level="IMMEDIATE")
        try:
            self._path.chmod(0o600)
            connection.execute("PRAGMA synchronous = OFF")  # what a power failure loses is gone anyway
            connection.execute("PRAGMA secure_delete = FAST")
            for statement in (_SCHEMA, *further_schema):
                connection.execute(statement)
            with connection:
                yield connection
        finally:
            connection.close()

    def put(self, response: dict[str, Any], input_items: bytes) -> bool:
        """Stores a response and the items before it (JSON), and drops the oldest that no longer fit.

        Returns whether it is stored; a response larger than the whole store is not.
        """
        data = json.dumps(response, ensure_ascii=False).encode()
        size = len(data) + len(input_items)
        if not self.keeps or size > self.limits.size:
            return False
        now = time.time()
        try:
            with self.opened() as connection:
                row = (self.key(response["id"]), now, size, input_items, data)
                connection.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?)", row)
                bounds = (now - self.limits.age_s, self.limits.size, self.limits.count)
                connection.execute(_TRIM, bounds)
        except (sqlite3.Error, OSError) as error:
            logger.warning("a response could not be stored", reason=str(error))
            return False
        return True

    def find(self, response_id: str) -> StoredResponse | None:
        """Returns the owner's response with this id, or None if it is not stored, or not any more."""
        if not self.keeps or not self._path.exists():
            return None
        try:
            with self.opened() as connection:
                found = connection.execute(
                    "SELECT response, input FROM responses WHERE id = ? AND created >= ?",
                    (self.key(response_id), time.time() - self.limits.age_s),
                ).fetchone()
        except (sqlite3.Error, OSError) as error:
            logger.warning("stored responses cannot be read", reason=str(error))
            return None
        return None if found is None else StoredResponse(json.loads(found[0]), json.loads(found[1]))

    def delete(self, response_id: str) -> bool:
        """Deletes a response. Returns whether it was stored."""
        if not self.keeps or not self._path.exists():
            return False
        try:
            with self.opened() as connection:
                done = connection.execute("DELETE FROM responses WHERE id = ?", (self.key(response_id),))
                return done.rowcount > 0
        except (sqlite3.Error, OSError) as error:
            logger.warning("a stored response cannot be deleted", reason=str(error))
            return False


def check_store(settings: GatewayConfig) -> None:
    """Creates the configured directory if needed. Raises ConfigError when it cannot be written."""
    directory = settings.stored_responses_dir
    if not directory or not settings.stored_responses:
        return
    try:
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"stored_responses_dir: {directory} cannot be used: {error.strerror}; allowed: a directory that "
            "can be written"
        ) from None


def _private_directory() -> str:
    """Returns a new directory that only this user can read, or an empty string if there is no room."""
    try:
        return tempfile.mkdtemp(prefix=_PREFIX)
    except OSError as error:
        logger.warning("no responses are stored", reason=str(error), remedy="--stored-responses-dir")
        return ""


@contextlib.contextmanager
def shared_store(config: MoebiusConfig) -> Iterator[MoebiusConfig]:
    """Yields the settings with a directory for stored responses, which all processes that get them share.

    Raises ConfigError when the configured directory cannot be used.
    """
    store = ResponseStore.of(config.gateway)
    chosen = {"stored_responses_dir": store.directory, "stored_responses": store.limits.count}
    try:
        yield config.model_copy(update={"gateway": config.gateway.model_copy(update=chosen)})
    finally:
        store.close()


def not_found(what: str, response_id: str, param: str, code: str) -> ApiError:
    """Returns a 404 for a response or an item that is not stored, or not any more."""
    return ApiError(
        404,
        f"{what.capitalize()} with id {response_id[:100]!r} not found: it was not stored, or is gone by now",
        param=param,
        code=code,
    )
