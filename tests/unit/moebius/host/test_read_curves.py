"""Guards the curve of read bandwidth by threads: its knee, its file, and that one measurement is enough."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import cli
from app.bench import read_curve
from app.bench.read_curve import measure_read_curves, thread_counts
from app.planning.hardware import HardwareOptions
from app.planning.hardware import hardware as detect
from app.planning.speed import server_threads
from app.supervisor import core_division
from app.supervisor.core_division import known_cores, measure_missing
from app.supervisor.expert_placement import NodeCores
from moebius.config import ExpertConfig, MoebiusConfig
from moebius.host.kernel_times import MeasuredOn, PanelTimes, read_times, times_file, write_times
from moebius.host.read_curves import TOLERANCE, MeasuredCores, ReadCurve, read_curves, write_curves
from moebius.host.topology import Topology

HERE = MeasuredCores("cpu", "0-15", None)
CURVE = ReadCurve(HERE, ((4, 60e9), (8, 117e9), (12, 120e9), (16, 110e9)))
TIMES = PanelTimes(
    MeasuredOn("cpu", 4, "avx2", "build 1"), "int8", "bfloat16", 2048, ((1, 100.0), (16, 400.0))
)


def test_the_knee_is_the_fewest_threads_near_the_best() -> None:
    """The knee is within 3 % of the best, also where more threads read slower."""
    assert (CURVE.knee, CURVE.best) == (8, 120e9)
    assert [CURVE.speed(threads) for threads in (2, 4, 6, 99)] == [30e9, 60e9, 88.5e9, 110e9]


@given(points=st.dictionaries(st.integers(1, 256), st.floats(1e6, 1e13), min_size=1))
def test_no_fewer_threads_would_do(points: dict[int, float]) -> None:
    """The knee of any curve is near the best, and all measured numbers below are not."""
    curve = ReadCurve(HERE, tuple(sorted(points.items())))
    enough = (1 - TOLERANCE) * max(points.values())
    assert points[curve.knee] >= enough
    assert all(speed < enough for threads, speed in points.items() if threads < curve.knee)


@given(most=st.integers(1, 512))
def test_all_cores_are_measured_and_few_numbers_below(most: int) -> None:
    """Ascending, from a quarter on, so that one measurement takes a second or two."""
    counts = thread_counts(most)
    assert counts[-1] == most
    assert list(counts) == sorted(set(counts))
    assert len(counts) <= 7
    assert counts[0] == -(-most // 4)


def test_curves_and_kernel_times_share_a_file(tmp_path: Path) -> None:
    """Writing either keeps the other; a curve of other cores, or of another quota, is another one."""
    path = tmp_path / "kernel-times.json"
    assert read_curves(path) == {}
    write_times(path, [TIMES])
    write_curves(path, [CURVE])
    limited = ReadCurve(MeasuredCores("cpu", "0-15", 3.5), ((1, 10e9),))
    write_curves(path, [limited])
    faster = ReadCurve(HERE, ((2, 1e12),))
    write_curves(path, [faster])
    assert read_curves(path) == {HERE: faster, limited.on: limited}
    write_times(path, [TIMES])
    assert (read_times(path), len(read_curves(path))) == ((TIMES,), 2)


@pytest.mark.parametrize(
    "curves", [1, [1], [{"on": {}}], [{"on": {"cpu": "", "cpus": "", "quota": None}, "points": [[0, 1]]}]]
)
def test_a_spoilt_file_is_an_error_and_is_replaced(tmp_path: Path, curves: object) -> None:
    """The file never gives another exception, and never numbers."""
    path = tmp_path / "kernel-times.json"
    path.write_text(json.dumps({"read_curves": curves}))
    with pytest.raises(ValueError, match="curve"):
        read_curves(path)
    write_curves(path, [CURVE])
    assert read_curves(path) == {HERE: CURVE}


def test_this_machine_is_measured() -> None:
    """Pinned threads really read: a speed of each number of threads, of two nodes at once."""
    cpus = [core[0] for core in Topology.detect().cores()][:2]
    found = measure_read_curves({0: cpus, 1: cpus[:1]}, 2)
    assert [threads for threads, _ in found[0]] == list(range(1, len(cpus) + 1))
    assert [threads for threads, _ in found[1]] == [1]
    assert all(speed > 1e8 for points in found.values() for _, speed in points)


class FakeHost:
    """16 cores of one node, whose measurements are counted; its cache is a directory of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.node = NodeCores(tuple(range(32)), tuple((cpu, cpu + 16) for cpu in range(16)))
        self.quota: float | None = None
        self.load, self.measured = 0.0, list[tuple[Sequence[int], int]]()
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setattr(core_division, "usable_nodes", lambda: ({-1: self.node}, self.quota))
        monkeypatch.setattr(os, "getloadavg", lambda: (self.load, 0.0, 0.0))
        monkeypatch.setattr(read_curve, "measure_read_curves", self._measure)

    def _measure(self, nodes: Mapping[int, Sequence[int]], most: int) -> dict[int, object]:
        self.measured.append((nodes[-1], most))
        return {-1: CURVE.points}

    def measure(self) -> int | None:
        """Measures as a start does; returns the knee that is known then."""
        measure_missing({-1: self.node}, self.quota)
        curve = known_cores(ExpertConfig()).nodes[-1].curve
        return curve.knee if curve else None


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHost:
    """Not measured yet."""
    return FakeHost(monkeypatch, tmp_path)


