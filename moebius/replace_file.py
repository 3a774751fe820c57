"""Files that are replaced as a whole: a reader finds the old one or the new one, also after a kill."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def sync(path: Path) -> None:
    """Writes a file, or the names in a directory, through to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str, mode: int = 0o600, like: os.stat_result | None = None) -> None:
    """Writes `text` in UTF-8 to a new file beside `path`, and renames it to `path`.

    Args:
        path: what is replaced, if it is there; a link is replaced, not followed.
        text: the whole content.
        mode: permission bits of the new file.
        like: takes owner and permission bits from this instead.

    Raises:
        OSError: no room, no permission; nothing is left of the new file then.
    """
    descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if like is not None:
            os.chown(made, like.st_uid, like.st_gid)
        os.chmod(made, mode if like is None else stat.S_IMODE(like.st_mode))
        os.replace(made, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise
