"""Directories that nobody else can tamper with: what they hold is started, killed and deleted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from moebius.errors import StartupError

OTHERS = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def own_state_directory(path: Path) -> Path:
    """Makes the directory unless it exists. Raises StartupError when others could replace what we put there.

    A directory shared by many, such as /tmp, is fine when only owners may rename what is in it (sticky).
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, found = path.lstat(), path.stat()
    except OSError as error:
        raise unusable(path, error) from None
    if {link.st_uid, found.st_uid} - {os.getuid(), 0}:
        owner = found.st_uid if found.st_uid not in (os.getuid(), 0) else link.st_uid
        raise StartupError(f"the state directory {path} belongs to user {owner}; give another --state-dir")
    # Where every user has a group of their own, new directories are open to it.
    alone_in_group = found.st_uid == found.st_gid == os.getuid()
    open_to = stat.S_IWOTH if alone_in_group else OTHERS_WRITE
    if found.st_mode & open_to and not found.st_mode & stat.S_ISVTX:
        raise StartupError(
            f"others may write in the state directory {path} (mode {stat.S_IMODE(found.st_mode):04o}) and so "
            f"exchange its sockets and settings; give one of your own: --state-dir {path / 'moebius'}"
        )
    return path


def write_private(path: Path, text: str) -> None:
    """Writes a file that nobody else can read, all of it or nothing. Raises StartupError without room."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        raise unusable(path.parent, error) from None


def check_private(path: Path) -> None:
    """Raises StartupError unless the path is a directory, no link, that we own and only we can enter."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise StartupError(f"{path} is not a directory; delete it, or give another --state-dir")
    if found.st_uid != os.getuid():
        raise StartupError(f"{path} belongs to user {found.st_uid}; give another --state-dir")
    if found.st_mode & OTHERS:
        raise StartupError(
            f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):04o}), so its run file is not "
            "believed; look what is in it, then delete it or `chmod 700` it, or give another --state-dir"
        )


def unusable(path: Path, error: OSError) -> StartupError:
    """Names directory, need and remedy."""
    return StartupError(
        f"cannot use the state directory {path}: {error.strerror}; it has to take sockets and some kB of "
        "settings: free room there, or give a directory that can be written with --state-dir"
    )
