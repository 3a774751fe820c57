"""Memory for packed experts that outlives their servers: anonymous files (memfd) which the supervisor holds.

Each has a link in the run directory, `expert-<index>.weights`, to the supervisor's descriptor in /proc. A
server that is started again finds there what its predecessor packed. The supervisor's children end with it,
and with them the memory goes; then the links lead nowhere, until the next start removes them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from app.supervisor.runfile import unusable
from moebius.errors import StartupError

HUGE_PAGE = 2 << 20
SYS = Path("/sys")

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class WeightFile:
    """One expert server's memory."""

    # The link.
    path: Path
    # What the server will need, in 2 MiB pages; 0: not known, so no reserved pages are used.
    nbytes: int
    # NUMA node that it binds the memory to; -1: none.
    node: int


def free_reserved_bytes(node: int = -1, root: Path = SYS) -> int:
    """Returns the free bytes in reserved 2 MiB pages (hugetlb) of a NUMA node, or of the machine; 0 where
    there are none.
    """
    place = root / "kernel/mm" if node < 0 else root / f"devices/system/node/node{node}"
    try:
        return int((place / "hugepages/hugepages-2048kB/free_hugepages").read_text()) * HUGE_PAGE
    except (OSError, ValueError):
        return 0


def fits_reserved(files: Sequence[WeightFile], root: Path = SYS) -> bool:
    """Returns whether all of them fit in reserved pages, of the machine and of each node that one is bound
    to.
    """
    if not files or any(file.nbytes == 0 for file in files):
        return False
    for node in {-1, *(file.node for file in files)}:
        needed = sum(file.nbytes for file in files if node < 0 or file.node == node)
        if needed > free_reserved_bytes(node, root):
            return False
    return True


class WeightFiles:
    """Holds the memory from its making to `close`."""

    def __init__(self, files: Sequence[WeightFile], root: Path = SYS) -> None:
        """Makes empty files and their links. Raises StartupError when the system refuses."""
        self._descriptors: list[int] = []
        reserved = fits_reserved(files, root)
        flags = os.MFD_CLOEXEC | (os.MFD_HUGETLB | os.MFD_HUGE_2MB if reserved else 0)
        try:
            for file in files:
                self._make(file, flags)
        except StartupError:
            self.close()
            raise
        if reserved:
            log.info("packed experts lie in reserved 2 MiB pages", nbytes=sum(file.nbytes for file in files))

    def _make(self, file: WeightFile, flags: int) -> None:
        try:
            descriptor = os.memfd_create(f"moebius-{file.path.stem}", flags)
        except OSError as error:
            raise StartupError(f"cannot make memory for {file.path.name}: {error.strerror}") from None
        self._descriptors.append(descriptor)
        os.fchmod(descriptor, 0o600)
        try:
            file.path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        except OSError as error:
            raise unusable(file.path.parent, error) from None

    def close(self) -> None:
        """Lets go of the memory, which is free once no process has it mapped."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
