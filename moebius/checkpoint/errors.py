"""The one error of this package, and the commonest cause of several."""

from __future__ import annotations

from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/spec/"


class CheckpointError(ValueError):
    """A checkpoint is unreadable, incomplete or mis-shaped; the message names the file or tensor."""


def refuse_pointer(file: Path) -> None:
    """Raises CheckpointError for what `git clone` leaves in place of a large file.

    See https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md. A file that cannot be read is its reader's
    business.
    """
    try:
        with file.open("rb") as stream:
            start = stream.read(len(_POINTER))
    except OSError:
        return
    if start == _POINTER:
        raise CheckpointError(f"{file} is a Git LFS pointer in place of the file: run git lfs pull there")
