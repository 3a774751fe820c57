"""Guards the file of API keys: who may bring which key, and what a changed or careless file means."""

from __future__ import annotations

from pathlib import Path

import pytest

from moebius.api_keys import ApiKeys, client_key
from moebius.errors import ConfigError


def key_file(directory: Path, text: str, mode: int = 0o600) -> Path:
    """A file of keys."""
    path = directory / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_every_line_is_a_key(tmp_path: Path) -> None:
    """All keys of the file and the setting's own are accepted; comments, empty lines and parts are not."""
    keys = ApiKeys("own", str(key_file(tmp_path, "# team a\nalpha\n\n  beta  \n")))
    assert keys.required
    assert [key for key in (b"own", b"alpha", b"beta") if not keys.accepts(key)] == []
    assert [key for key in (b"", b"alph", b"# team a", b"gamma", "größe".encode()) if keys.accepts(key)] == []
    assert client_key("", str(tmp_path / "keys")) == "alpha"
    assert client_key("own", "") == "own"
    assert not ApiKeys("", "").required


def test_a_changed_file_counts_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys come and go without a restart; a file that is gone or empty keeps the keys before it."""
    path = key_file(tmp_path, "alpha\n")
    keys = ApiKeys("", str(path))
    path.write_text("beta\ngamma\n")
    assert (keys.accepts(b"alpha"), keys.accepts(b"beta"), keys.accepts(b"gamma")) == (False, True, True)
    path.unlink()
    assert keys.accepts(b"beta")
    path.write_text("\n")
    assert keys.accepts(b"beta")
    assert not keys.accepts(b"")
    path.write_text("delta\n")
    assert (keys.accepts(b"beta"), keys.accepts(b"delta")) == (False, True)
    assert "delta" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [("", 0o600, "has no key"), ("# none\n", 0o600, "has no key"), ("alpha\n", 0o602, "everybody may write")],
)
def test_files_that_are_refused(tmp_path: Path, text: str, mode: int, reason: str) -> None:
    """A file without a key would let nobody in, one that anybody may write everybody."""
    path = key_file(tmp_path, text, mode)
    with pytest.raises(ConfigError, match=reason) as caught:
        ApiKeys("", str(path))
    assert str(path) in str(caught.value)


def test_missing_and_binary_files_are_named(tmp_path: Path) -> None:
    """The path and the reason, in one line."""
    with pytest.raises(ConfigError, match=r"none.*No such file"):
        ApiKeys("", str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary.*UTF-8"):
        ApiKeys("", str(tmp_path / "binary"))


def test_a_readable_file_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everybody on the machine could read the keys: said once, with the remedy, but served."""
    assert ApiKeys("", str(key_file(tmp_path, "alpha\n", 0o644))).accepts(b"alpha")
    assert "chmod 600" in capsys.readouterr().out
