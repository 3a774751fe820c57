"""Guards the file of measured kernel times: what servers write is what the planner reads, and uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.planning.hardware import HardwareOptions
from expert_service.host import ExpertHost, LoadSettings
from expert_service.placement import ThreadPlacement
from moebius.experts.slices import SliceRequest
from moebius.host.kernel_times import (
    MeasuredOn,
    PanelTimes,
    find_times,
    panel_times,
    read_times,
    this_host,
    times_file,
    write_times,
)
from moebius.kernels import PlanRow, isa_level
from tests.helpers.quantised_checkpoints import QuantisedMoe

HERE = MeasuredOn("cpu", 4, "avx2", "build 1")
TIMES = PanelTimes(HERE, "int8", "bfloat16", 2048, ((1, 100.0), (16, 400.0)))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """What other servers wrote is kept, of the same matrix replaced, of an older build of the kernels
    dropped.
    """
    path = tmp_path / "moebius" / "kernel-times.json"
    assert read_times(path) == ()
    other = replace(TIMES, on=replace(HERE, threads=8))
    write_times(path, [TIMES])
    write_times(path, [other])
    assert read_times(path) == (TIMES, other)
    faster = replace(TIMES, points=((1, 50.0),))
    write_times(path, [faster])
    assert read_times(path) == (other, faster)
    rebuilt = replace(TIMES, on=replace(HERE, kernels="build 2"))
    elsewhere = replace(TIMES, on=replace(HERE, cpu="another"))
    write_times(path, [elsewhere])
    write_times(path, [rebuilt])
    assert read_times(path) == (elsewhere, rebuilt)
    assert sorted(file.name for file in path.parent.iterdir()) == ["kernel-times.json", "kernel-times.lock"]


@pytest.mark.parametrize("text", ["", "[]", '{"times": 1}', '{"times": [1]}', '{"times": [{"on": {}}]}'])
def test_a_spoilt_file_is_named_and_replaced(tmp_path: Path, text: str) -> None:
    """A reader gets ValueError, never another error or numbers; the next server writes a sound file."""
    path = tmp_path / "kernel-times.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"kernel times|measurements|Expecting value"):
        read_times(path)
    write_times(path, [TIMES])
    assert read_times(path) == (TIMES,)


def test_only_times_of_the_same_host_count(tmp_path: Path) -> None:
    """Another number of threads, instruction set or build is no measurement; of shapes the nearest counts."""
    wide = replace(TIMES, k=8192)
    known = (TIMES, wide)
    assert find_times(known, HERE, "int8", "bfloat16", 3000) is TIMES
    assert find_times(known, HERE, "int8", "bfloat16", 6000) is wide
    assert find_times(known, HERE, "int8", "float32", 2048) is None
    assert find_times(known, HERE, "mxfp4", "bfloat16", 2048) is None
    for other in ({"threads": 2}, {"isa": "amx"}, {"kernels": "build 2"}, {"cpu": "another"}):
        assert find_times(known, replace(HERE, **other), "int8", "bfloat16", 2048) is None


def test_ranges_that_were_not_measured_are_left_out() -> None:
    """0 nanoseconds means that nothing was measured, not that a panel takes no time."""
    rows = [
        PlanRow("gate_up", "int8", "bfloat16", 1, 1, "a", 90.0),
        PlanRow("gate_up", "int8", "bfloat16", 2, 3, "b", 95.0),
        PlanRow("gate_up", "int8", "bfloat16", 4, None, "c", 0.0),
        PlanRow("down", "int4_g32", "float32", 1, None, "d", 0.0),
        # Measured without a choice of kernels, for the live view: says nothing of two rows.
        PlanRow("down", "bfloat16", "bfloat16", 1, None, "e", 80.0),
    ]
    assert panel_times(HERE, rows, 64, 32) == (
        PanelTimes(HERE, "int8", "bfloat16", 64, ((1, 90.0), (2, 95.0))),
    )


def test_a_server_keeps_what_it_measured_for_the_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After loading with `calibrate_kernels` the file has this host's times; the planner finds them there."""
    from app.planning.hardware import hardware

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = QuantisedMoe("bfloat16").write(tmp_path / "model")
    host = ExpertHost(ThreadPlacement(-1, 2, ()), lambda *_: None, lambda: None, LoadSettings())
    host.load(SliceRequest(model_path=str(model)))
    found = read_times(times_file())
    assert found
    assert {times.on for times in found} == {this_host(2, isa_level())}
    assert hardware(HardwareOptions()).kernel_times == found
    # Options that describe another machine's processors rule this one's times out.
    assert hardware(HardwareOptions(cores=64)).kernel_times == ()
    assert hardware(HardwareOptions(isa="scalar")).kernel_times == ()
