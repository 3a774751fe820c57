"""What expert servers measured of their kernels on this host, kept for `moebius plan`.

`ExpertEngine.calibrate` measures how long a panel (16 output columns) of a matrix takes by number of rows. An
expert server writes that to `kernel-times.json` in the user's cache, by processor, number of threads,
instruction set and build of the kernels; the planner reads it. Times of other builds are dropped then.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import math
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebius.host.kernel_files import file_text
from moebius.host.measurements_file import change_section, read_section

if TYPE_CHECKING:
    from moebius.kernels import PlanRow

_SECTION = "times"


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """What times hold for; filled by `this_host`."""

    cpu: str  # As /proc/cpuinfo names the processor.
    threads: int  # Compute threads of one expert server.
    isa: str  # Instruction-set level of its kernels.
    kernels: str  # Digest of the extension module: a rebuilt kernel may be faster.


@dataclass(frozen=True, slots=True)
class PanelTimes:
    """The measured times of one matrix shape; filled by `panel_times`."""

    on: MeasuredOn
    # Packed format, and "bfloat16" or "float32": what the rows of requests are.
    weight_format: str
    row_type: str
    k: int  # Input features of the matrix.
    # (rows of an expert, nanoseconds per panel with all threads at work), by ascending rows.
    points: tuple[tuple[int, float], ...]

    def seconds(self, rows: float, k: int) -> float:
        """Returns the seconds of one panel of a matrix with `k` input features whose expert has `rows` rows.

        Linear between measured numbers of rows, proportional beyond the last, and proportional to `k`.
        """
        first, last = self.points[0], self.points[-1]
        found = last[1] * max(1.0, rows / last[0]) if rows >= last[0] else first[1]
        for (low, before), (high, after) in zip(self.points, self.points[1:], strict=False):
            if low < rows <= high:
                found = before + (rows - low) / (high - low) * (after - before)
        return found * 1e-9 * k / self.k


def cache_directory() -> Path:
    """Returns the directory of Moebius below the user's cache, by the XDG base directories; a relative one
    counts as none.

    Raises FileNotFoundError where neither that nor a home directory is known.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):
        return Path(base) / "moebius"
    try:
        return Path.home() / ".cache" / "moebius"
    except RuntimeError:
        why = "this user has no home directory, and neither HOME nor XDG_CACHE_HOME is set"
        raise FileNotFoundError(errno.ENOENT, why) from None


def times_file() -> Path:
    """Returns where this user's measurements are. Raises FileNotFoundError as `cache_directory` does."""
    return cache_directory() / "kernel-times.json"


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's name; its architecture where the system gives no name."""
    lines = file_text(cpuinfo).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@functools.cache
def _kernels_digest() -> str:
    from moebius import _kernels

    return hashlib.sha256(Path(_kernels.__file__).read_bytes()).hexdigest()[:16]


def this_host(threads: int, isa: str) -> MeasuredOn:
    """The key of measurements made here, by a server of `threads` threads at level `isa`."""
    return MeasuredOn(cpu_name(), threads, isa, _kernels_digest())


def panel_times(
    on: MeasuredOn, plan: Iterable[PlanRow], hidden_size: int, intermediate_size: int
) -> tuple[PanelTimes, ...]:
    """Returns the times of panels, from what an engine of these sizes measured; ranges, and matrices, that it
    did not are left out.
    """
    points: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in plan:
        if row.nanoseconds > 0:
            k = intermediate_size if row.matrix == "down" else hidden_size
            of_matrix = points.setdefault((row.format, row.row_type, k), {})
            # Matrices of the same shape: either measurement will do.
            of_matrix[row.rows_from] = min(row.nanoseconds, of_matrix.get(row.rows_from, math.inf))
    # One row alone says nothing of more: a measurement that ran out of time.
    return tuple(
        PanelTimes(on, *key, tuple(sorted(found.items()))) for key, found in points.items() if len(found) > 1
    )


def read_times(path: Path) -> tuple[PanelTimes, ...]:
    """Returns all measurements in a file; none where there is no file.

    Raises OSError, or ValueError when it is not one that `write_times` wrote.
    """
    try:
        return tuple(_from_json(entry) for entry in read_section(path, _SECTION))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of kernel times: {error!r}") from error


def _from_json(entry: dict[str, Any]) -> PanelTimes:
    points = tuple((int(rows), float(nanoseconds)) for rows, nanoseconds in entry["points"])
    k = int(entry["k"])
    if not points or k < 1 or not all(rows > 0 and nanoseconds > 0 for rows, nanoseconds in points):
        raise ValueError(f"kernel times need positive numbers, got {entry!r}")
    return PanelTimes(
        MeasuredOn(**entry["on"]), str(entry["weight_format"]), str(entry["row_type"]), k, points
    )


def write_times(path: Path, new: Sequence[PanelTimes]) -> None:
    """Adds `new` to the file, in place of older times of the same matrices, as `change_section` does.

    Raises OSError.
    """
    if new:
        change_section(path, _SECTION, lambda: [asdict(times) for times in _with_new(path, new)])


def _with_new(path: Path, new: Sequence[PanelTimes]) -> Iterator[PanelTimes]:
    """What is kept of the file's, then `new`."""
    try:
        old = read_times(path)
    except ValueError:
        old = ()
    replaced = {_identity(times) for times in new}
    builds = {(times.on.cpu, times.on.kernels) for times in new}
    cpus = {cpu for cpu, _ in builds}
    for times in old:
        of_another_cpu = times.on.cpu not in cpus
        if _identity(times) not in replaced and (
            of_another_cpu or (times.on.cpu, times.on.kernels) in builds
        ):
            yield times
    yield from new


def _identity(times: PanelTimes) -> tuple[MeasuredOn, str, str, int]:
    return times.on, times.weight_format, times.row_type, times.k


def find_times(
    known: Iterable[PanelTimes], on: MeasuredOn, weight_format: str, row_type: str, k: int
) -> PanelTimes | None:
    """Returns the times of the format, on that host; of several shapes the one nearest to `k`.

    None: not measured there.
    """
    fitting = [
        times
        for times in known
        if times.on == on and times.weight_format == weight_format and times.row_type == row_type
    ]
    return min(fitting, key=lambda times: abs(math.log(times.k / k)), default=None)
