"""Guards files that are replaced as a whole: content, permissions, nothing left of a failure."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from moebius.replace_file import replace_file


def test_an_open_reader_keeps_the_old_content_and_the_next_gets_the_new(tmp_path: Path) -> None:
    """The name is moved to another file; nothing is written into the one that is read."""
    path = tmp_path / "settings.json"
    replace_file(path, "é" * 10)
    with path.open(encoding="utf-8") as reader:
        replace_file(path, "new")
        assert reader.read() == "é" * 10
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["settings.json"]


def test_permissions_are_those_asked_for(tmp_path: Path) -> None:
    """A new file is its owner's alone unless a mode, or a file to resemble, says otherwise."""
    path = tmp_path / "keys"
    modes = []
    for options in ({}, {"mode": 0o644}):
        replace_file(path, "x", **options)
        modes.append(stat.S_IMODE(path.stat().st_mode))
    path.chmod(0o640)
    replace_file(path, "y", like=path.stat())
    assert [*modes, stat.S_IMODE(path.stat().st_mode)] == [0o600, 0o644, 0o640]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Without room, or where the name cannot be replaced, the error passes, and no other file stays."""
    path = tmp_path / "record"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["record"]