def test_one_measurement_is_enough(host: FakeHost) -> None:
    """One CPU of each core is measured; again for another cpuset or quota, never for the same."""
    assert [host.measure(), host.measure()] == [8, 8]
    assert host.measured == [(tuple(range(16)), 16)]
    host.quota = 6.5
    assert host.measure() == 8
    host.node = NodeCores(tuple(range(8)), tuple((cpu,) for cpu in range(8)))
    assert host.measure() == 8
    assert host.measured[1:] == [(tuple(range(16)), 6), (tuple(range(8)), 6)]
    assert len(read_curves(times_file())) == 3


def test_a_busy_host_is_not_measured(host: FakeHost) -> None:
    """What others read meanwhile would be missing for ever; one core alone has no curve."""
    host.load = 4.1
    assert host.measure() is None
    host.load, host.node = 0.0, NodeCores((0, 16), ((0, 16),))
    assert host.measure() is None
    assert host.measured == []


def test_a_file_that_cannot_be_written_stops_no_start(host: FakeHost, tmp_path: Path) -> None:
    """All cores compute then."""
    (tmp_path / "moebius").write_text("no directory")
    assert host.measure() is None


def doctor_status() -> object:
    """Returns the exit status of `moebius doctor --measure`."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--measure"])
    return ended.value.code


def test_doctor_measures_again_and_shows_the_curve(
    host: FakeHost, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The curve is shown with what is known, also on a busy host; where it cannot be kept, that is a warning
    with its reason.
    """
    assert host.measure() == 8
    host.load = 100.0
    assert doctor_status() == 0
    assert len(host.measured) == 2
    out = capsys.readouterr().out
    assert (
        "memory of node 0: 120.0 GB/s, read by 8 threads or more (GB/s by threads: 4: 60.0, 8: 117.0," in out
    )
    shutil.rmtree(tmp_path / "moebius")
    (tmp_path / "moebius").write_text("no directory")
    assert doctor_status() == 0
    assert "warning memory bandwidth: not measured: " in capsys.readouterr().out


def test_plan_and_serve_ask_the_same_function(host: FakeHost, tmp_path: Path) -> None:
    """A plan has the measured bandwidth and the knee's threads; options describe another host."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 8388608 kB\n")
    assert detect(HardwareOptions(), tmp_path).origin["bandwidth"] == "assumed"
    assert host.measure() == 8
    found = detect(HardwareOptions(gpus="h200"), tmp_path)
    assert (found.bandwidth, found.origin["bandwidth"]) == (120e9, "measured")
    assert detect(HardwareOptions(cores=4), tmp_path).origin["bandwidth"] == "assumed"
    config = MoebiusConfig(experts=ExpertConfig(expert_servers=2))
    assert server_threads(config, found) == (4, 4)
    assert server_threads(config, detect(HardwareOptions(gpus="none"), tmp_path)) == (8, 8)
    config = MoebiusConfig(experts=ExpertConfig(expert_servers=1, expert_threads=5))
    assert server_threads(config, found) == (5,)
