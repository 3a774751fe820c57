"""Files of a checkpoint fetched over HTTP(S) and compared with known digests, for Pods that bring no model.

A file is complete once it has its name: until then it is `NAME.part`, which a later attempt continues. Its
digest is that of what lies on the disk, read again after the last byte came. What was compared once is noted
next to the files with size and time, so that a restart does not read 500 GB again.

Pods that share a claim download one after the other: the first holds a lock on a file in the directory,
which the kernel releases when its process ends, however it ends; the next one then finds all of it there, or
goes on. Where the file system has no locks, a process has `.part` files of its own, and the last
rename counts.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx

from moebius.errors import UserError
from moebius.network.web_origins import LOOPBACK_HOSTS
from moebius.replace_file import replace_file, sync

CHUNK = 4 << 20
ATTEMPTS = 5
RETRY_S = 2.0
NOTES = ".moebius-downloaded.json"
# Says which source's files lie there, all of them; Pods that only read wait for it.
COMPLETE = ".moebius-complete.json"
LOCK = ".moebius-download.lock"
LOCK_POLL_S = 1.0
COMPLETE_POLL_S = 2.0
_SHA1_DIGITS = 40
# What file systems without locks answer.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_LINE = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")


def read_checksums(path: Path) -> dict[str, str]:
    """Returns name -> SHA-256 of a file as `sha256sum` writes it. Raises UserError naming the line."""
    found: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--checksums {path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        parts = Path(match[2]).parts if match else ()
        if match is None or ".." in parts or Path(match[2]).is_absolute():
            raise UserError(
                f"--checksums {path}, line {number}: {line.strip()!r} is not allowed; allowed: 64 hex "
                "digits, two spaces and a name below the directory"
            )
        found[match[2]] = match[1]
    if not found:
        raise UserError(f"--checksums {path}: it names no file")
    return found


class Download:
    """One directory's files."""

    def __init__(
        self,
        directory: Path,
        base_url: str,
        token: str = "",
        progress: Callable[[str, int, int], None] = lambda name, done, total: None,
        retry_s: float = RETRY_S,
    ) -> None:
        """`token` goes to the host of `base_url` only, not to where it redirects. Raises UserError."""
        parts = urlsplit(base_url)
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK_HOSTS):
            raise UserError(f"--base-url: {base_url!r} is not allowed; allowed: https://…")
        self._directory, self._base = directory, base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._progress, self._retry_s = progress, retry_s
        # Set while the lock is held.
        self._notes: dict[str, list[object]] = {}
        self._part = ".part"

    def run(self, checksums: Mapping[str, str], waiting: Callable[[], None] = lambda: None) -> int:
        """Fetches what is missing or differs; how many that were. Raises UserError naming the file.

        `waiting` is called once when another process downloads into the directory, which is waited for.
        Digests of 64 hexadecimal digits are SHA-256, those of 40 the SHA-1 by which git names a content.
        """
        fetched = 0
        timeout = httpx.Timeout(30.0, read=120.0)
        with (
            self._locked(waiting),
            httpx.Client(headers=self._headers, follow_redirects=True, timeout=timeout) as client,
        ):
            self._notes = self._read_notes()
            for name, digest in checksums.items():
                if self._is_there(name, digest):
                    continue
                self._fetch(client, name, digest)
                fetched += 1
        return fetched

    @contextmanager
    def _locked(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Holds the directory's lock, or takes names of its own for unfinished files where there are none."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno == errno.EROFS and self._directory.is_dir():
                yield  # all of it may be there
                return
            raise UserError(f"{self._directory}: cannot be written to: {error.strerror}") from None
        try:
            self._part = ".part"
            if not self._has_lock(descriptor, waiting):
                self._part = f".{secrets.token_hex(4)}.part"
            yield
        finally:
            os.close(descriptor)

    def _has_lock(self, descriptor: int, waiting: Callable[[], None]) -> bool:
        """Waits for the lock; False: there are none here."""
        said = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return False
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise UserError(f"{self._directory / LOCK}: {error.strerror}") from None
            if not said:
                waiting()
                said = True
            time.sleep(LOCK_POLL_S)

    def _is_there(self, name: str, digest: str) -> bool:
        path = self._directory / name
        if not path.is_file():
            return False
        status = path.stat()
        note = [digest, status.st_size, status.st_mtime_ns]
        if self._notes.get(name) != note:
            if self._digest(path, name, digest) != digest:
                return False
            self._note(name, digest)
        return True

    def _fetch(self, client: httpx.Client, name: str, digest: str) -> None:
        path = self._directory / name
        part = path.with_name(f"{path.name}{self._part}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # What an earlier attempt left may be wrong: then once more, from the first byte.
            for is_last in (not part.exists(), True):
                self._complete(client, name, part)
                found = self._digest(part, name, digest)
                if found == digest:
                    break
                part.unlink()
                if is_last:
                    kind = "SHA-1 in git" if _is_blob(digest) else "SHA-256"
                    raise UserError(f"{name}: its {kind} is {found}, expected {digest}")
            part.replace(path)
            sync(path.parent)
        except OSError as error:
            raise UserError(f"{name}: cannot be written to {self._directory}: {error.strerror}") from None
        finally:
            if self._part != ".part":
                part.unlink(missing_ok=True)  # a name that no later attempt would look for
        self._note(name, digest)

    def _complete(self, client: httpx.Client, name: str, part: Path) -> None:
        """All of the file is in `part`, on the disk. Raises UserError."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._stream(client, name, part)
                break
            except httpx.HTTPError as error:
                if attempt == ATTEMPTS or _is_final(error):
                    raise UserError(f"{name}: {self._base}/{name}: {_words(error)}") from None
                time.sleep(self._retry_s * attempt)
        sync(part)

    def _stream(self, client: httpx.Client, name: str, part: Path) -> None:
        """Appends what is missing to `part`."""
        begin = part.stat().st_size if part.exists() else 0
        headers = {"Range": f"bytes={begin}-"} if begin else {}
        with client.stream("GET", f"{self._base}/{quote(name)}", headers=headers) as answer:
            if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                return
            answer.raise_for_status()
            if begin and answer.status_code != httpx.codes.PARTIAL_CONTENT:
                begin = 0
            total = begin + int(answer.headers.get("Content-Length", 0))
            with part.open("ab" if begin else "wb") as file:
                done = begin
                for chunk in answer.iter_raw():
                    file.write(chunk)
                    done += len(chunk)
                    self._progress(name, done, total)

    def _digest(self, path: Path, name: str, expected: str) -> str:
        """Returns the digest, of the kind that is expected, of what lies on the disk, as far as the kernel
        can be asked to read it again.
        """
        total = path.stat().st_size
        digest = (
            hashlib.sha1(b"blob %d\0" % total, usedforsecurity=False)
            if _is_blob(expected)
            else hashlib.sha256()
        )
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                self._progress(f"{name}: comparing", file.tell(), total)
        return digest.hexdigest()

    def _note(self, name: str, digest: str) -> None:
        status = (self._directory / name).stat()
        self._notes[name] = [digest, status.st_size, status.st_mtime_ns]
        replace_file(self._directory / NOTES, json.dumps(self._notes), 0o644)

    def _read_notes(self) -> dict[str, list[object]]:
        try:
            found = json.loads((self._directory / NOTES).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _is_blob(digest: str) -> bool:
    """Whether a digest is git's of a blob: SHA-1 of the content after a head that has its length."""
    return len(digest) == _SHA1_DIGITS


def note_incomplete(directory: Path, source: str) -> None:
    """Takes the note of another source back, whose files are about to be replaced: no Pod shall read a part
    of each."""
    if complete_source(directory) not in ("", source):
        (directory / COMPLETE).unlink(missing_ok=True)


def note_complete(directory: Path, source: str) -> None:
    """Notes that all files of `source` lie in the directory. Raises UserError where it cannot be written."""
    try:
        replace_file(directory / COMPLETE, json.dumps({"source": source}), 0o644)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise UserError(f"{directory}: cannot be written to: {error.strerror}") from None


def complete_source(directory: Path) -> str:
    """Returns the source whose files all lie in the directory; empty: of none."""
    try:
        found = json.loads((directory / COMPLETE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(found.get("source", "")) if isinstance(found, dict) else ""


def wait_until_complete(
    directory: Path, source: str, waiting: Callable[[], None], poll_s: float = COMPLETE_POLL_S
) -> None:
    """Returns once all files of `source` lie in the directory; `waiting` is called once before the first
    wait."""
    said = False
    while complete_source(directory) != source:
        if not said:
            waiting()
            said = True
        time.sleep(poll_s)


def _is_final(error: httpx.HTTPError) -> bool:
    """Answers that trying again does not change."""
    if not isinstance(error, httpx.HTTPStatusError):
        return False
    return error.response.status_code < 500 and error.response.status_code not in (408, 429)


def _words(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        hint = "; a token is needed (--token-file)" if status in (401, 403) else ""
        return f"HTTP status {status}{hint}"
    return str(error) or type(error).__name__
