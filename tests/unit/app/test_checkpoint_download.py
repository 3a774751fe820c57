"""Guards `moebius models download`: broken fetches go on, digests are compared, tokens stay at their host."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.checkpoint_download import Download, read_checksums
from moebius.errors import UserError
from tests.helpers.http_server import LocalServer, QuietHandler, serving

CONTENT = bytes(range(256)) * 4096
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Hub(LocalServer):
    """Serves CONTENT as every file; `breaks`: how many answers end after half of what is left."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.breaks = 0
        self.status = 200
        self.redirect = ""
        # Answers stop behind the first 64 KiB until it is set.
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.seen: list[tuple[str, str, str]] = []

    @property
    def model_url(self) -> str:
        return f"{self.url}/org/model"


class _Handler(QuietHandler):
    server: Any
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        hub: Hub = self.server
        ranged = self.headers.get("Range", "")
        hub.seen.append((self.path, ranged, self.headers.get("Authorization", "")))
        if hub.redirect:
            self.send_response(302)
            self.send_header("Location", hub.redirect + self.path)
            self.end_headers()
            return
        begin = int(ranged.removeprefix("bytes=").removesuffix("-")) if ranged else 0
        body = CONTENT[begin:]
        self.begin(hub.status if hub.status != 200 else 206 if ranged else 200, len(body))
        if hub.breaks:
            hub.breaks -= 1
            body = body[: len(body) // 2]
        try:
            for begin in range(0, len(body), 2**16):
                self.wfile.write(body[begin : begin + 2**16])
                self.wfile.flush()
                hub.goes_on.wait(60)
        except OSError:
            return  # the client was killed


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    with serving(server):
        yield server


def download(hub: Hub, directory: Path, **files: str) -> int:
    wanted = {name.replace("_", "."): digest for name, digest in files.items()}
    return Download(directory, hub.model_url, "secret", retry_s=0.01).run(wanted)


def test_a_broken_fetch_goes_on(hub: Hub, tmp_path: Path) -> None:
    """The fetch goes on from where it broke off, twice; the file has its name only when its digest
    is right.
    """
    hub.breaks = 2
    assert download(hub, tmp_path, config_json=DIGEST) == 1
    assert (tmp_path / "config.json").read_bytes() == CONTENT
    begins = [ranged for _, ranged, _ in hub.seen]
    assert begins == ["", f"bytes={len(CONTENT) // 2}-", f"bytes={len(CONTENT) * 3 // 4}-"]
    assert download(hub, tmp_path, config_json=DIGEST) == 0
    assert len(hub.seen) == 3


def test_a_changed_file_is_fetched_again_and_a_wrong_one_refused(hub: Hub, tmp_path: Path) -> None:
    """Neither a name nor an old note is believed; nothing wrong is left under the name."""
    download(hub, tmp_path, a_bin=DIGEST)
    (tmp_path / "a.bin").write_bytes(CONTENT[:-1])
    assert download(hub, tmp_path, a_bin=DIGEST) == 1
    with pytest.raises(UserError, match=f"b.bin: its SHA-256 is {DIGEST}, expected {'0' * 64}"):
        download(hub, tmp_path, b_bin="0" * 64)
    assert {path.name for path in tmp_path.iterdir() if "download" not in path.name} == {"a.bin"}


class Spoilt(Download):
    """A disk that keeps other bytes than those that came."""

    spoils = 1

    def _stream(self, client: Any, name: str, part: Path) -> None:
        super()._stream(client, name, part)
        if self.spoils:
            self.spoils -= 1
            with part.open("r+b") as file:
                file.seek(5)
                file.write(b"!")


def test_what_lies_on_the_disk_is_compared(hub: Hub, tmp_path: Path) -> None:
    """The digest of the bytes that came would be right here. Nothing is left, so that the next
    try is whole."""
    with pytest.raises(UserError, match=r"a.bin: its SHA-256 is \w+, expected"):
        Spoilt(tmp_path, hub.model_url).run({"a.bin": DIGEST})
    assert not list(tmp_path.glob("a.bin*"))
    assert download(hub, tmp_path, a_bin=DIGEST) == 1


def test_a_wrong_beginning_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    """What an earlier attempt left is continued, and given up when the whole is then another file."""
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    assert download(hub, tmp_path, a_bin=DIGEST) == 1
    assert [ranged for _, ranged, _ in hub.seen] == ["bytes=1000-", ""]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def start(hub: Hub, directory: Path, sums: Path) -> subprocess.Popen[str]:
    """`moebius models download` as in a Pod."""
    command = [sys.executable, "-m", "moebius", "models", "download", str(directory)]
    command += ["--base-url", hub.model_url, "--checksums", str(sums)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("is_killed", [False, True], ids=["both end", "one is killed"])
def test_two_pods_share_a_claim(hub: Hub, tmp_path: Path, is_killed: bool) -> None:
    """One downloads, the other waits, and goes on where a killed one stopped; each file is whole and is
    fetched once."""
    hub.goes_on.clear()
    directory, sums = tmp_path / "claim", tmp_path / "sums"
    sums.write_text(f"{DIGEST}  a.bin\n{DIGEST}  b.bin\n")
    first = start(hub, directory, sums)
    part, end = directory / "a.bin.part", time.monotonic() + 60
    while not part.exists() or part.stat().st_size == 0:
        assert time.monotonic() < end
        time.sleep(0.02)
    second = start(hub, directory, sums)
    assert second.stderr is not None
    while "another process downloads there" not in (line := second.stderr.readline()):
        assert line
    if is_killed:
        first.kill()
        first.wait()
    hub.goes_on.set()
    outputs = [process.communicate(timeout=100)[0] for process in (first, second)]
    assert first.returncode == (-9 if is_killed else 0)
    assert second.returncode == 0
    fetched = (None, 2) if is_killed else (2, 0)
    for output, count in zip(outputs, fetched, strict=True):
        assert count is None or f"2 files, {count} of them fetched now" in output
    for name in ("a.bin", "b.bin"):
        assert (directory / name).read_bytes() == CONTENT
    paths = [path for path, *_ in hub.seen]
    assert paths == ["/org/model/a.bin"] * (1 + is_killed) + ["/org/model/b.bin"]
    assert hub.seen[1][1].startswith("bytes=") == is_killed
    assert not list(directory.glob("*.part"))


def test_without_locks_each_has_files_of_its_own(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What two fetch at once is whole also where the file system refuses locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    hub.goes_on.clear()
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda: counts.append(download(hub, tmp_path, a_bin=DIGEST)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    while len(hub.seen) < 2:
        time.sleep(0.01)
    hub.goes_on.set()
    for thread in threads:
        thread.join()
    assert counts == [1, 1]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert not list(tmp_path.glob("*.part"))


def test_the_token_stays_with_its_host(hub: Hub, tmp_path: Path) -> None:
    """Hubs redirect to stores that are not to see it."""
    store = Hub()
    threading.Thread(target=store.serve_forever, daemon=True).start()
    hub.redirect = f"http://localhost:{store.server_port}"
    download(hub, tmp_path, a_bin=DIGEST)
    store.shutdown()
    store.server_close()
    assert hub.seen[0][2] == "Bearer secret"
    assert store.seen[0][2] == ""


def test_refusals_are_said_at_once(hub: Hub, tmp_path: Path) -> None:
    """A wrong token is not tried five times; plain HTTP over a network is refused."""
    hub.status = 403
    with pytest.raises(UserError, match=r"a.bin: .*HTTP status 403; a token is needed"):
        download(hub, tmp_path, a_bin=DIGEST)
    assert len(hub.seen) == 1
    with pytest.raises(UserError, match=r"'http://hub/x' is not allowed; allowed: https"):
        Download(tmp_path, "http://hub/x")


def test_lists_of_digests_are_read_strictly(tmp_path: Path) -> None:
    """Lists have the form of sha256sum; names stay below the directory."""
    path = tmp_path / "sums"
    path.write_text(f"{DIGEST}  config.json\n{DIGEST} *sub/a b.bin\n")
    assert read_checksums(path) == {"config.json": DIGEST, "sub/a b.bin": DIGEST}
    for wrong in (f"{DIGEST}  ../x", f"{DIGEST}  /etc/x", "abc  x", ""):
        path.write_text(wrong + "\n")
        with pytest.raises(UserError, match=r"line 1|names no file"):
            read_checksums(path)
