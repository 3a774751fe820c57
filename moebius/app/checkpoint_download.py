"""Files of a checkpoint fetched over HTTP(S) and compared with known digests, for Pods without a shared disk.

A file is complete once it has its name: until then it is `NAME.part`, which a later attempt continues. What
was compared once is noted next to the files with size and time, so that a restart does not read 500 GB again.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx

from moebius.errors import UserError

CHUNK = 4 << 20
ATTEMPTS = 5
RETRY_S = 2.0
NOTES = ".moebius-downloaded.json"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def read_checksums(path: Path) -> dict[str, str]:
    """Name -> SHA-256 of a file as `sha256sum` writes it. Raises UserError naming the line."""
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
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
            raise UserError(f"--base-url: {base_url!r} is not allowed; allowed: https://…")
        self._directory, self._base = directory, base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._progress, self._retry_s = progress, retry_s
        self._notes = self._read_notes()

    def run(self, checksums: Mapping[str, str]) -> int:
        """Fetches what is missing or differs; how many that were. Raises UserError naming the file."""
        fetched = 0
        timeout = httpx.Timeout(30.0, read=120.0)
        with httpx.Client(headers=self._headers, follow_redirects=True, timeout=timeout) as client:
            for name, digest in checksums.items():
                if self._is_there(name, digest):
                    continue
                self._fetch(client, name, digest)
                fetched += 1
        return fetched

    def _is_there(self, name: str, digest: str) -> bool:
        path = self._directory / name
        if not path.is_file():
            return False
        status = path.stat()
        note = [digest, status.st_size, status.st_mtime_ns]
        if self._notes.get(name) != note:
            if _digest(path).hexdigest() != digest:
                return False
            self._note(name, digest)
        return True

    def _fetch(self, client: httpx.Client, name: str, digest: str) -> None:
        path = self._directory / name
        part = path.with_name(f"{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    found = self._stream(client, name, part)
                    break
                except httpx.HTTPError as error:
                    if attempt == ATTEMPTS or _is_final(error):
                        raise UserError(f"{name}: {self._base}/{name}: {_words(error)}") from None
                    time.sleep(self._retry_s * attempt)
            if found != digest:
                part.unlink()
                raise UserError(f"{name}: its SHA-256 is {found}, expected {digest}")
            part.replace(path)
        except OSError as error:
            raise UserError(f"{name}: cannot be written to {self._directory}: {error.strerror}") from None
        self._note(name, digest)

    def _stream(self, client: httpx.Client, name: str, part: Path) -> str:
        """Appends what is missing to `part`; the digest of all of it."""
        begin = part.stat().st_size if part.exists() else 0
        headers = {"Range": f"bytes={begin}-"} if begin else {}
        with client.stream("GET", f"{self._base}/{quote(name)}", headers=headers) as answer:
            if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                return _digest(part).hexdigest()
            answer.raise_for_status()
            if begin and answer.status_code != httpx.codes.PARTIAL_CONTENT:
                begin = 0
            digest = _digest(part) if begin else hashlib.sha256()
            total = begin + int(answer.headers.get("Content-Length", 0))
            with part.open("ab" if begin else "wb") as file:
                done = begin
                for chunk in answer.iter_raw():
                    file.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    self._progress(name, done, total)
        return digest.hexdigest()

    def _note(self, name: str, digest: str) -> None:
        status = (self._directory / name).stat()
        self._notes[name] = [digest, status.st_size, status.st_mtime_ns]
        (self._directory / NOTES).write_text(json.dumps(self._notes), encoding="utf-8")

    def _read_notes(self) -> dict[str, list[object]]:
        try:
            found = json.loads((self._directory / NOTES).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _digest(path: Path) -> hashlib._Hash:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest


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
