"""A stand-in for the Hugging Face hub: lists a repository's files and serves them, with ranges."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

from tests.helpers.http_server import LocalServer, QuietHandler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(LocalServer):
    """Serves `repositories` (id -> name -> bytes) at `url`, and counts what was sent of each file."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        super().__init__(_Handler)
        self.repositories = repositories
        self.sent: dict[str, int] = {}
        # How many bytes of a file are sent before the connection ends.
        self.breaks_after: dict[str, int] = {}
        self.token = ""
        self.gated = False


class _Handler(QuietHandler):
    server: HubServer

    def do_HEAD(self) -> None:
        """What is known of a file."""
        self._file(with_body=False)

    def do_GET(self) -> None:
        """The list of files, or one."""
        path = unquote(urlsplit(self.path).path)
        if not path.startswith("/api/models/"):
            self._file(with_body=True)
            return
        name, kind, revision = re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/(.*))?", path).groups("")
        files = self._repository(name)
        if files is None:
            return
        if kind == "tree":
            entries = [{"type": "file", "path": n, "size": len(d), "oid": "b"} for n, d in files.items()]
            self._answer(200, json.dumps(entries).encode(), {})
            return
        if revision not in ("", "main", COMMIT):
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [_sibling(file, data) for file, data in files.items()]
        document = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}
        self._answer(200, json.dumps(document).encode(), {})

    def _repository(self, name: str) -> dict[str, bytes] | None:
        """The files, or None and an error was sent."""
        if self.server.gated or (
            self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}"
        ):
            code = "GatedRepo" if self.server.gated else "RepoNotFound"
            self._answer(403 if self.server.gated else 401, b"{}", {"X-Error-Code": code})
            return None
        if name not in self.server.repositories:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return None
        return self.server.repositories[name]

    def _file(self, with_body: bool) -> None:
        repository, _, rest = unquote(urlsplit(self.path).path)[1:].partition("/resolve/")
        files = self._repository(repository)
        if files is None:
            return
        name = rest.partition("/")[2]
        data = files.get(name)
        if data is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        asked = self.headers.get("Range")
        first, _, last = (asked or "bytes=0-")[6:].partition("-")
        begin, end = int(first or 0), min(len(data), int(last) + 1 if last else len(data))
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        is_part = (begin, end) != (0, len(data))
        if is_part:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        body = data[begin:end]
        limit = self.server.breaks_after.pop(name, None) if with_body else None
        if with_body:
            self.server.sent[name] = self.server.sent.get(name, 0) + len(body[:limit])
        self._answer(206 if is_part else 200, body, headers, with_body, limit)

    def _answer(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str],
        with_body: bool = True,
        limit: int | None = None,
    ) -> None:
        self.begin(status, len(body), headers)
        if with_body:
            with contextlib.suppress(OSError):
                self.wfile.write(body[:limit])
        self.close_connection = limit is not None


def _sibling(name: str, data: bytes) -> dict[str, object]:
    """What the hub lists of a file: weights are in LFS, all others in git."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    found: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": blob}
    if name.endswith((".safetensors", ".gguf")):
        found["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return found


@contextlib.contextmanager
def hub_server(repositories: dict[str, dict[str, bytes]]) -> Iterator[HubServer]:
    """A running stand-in."""
    server = HubServer(repositories)
    with serving(server):
        yield server
