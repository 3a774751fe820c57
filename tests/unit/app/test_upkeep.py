"""Guards `moebius update` and `disk`: a clone is left alone, what installed also updates, sizes add up."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import typer

from app.commands import upkeep
from app.disk_use import used_bytes
from app.installation import Installation, Wheel, installation, read_wheel, update_command
from app.sizes import size
from moebius.errors import UserError

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
FILE_URL = json.dumps({"url": "file:///w/moebius-0.1.0.whl", "archive_info": {}})


def wheel_file(directory: Path, name: str = f"moebius-9.9.9-{TAG}-{TAG}-manylinux_2_36_x86_64.whl") -> Path:
    path = directory / name
    path.write_bytes(b"")
    return path


@pytest.mark.parametrize(
    ("mark", "noted", "kind"),
    [
        ("uv-receipt.toml", FILE_URL, "uv"),
        ("pipx_metadata.json", FILE_URL, "pipx"),
        ("pyvenv.cfg", FILE_URL, "pip"),
        ("pyvenv.cfg", "", "pip"),
        (
            "uv-receipt.toml",
            json.dumps({"url": "file:///my%20clone", "dir_info": {"editable": True}}),
            "clone",
        ),
    ],
)
def test_an_installation_is_known_by_what_it_leaves(mark: str, noted: str, kind: str, tmp_path: Path) -> None:
    """Each installer leaves a file of its own; one that follows a clone is a clone, by any of them."""
    (tmp_path / mark).write_text("")
    found = installation(tmp_path, noted)
    assert found.kind == kind
    assert found.origin == {"clone": "/my clone"}.get(kind, "file:///w/moebius-0.1.0.whl" if noted else "")


def test_images_are_known() -> None:
    """Their program is where the Dockerfiles put it."""
    assert installation(Path("/opt/moebius"), FILE_URL).kind == "image"


def test_the_same_program_updates(tmp_path: Path) -> None:
    """pipx, uv and pip replace what they installed, by the file that is given, with its extras, else by the
    index that it came from."""
    wheel = read_wheel(f"{wheel_file(tmp_path)}[gpu,vision]")
    assert (wheel.version, wheel.extras) == ("9.9.9", "[gpu,vision]")
    what = f"{wheel.path}[gpu,vision]"
    assert update_command(Installation("pipx", "file:///x"), wheel) == ["pipx", "install", "--force", what]
    assert update_command(Installation("uv", "file:///x"), wheel) == [
        "uv",
        "tool",
        "install",
        "--force",
        what,
    ]
    assert update_command(Installation("pipx", ""), None) == ["pipx", "upgrade", "moebius"]
    assert update_command(Installation("uv", ""), None) == ["uv", "tool", "upgrade", "moebius"]
    by_pip = update_command(Installation("pip", "file:///x"), wheel)
    assert by_pip[-2:] == ["--upgrade", what]
    assert sys.executable in by_pip


@pytest.mark.parametrize(
    ("kind", "origin", "said"),
    [
        ("clone", "/src", "from the clone /src: a clone is left alone; in it, `git pull`"),
        ("image", "", "start a container of a newer image"),
        ("pipx", "file:///x.whl", "in no public package index: `moebius update FILE.whl`"),
    ],
)
def test_what_is_not_updated_says_how(kind: str, origin: str, said: str) -> None:
    """One sentence with the way that there is."""
    with pytest.raises(UserError, match=said):
        update_command(Installation(kind, origin), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("other-1.0-py3-none-any.whl", "is no wheel of Moebius"),
        ("moebius-9.9.9-cp27-cp27-manylinux_2_36_x86_64.whl", r"is for Python 2\.7, and this is Python"),
    ],
)
def test_a_wheel_that_does_not_fit_is_refused(name: str, said: str, tmp_path: Path) -> None:
    """It is refused before anything is run."""
    with pytest.raises(UserError, match=said):
        read_wheel(str(wheel_file(tmp_path, name)))
    with pytest.raises(UserError, match="no such file"):
        read_wheel(str(tmp_path / f"moebius-1.0-{TAG}-{TAG}-linux_x86_64.whl"))


def test_update_runs_what_it_says_and_not_beside_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The installer gets the file and its status is ours; a server that runs would load parts of both
    versions, so it is named instead; --dry-run runs nothing."""
    tool = tmp_path / "pipx"
    tool.write_text('#!/bin/sh\necho "ran $*"; exit 7\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("app.installation.installation", lambda: Installation("pipx", "file:///x"))
    running: list[object] = []
    monkeypatch.setattr("app.supervisor.running_systems.running_systems", lambda directory: running)
    app = typer.Typer()
    upkeep.register(app)
    update = next(one for one in app.registered_commands if one.callback.__name__ == "update").callback
    assert update is not None
    wheel = wheel_file(tmp_path)
    update(str(wheel), dry_run=True)
    assert "ran" not in capfd.readouterr().out
    with pytest.raises(typer.Exit) as ended:
        update(str(wheel), dry_run=False)
    assert ended.value.exit_code == 7
    assert capfd.readouterr().out == f"ran install --force {Wheel(wheel, '', '9.9.9')}\n"
    running.append(type("System", (), {"model": "glm", "directory": tmp_path})())
    with pytest.raises(UserError, match="stop what runs first, with moebius stop: glm"):
        update(str(wheel), dry_run=False)


def test_sizes_are_those_on_disk_and_count_once(tmp_path: Path) -> None:
    """A file with two names, and one within a place that was counted before, count once; links do not."""
    inner, outer = tmp_path / "a" / "b", tmp_path / "a"
    inner.mkdir(parents=True)
    (inner / "file").write_bytes(b"x" * 100_000)
    os.link(inner / "file", outer / "second")
    (outer / "link").symlink_to(inner / "file")
    (outer / "own").write_bytes(b"y" * 50_000)
    counted: set[tuple[int, int]] = set()
    on_disk = (inner / "file").stat().st_blocks * 512
    assert used_bytes(inner, counted) == on_disk > 0
    rest = (outer / "own").stat().st_blocks * 512 + os.lstat(outer / "link").st_blocks * 512
    assert used_bytes(outer, counted) == rest
    assert used_bytes(outer, counted) == 0
    assert used_bytes(tmp_path / "none", set()) == 0


@pytest.mark.parametrize(
    ("nbytes", "said"), [(12_300_000_000, "12.30 GB"), (4_500_000, "4.5 MB"), (900, "1 kB")]
)
def test_sizes_have_decimal_units(nbytes: int, said: str) -> None:
    """They are those of `moebius list` and of disks."""
    assert size(nbytes) == said
