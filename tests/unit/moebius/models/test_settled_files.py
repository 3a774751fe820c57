"""Invariant: a digest is made once of a file that stays as it is, and again of any that may have changed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from moebius.checkpoint.index import CheckpointIndex
from moebius.models import identity
from moebius.models.checkpoint import open_index
from moebius.models.identity import weight_parts
from moebius.models.settled_files import SettledFiles
from tests.helpers.checkpoints import TinyMoe


class Reader:
    """Reads a file through `SettledFiles`, and counts how often its contents were."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0
        self.files = SettledFiles()

    def read(self, asked: str = "") -> str:
        """Returns the contents, or what they were."""

        def contents() -> str:
            self.count += 1
            return self.path.read_text()

        with self.path.open() as stream:
            return self.files.digest(str(self.path), stream.fileno(), asked, contents)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Returns one of a file that was written two minutes ago."""
    (tmp_path / "file").write_text("first")
    began, now = time.time(), time.time
    monkeypatch.setattr(time, "time", lambda: now() + 120)
    assert time.time() - began >= 120
    return Reader(tmp_path / "file")


def test_a_file_that_stays_is_read_once(reader: Reader) -> None:
    """And once more where something else is asked of it."""
    assert [reader.read(), reader.read()] == ["first"] * 2
    assert reader.count == 1
    assert reader.read("other") == "first"
    assert reader.count == 2


def test_a_file_that_is_written_is_read_again(reader: Reader) -> None:
    """Also of the same size, with the old time of modification, or another file in its place."""
    assert reader.read() == "first"
    before = reader.path.stat()
    reader.path.write_text("other")
    os.utime(reader.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert reader.read() == "other"
    beside = reader.path.with_name("beside")
    beside.write_text("third")
    beside.rename(reader.path)
    assert reader.read() == "third"


def test_a_recent_file_is_read_each_time(tmp_path: Path) -> None:
    """Two writes within one tick of a file system's clock leave the same times."""
    path = tmp_path / "file"
    path.write_text("first")
    reader = Reader(path)
    before = path.stat()
    assert reader.read() == "first"
    path.write_text("other")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert reader.read() == "other"
    assert [reader.read(), reader.count] == ["other", 3]


def test_weights_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity of a checkpoint that stays takes no reading of it, and is the same."""
    index: CheckpointIndex = open_index(TinyMoe().write(tmp_path))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 120)
    monkeypatch.setattr(identity, "_settled", SettledFiles())
    before = weight_parts(index)
    monkeypatch.setattr(identity, "_sampled", lambda *_: pytest.fail("read again"))
    assert weight_parts(index) == before
