"""A cgroup with a CPU quota for the time of a measurement: version 2, or the cpu controller of version 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moebius.errors import UserError

CGROUP_ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


@contextmanager
def cpu_quota_group(cpus: float, root: Path = CGROUP_ROOT) -> Iterator[Path]:
    """The `cgroup.procs` file of a new group that may use `cpus` CPUs' worth of time; removed at the end.

    A process joins by writing its id there and has to be gone when the block ends.

    Raises:
        UserError: this machine does not let us make one; says what was tried.
    """
    quota = str(int(cpus * PERIOD_US))
    version_2 = {"cpu.max": f"{quota} {PERIOD_US}"}
    version_1 = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota}
    tried = []
    for parent, settings in (
        (root / own_group(), version_2),
        (root / "cpu", version_1),
        (root / "cpu,cpuacct", version_1),
    ):
        try:
            group = make_group(parent, settings)
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
            continue
        try:
            yield group / "cgroup.procs"
        finally:
            group.rmdir()
        return
    raise UserError(
        "no cgroup with a CPU quota can be made here; it needs root and a writable cgroup file system. Tried "
        + "; ".join(tried)
    )


def own_group() -> str:
    """This process's version 2 group relative to the mount; empty for the root."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::") and "/.." not in line:
            return line[3:].strip("/")
    return ""


def make_group(parent: Path, settings: dict[str, str]) -> Path:
    """A child of `parent` with these files written. Raises OSError when the system refuses any of it."""
    group = parent / f"moebius-quota-{os.getpid()}"
    group.mkdir()
    try:
        for name, value in settings.items():
            # Opened without O_CREAT: where the controller is missing nothing may be left behind.
            with (group / name).open("r+") as file:
                file.write(value)
    except OSError:
        group.rmdir()
        raise
    return group
