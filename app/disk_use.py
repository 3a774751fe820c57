"""What Moebius keeps on this host for this user: where, how much, and what removes it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.installation import installation
from app.user_state import user_state_directory
from moebius.host.kernel_times import cache_directory

_UNINSTALL = {
    "clone": "delete the clone",
    "pipx": "pipx uninstall moebius",
    "uv": "uv tool uninstall moebius",
    "pip": "delete the environment",
    "image": "delete the image",
}
# What a block of st_blocks is, bytes.
_BLOCK = 512


@dataclass(frozen=True)
class DiskPlace:
    """One directory; filled by `disk_places`."""

    what: str
    path: Path
    nbytes: int  # on disk
    # The command, or the words, that remove it.
    remedy: str


def disk_places(state_dir: Path, prefix: Path = Path(sys.prefix)) -> list[DiskPlace]:
    """Returns the places that hold something. `state_dir`: of the run files of `serve`; `prefix`: of the
    Python that runs Moebius."""
    counted: set[tuple[int, int]] = set()
    found = [
        DiskPlace(what, path, used_bytes(path, counted), remedy)
        for what, path, remedy in _known(state_dir, prefix)
    ]
    return [place for place in found if place.nbytes]


def _known(state_dir: Path, prefix: Path) -> Iterator[tuple[str, Path, str]]:
    """Yields what, where, and how to remove it; directories before those that contain them."""
    from huggingface_hub import constants

    from app.demo_model.build import default_directory

    yield "downloaded models", Path(constants.HF_HUB_CACHE).expanduser(), "moebius rm NAME, each"
    # Where this user has no home directory, nothing was kept there.
    with contextlib.suppress(FileNotFoundError, RuntimeError):
        yield "demo model", default_directory(), "delete it; moebius demo makes it again"
        yield "measured times, demo downloads", cache_directory(), "delete it; they are made again"
        for name, path in _compiled():
            yield name, path, "delete it; kernels are compiled again"
        yield "batches and their files", user_state_directory(), "delete it: clients lose their results"
    yield "run files and logs of servers", state_dir, "moebius stop; the next start clears the rest"
    program = (
        prefix if (prefix / "pyvenv.cfg").is_file() else Path(__file__).resolve().parent.parent / "moebius"
    )
    yield "the program and its packages", program, _UNINSTALL[installation(prefix).kind]


def _compiled() -> Iterator[tuple[str, Path]]:
    """Yields the caches of the libraries that compile kernels for GPUs; other programs use them, too."""
    home = Path.home()
    yield "GPU kernels of Triton", Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or home)
    yield "GPU kernels of FlashInfer", base / ".cache" / "flashinfer"


def used_bytes(directory: Path, counted: set[tuple[int, int]]) -> int:
    """Returns the bytes on disk of the files below a directory; of one that cannot be read, or is none, 0.

    Links are not followed. Files that are in `counted`, by device and inode, count no more; those found are
    added.
    """
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            try:
                status = os.lstat(os.path.join(place, name))
            except OSError:
                continue  # it went meanwhile
            key = (status.st_dev, status.st_ino)
            if key not in counted:
                counted.add(key)
                total += status.st_blocks * _BLOCK
    return total
