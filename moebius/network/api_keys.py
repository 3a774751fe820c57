"""The keys that clients have to bring: from the settings, and from a file that may change meanwhile.

A line of the file is a key itself, or what `moebius keys add` writes: the hash of one, its name and limits,

    sha256:SALT:DIGEST name=alice requests_per_minute=60

The hash is one salted SHA-256. Keys that are made here are 256 random bits, which cannot be found by
trying, however cheap a trial is; a slow hash (scrypt, argon2) would only let a sender of wrong keys keep the
gateway busy. The salt hides that two files hold the same key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from moebius.errors import ConfigError
from moebius.replace_file import replace_file

_log = structlog.get_logger(__name__)
_MOST_BYTES = 2**20
_SCHEME = "sha256"
_SALT_BYTES = 16
KEY_PREFIX = "sk-moebius-"


@dataclass(frozen=True)
class KeyLimits:
    """What one key may do; None: any amount."""

    requests_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and outputs

    def or_else(self, other: KeyLimits) -> KeyLimits:
        """Returns these limits, with those of `other` where none is set."""
        mine = {name: value for name, value in vars(self).items() if value is not None}
        return KeyLimits(**{**vars(other), **mine})


LIMIT_NAMES = tuple(KeyLimits.__dataclass_fields__)


@dataclass(frozen=True)
class ApiKey:
    """One accepted key; filled by `read_keys`."""

    name: str  # for logs and metrics: of a key without one, where it stands
    limits: KeyLimits
    # The key itself, or the digest of salt and key.
    secret: bytes
    salt: bytes | None = None  # None: `secret` is the key itself

    @property
    def digest(self) -> bytes:
        """32 bytes that identify the key without containing it; a new secret of the same name has others."""
        return hashlib.sha256((self.salt or b"") + self.secret).digest()

    def matches(self, key: bytes) -> bool:
        """Takes as long for a wrong key as for a right one."""
        found = key if self.salt is None else hashlib.sha256(self.salt + key).digest()
        return hmac.compare_digest(found, self.secret)


class ApiKeys:
    """The accepted keys. A changed file is read again at the next request; one that cannot be read, or has
    no key left, keeps the keys before it: a slip while editing locks no client out and lets none in."""

    def __init__(self, api_key: str, path: str) -> None:
        """`api_key` and the lines of the file at `path` are all accepted; empty: none of that kind.

        Raises:
            ConfigError: the file cannot be read, has no key, or can be written by anybody.
        """
        self._fixed = (ApiKey("api_key", KeyLimits(), api_key.encode()),) if api_key else ()
        self._path = path
        self.required = bool(api_key or path)  # whether clients need a key at all
        self._from_file: tuple[ApiKey, ...] = ()
        self._seen: tuple[int, ...] | None = None
        # Digests of keys that were accepted: they need not be compared with all others again.
        self._known: dict[bytes, ApiKey] = {}
        if path:
            self._seen = _identity(path)
            self._from_file = read_keys(path)

    @property
    def names(self) -> frozenset[str]:
        """The names of all keys."""
        return frozenset(one.name for one in (*self._fixed, *self._from_file))

    def named(self, name: str) -> ApiKey | None:
        """Returns the key with this name; None: there is none, or not any more."""
        self._refresh()
        return next((one for one in (*self._fixed, *self._from_file) if one.name == name), None)

    def find(self, key: bytes) -> ApiKey | None:
        """Returns the key that this is; None: it is none. Takes as long for any wrong key."""
        self._refresh()
        digest = hashlib.sha256(key).digest()
        found = self._known.get(digest)
        if found is None:
            for known in (*self._fixed, *self._from_file):
                if known.matches(key) and found is None:
                    found = known
            if found is not None:
                self._known[digest] = found
        return found

    def accepts(self, key: bytes) -> bool:
        """Returns whether `key` is one of them."""
        return self.find(key) is not None

    def _refresh(self) -> None:
        if not self._path:
            return
        seen = _identity(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._from_file = read_keys(self._path)
        except ConfigError as error:
            _log.warning("the keys stay as they were", reason=str(error))
        else:
            self._known.clear()
            _log.info("keys were read again", path=self._path, keys=len(self._from_file))


def read_keys(path: str) -> tuple[ApiKey, ...]:
    """Returns the keys in a file, one a line; empty lines and those that begin with # do not count.

    Raises ConfigError when it cannot be read, has no key, can be written by anybody, or a hashed line is
    wrong; warns when anybody can read it.
    """
    keys = [_parsed(path, number, line) for number, line in _lines(path)]
    names = [key.name for key in keys]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise ConfigError(
            f"api_key_file: {path} has two keys with the name {doubled!r}; allowed: one of each"
        )
    return tuple(keys)


def _lines(path: str) -> list[tuple[int, str]]:
    """Returns the lines that count, with their numbers."""
    file = Path(path).expanduser()
    try:
        mode = file.stat().st_mode
        with file.open(encoding="utf-8") as opened:
            text = opened.read(_MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text in UTF-8"
        raise ConfigError(f"api_key_file: {path} cannot be read: {reason}") from None
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"api_key_file: {path} is larger than 1 MiB; allowed: one key a line")
    if mode & stat.S_IWOTH:
        raise ConfigError(f"api_key_file: everybody may write {path}; allowed: only its owner (chmod 600)")
    if mode & stat.S_IROTH:
        _log.warning("everybody on this machine can read the key file", path=path, remedy="chmod 600")
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not lines:
        raise ConfigError(f"api_key_file: {path} has no key; allowed: one key a line")
    return lines


def _parsed(path: str, number: int, line: str) -> ApiKey:
    """Returns one line. Raises ConfigError naming it."""
    if not line.startswith(f"{_SCHEME}:"):
        return ApiKey(f"line-{number}", KeyLimits(), line.encode())
    where = f"api_key_file: {path}, line {number}"
    hashed, *words = line.split()
    try:
        _, salt, digest = hashed.split(":")
        secret, salted = bytes.fromhex(digest), bytes.fromhex(salt)
        if len(secret) != hashlib.sha256().digest_size:
            raise ValueError(digest)
    except ValueError:
        raise ConfigError(f"{where}: allowed: {_SCHEME}:SALT:DIGEST in hex, by `moebius keys add`") from None
    name, limits = f"line-{number}", dict[str, int]()
    for word in words:
        key, _, value = word.partition("=")
        if key == "name" and value:
            name = value
        elif key in LIMIT_NAMES and value.isdecimal() and int(value) > 0:
            limits[key] = int(value)
        else:
            allowed = f"name=TEXT, {', '.join(f'{one}=NUMBER' for one in LIMIT_NAMES)}"
            raise ConfigError(f"{where}: {word!r} is not allowed; allowed: {allowed}")
    return ApiKey(name, KeyLimits(**limits), secret, salted)


def client_key(api_key: str, path: str) -> str:
    """The key a client sends: `api_key`, or the first one in the file at `path`. Raises ConfigError."""
    if api_key or not path:
        return api_key
    plain = next((key for key in read_keys(path) if key.salt is None), None)
    if plain is None:
        raise ConfigError(f"api_key_file: {path} has hashes of keys only; a client needs a key itself")
    return plain.secret.decode()


def add_key(path: str, name: str, limits: KeyLimits) -> str:
    """Adds a new key to a file, which is made if it is not there; returns the key, which the file has not.

    Raises ConfigError when the name is taken or not allowed, or the file is wrong.
    """
    if not name or any(letter.isspace() or letter == "=" for letter in name):
        raise ConfigError(f"--name: {name!r} is not allowed; allowed: a text without spaces or =")
    file = Path(path).expanduser()
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    known = read_keys(path) if before.strip() and any(_counts(line) for line in before.splitlines()) else ()
    if any(one.name == name for one in known):
        raise ConfigError(f"--name: {path} has a key with the name {name!r}; allowed: one of each")
    key, salt = KEY_PREFIX + secrets.token_urlsafe(32), secrets.token_bytes(_SALT_BYTES)
    words = [f"{_SCHEME}:{salt.hex()}:{hashlib.sha256(salt + key.encode()).hexdigest()}", f"name={name}"]
    words += [f"{limit}={value}" for limit, value in vars(limits).items() if value is not None]
    _replace(file, [*before.splitlines(), " ".join(words)])
    return key


def revoke_key(path: str, name: str) -> None:
    """Takes a key out of a file. Raises ConfigError when it is not there, or is the last one."""
    keys = read_keys(path)
    if name not in [key.name for key in keys]:
        names = ", ".join(key.name for key in keys)
        raise ConfigError(f"{path} has no key with the name {name!r}; there are {names}")
    if len(keys) == 1:
        raise ConfigError(
            f"{name!r} is the last key of {path}, without which it is ignored: add another first"
        )
    file = Path(path).expanduser()
    lines = file.read_text(encoding="utf-8").splitlines()
    kept = [
        line
        for number, line in enumerate(lines, 1)
        if not _counts(line) or _parsed(path, number, line.strip()).name != name
    ]
    _replace(file, kept)


def _counts(line: str) -> bool:
    return bool(line.strip()) and not line.strip().startswith("#")


def _replace(file: Path, lines: Sequence[str]) -> None:
    """Replaces the file at once, so that a gateway never reads half of it.

    Owner and mode stay: a gateway that may not read the new file would go on with the keys of the old one. A
    file that is new is its maker's alone.
    """
    file = file.resolve()
    try:
        before = file.stat() if file.exists() else None
        replace_file(file, "".join(f"{line}\n" for line in lines), like=before)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None


def _identity(path: str) -> tuple[int, ...] | None:
    """Returns what changes when a file is written or replaced; None when there is none."""
    try:
        found = os.stat(Path(path).expanduser())
    except OSError:
        return None
    return (found.st_ino, found.st_dev, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
