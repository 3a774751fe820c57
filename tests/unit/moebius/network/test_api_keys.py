"""Guards the file of API keys: who may bring which key, and what a changed or careless file means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moebius.errors import ConfigError
from moebius.network.api_keys import ApiKeys, KeyLimits, add_key, client_key, read_keys, revoke_key


def key_file(directory: Path, text: str, mode: int = 0o600) -> Path:
    """Returns a file of keys."""
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
    """A file without a key would let no client in, one that all users may write would let in all."""
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


def test_a_made_key_is_nowhere_but_with_its_owner(tmp_path: Path) -> None:
    """`add_key` returns a key that works and of which the file has the salted hash only; comments stay."""
    path = tmp_path / "keys"
    path.write_text("# ours\nplain\n")
    path.chmod(0o600)
    made = add_key(str(path), "alice", KeyLimits(requests_per_minute=60))
    again = add_key(str(path), "bob", KeyLimits())
    text = path.read_text()
    assert made not in text
    assert text.startswith("# ours\nplain\nsha256:")
    assert path.stat().st_mode & 0o077 == 0
    keys = ApiKeys("", str(path))
    found = keys.find(made.encode())
    assert found is not None
    assert (found.name, found.limits) == ("alice", KeyLimits(requests_per_minute=60))
    assert keys.accepts(b"plain")
    assert keys.find(again.encode()) != found
    assert not keys.accepts(text.splitlines()[2].encode())  # a reader of the file has no key
    assert [key.name for key in read_keys(str(path))] == ["line-2", "alice", "bob"]
    with pytest.raises(ConfigError, match="has hashes of keys only"):
        client_key("", str(key_file(tmp_path, text.splitlines()[2])))


def test_a_revoked_key_is_refused_at_once(tmp_path: Path) -> None:
    """A key that was accepted a moment ago is refused, too; the last key of a file is not taken out."""
    path = str(tmp_path / "keys")
    alice, bob = add_key(path, "alice", KeyLimits()), add_key(path, "bob", KeyLimits())
    keys = ApiKeys("", path)
    assert keys.accepts(alice.encode())
    revoke_key(path, "alice")
    assert (keys.accepts(alice.encode()), keys.accepts(bob.encode())) == (False, True)
    with pytest.raises(ConfigError, match="no key with the name 'alice'; there are bob"):
        revoke_key(path, "alice")
    with pytest.raises(ConfigError, match="is the last key"):
        revoke_key(path, "bob")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sha256:00:11", "line 1: allowed: sha256:SALT:DIGEST"),
        (f"sha256:00:{'11' * 32} colour=red", "line 1: 'colour=red' is not allowed; allowed: name=TEXT"),
        (f"sha256:00:{'11' * 32} requests_per_minute=0", "'requests_per_minute=0' is not allowed"),
        (f"sha256:00:{'11' * 32} name=a\nsha256:01:{'11' * 32} name=a", "two keys with the name 'a'"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: str, words: str) -> None:
    """A typing error in a limit is no key without one."""
    with pytest.raises(ConfigError, match=words):
        read_keys(str(key_file(tmp_path, line)))


def test_names_are_unique_and_plain(tmp_path: Path) -> None:
    """A second key of the same name, or a name that the file could not hold, is refused."""
    path = str(tmp_path / "keys")
    add_key(path, "alice", KeyLimits())
    for name in ("alice", "", "two words", "a=b"):
        with pytest.raises(ConfigError, match="--name"):
            add_key(path, name, KeyLimits())


def test_a_changed_file_keeps_owner_mode_and_place(tmp_path: Path) -> None:
    """An administrator revokes a key: the gateway's user can still read the file, which may be a link."""
    link, path = tmp_path / "link", tmp_path / "keys"
    link.symlink_to(path)
    add_key(str(link), "alice", KeyLimits())
    path.chmod(0o640)
    if os.getuid() == 0:
        os.chown(path, 12345, 23456)
    before = path.stat()
    add_key(str(link), "bob", KeyLimits())
    revoke_key(str(link), "alice")
    after = path.stat()
    assert link.is_symlink()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert [key.name for key in read_keys(str(path))] == ["bob"]
