"""How much memory is read per second by how many threads, measured once per host and remembered.

Decoding reads every routed weight once, so it is as fast as memory is read; beyond the curve's knee, threads
only take cores from others. Curves lie beside the kernels' times (`kernel-times.json` in the user's cache).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from moebius.host.measurements_file import change_section, read_section

# What a thread fewer may cost: about as much as two measurements of the same number differ.
TOLERANCE = 0.03
_SECTION = "read_curves"


@dataclass(frozen=True, slots=True)
class MeasuredCores:
    """What a curve holds for."""

    cpu: str  # As /proc/cpuinfo names the processor.
    cpus: str  # One CPU of each core, in the kernel's notation: a cpuset's, of one NUMA node.
    quota: float | None  # The cgroup's limit in CPUs.


@dataclass(frozen=True, slots=True)
class ReadCurve:
    """The read bandwidth of the cores of one NUMA node; filled by `app.bench.read_curve`."""

    on: MeasuredCores
    # (threads, bytes per second that all of them read), by ascending threads.
    points: tuple[tuple[int, float], ...]

    def __str__(self) -> str:
        """Returns threads and GB/s, such as `4: 60.1, 8: 117.0`."""
        return ", ".join(f"{threads}: {speed / 1e9:.1f}" for threads, speed in self.points)

    @property
    def best(self) -> float:
        """Bytes per second, of the best number of threads."""
        return max(speed for _, speed in self.points)

    @property
    def knee(self) -> int:
        """The fewest measured threads that read at most `TOLERANCE` slower than the best number."""
        enough = (1.0 - TOLERANCE) * self.best
        return min(threads for threads, speed in self.points if speed >= enough)

    def speed(self, threads: int) -> float:
        """Returns the bytes per second of as many threads; linear between measured numbers, flat beyond the
        last.
        """
        for (low, slower), (high, faster) in pairwise(((0, 0.0), *self.points)):
            if threads <= high:
                return slower + (threads - low) / (high - low) * (faster - slower)
        return self.points[-1][1]


def read_curves(path: Path) -> dict[MeasuredCores, ReadCurve]:
    """Returns all curves in a file; none where there is no file.

    Raises OSError, ValueError for another file.
    """
    try:
        found = [_from_json(entry) for entry in read_section(path, _SECTION)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of measured curves: {error!r}") from error
    return {curve.on: curve for curve in found}


def _from_json(entry: dict[str, Any]) -> ReadCurve:
    on = entry["on"]
    quota = on["quota"]
    points = tuple(sorted((int(threads), float(speed)) for threads, speed in entry["points"]))
    if not points or not all(threads > 0 and speed > 0 for threads, speed in points):
        raise ValueError(f"a curve needs positive numbers, got {entry!r}")
    key = MeasuredCores(str(on["cpu"]), str(on["cpus"]), None if quota is None else float(quota))
    return ReadCurve(key, points)


def write_curves(path: Path, new: Iterable[ReadCurve]) -> None:
    """Adds curves to the file, in place of those of the same cores. Raises OSError."""

    def change() -> list[Any]:
        try:
            known = read_curves(path)
        except ValueError:
            known = {}
        return [asdict(curve) for curve in (known | {curve.on: curve for curve in new}).values()]

    change_section(path, _SECTION, change)
