"""The keys that clients have to bring: from the settings, and from a file that may change meanwhile."""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path

import structlog

from moebius.errors import ConfigError

_log = structlog.get_logger(__name__)
_MOST_BYTES = 2**20


class ApiKeys:
    """The accepted keys. A changed file is read again at the next request; one that can not be read, or has
    no key left, keeps the keys before it: a slip while editing locks nobody out and lets nobody in."""

    def __init__(self, api_key: str, path: str) -> None:
        """`api_key` and the lines of the file at `path` are all accepted; empty: none of that kind.

        Raises:
            ConfigError: the file can not be read, has no key, or can be written by anybody.
        """
        self._fixed = (api_key.encode(),) if api_key else ()
        self._path = path
        self._from_file: tuple[bytes, ...] = ()
        self._seen: tuple[int, ...] | None = None
        if path:
            self._seen = _identity(path)
            self._from_file = tuple(key.encode() for key in read_key_file(path))

    @property
    def required(self) -> bool:
        """Whether clients need a key at all."""
        return bool(self._fixed or self._path)

    def accepts(self, key: bytes) -> bool:
        """Whether `key` is one of them; takes as long for a wrong key as for a right one."""
        self._refresh()
        found = False
        for known in (*self._fixed, *self._from_file):
            found |= hmac.compare_digest(key, known)
        return found

    def _refresh(self) -> None:
        if not self._path:
            return
        seen = _identity(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._from_file = tuple(key.encode() for key in read_key_file(self._path))
        except ConfigError as error:
            _log.warning("the keys stay as they were", reason=str(error))
        else:
            _log.info("keys were read again", path=self._path, keys=len(self._from_file))


def read_key_file(path: str) -> list[str]:
    """The keys in a file, one a line; empty lines and those that begin with # do not count.

    Raises ConfigError when it can not be read, has no key, or can be written by anybody; warns when anybody
    can read it.
    """
    file = Path(path).expanduser()
    try:
        mode = file.stat().st_mode
        with file.open(encoding="utf-8") as opened:
            text = opened.read(_MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text in UTF-8"
        raise ConfigError(f"api_key_file: {path} can not be read: {reason}") from None
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"api_key_file: {path} is larger than 1 MiB; allowed: one key a line")
    if mode & stat.S_IWOTH:
        raise ConfigError(f"api_key_file: everybody may write {path}; allowed: only its owner (chmod 600)")
    if mode & stat.S_IROTH:
        _log.warning("everybody on this machine can read the key file", path=path, remedy="chmod 600")
    keys = [line.strip() for line in text.splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file: {path} has no key; allowed: one key a line")
    return keys


def client_key(api_key: str, path: str) -> str:
    """The key a client sends: `api_key`, or the first one in the file at `path`. Raises ConfigError."""
    return api_key or (read_key_file(path)[0] if path else "")


def _identity(path: str) -> tuple[int, ...] | None:
    """What changes when a file is written or replaced; None when there is none."""
    try:
        found = os.stat(Path(path).expanduser())
    except OSError:
        return None
    return (found.st_ino, found.st_dev, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
