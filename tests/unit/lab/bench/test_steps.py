"""Guards the reading of profiler traces: whose work a step is, where the GPU idled, who blocked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.bench.steps import (
    StepsReport,
    busy_intervals,
    graph_runs,
    load_trace,
    read_events,
    summarise,
    table,
)
from moebius.errors import UserError

STEP_US = 1000.0


def event(category: str, name: str, begin: float, length: float, correlation: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": begin,
        "dur": length,
        "args": {"correlation": correlation},
    }


def steps_trace(count: int, gap: float = 5.0) -> list[dict[str, Any]]:
    """Returns the steps of 1 ms: a graph of two overlapping kernels and a copy, one more kernel, `gap` us of
    nothing.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for step in range(count):
        at, graph, single = step * STEP_US, 10 * step + 1, 10 * step + 2
        events += [
            event("cuda_runtime", "cudaGraphLaunch", at - 300, 8, graph),
            event("kernel", "attention", at, 500, graph),
            event("kernel", "wait_and_add", at + 400, 400, graph),
            event("gpu_memcpy", "Memcpy DtoH", at + 800, 10, graph),
            event("cuda_runtime", "cudaLaunchKernel", at - 200, 5, single),
            event("kernel", "sample", at + 812, STEP_US - gap - 812, single),
            event("cpu_op", "aten::add", at, 3, -1),
        ]
    return events


def report(events: list[dict[str, Any]]) -> StepsReport:
    return summarise(read_events(events), 10)


def test_work_is_counted_per_step() -> None:
    """Three kernels a step, one outside the graph; busy but for 2 us in it and 5 us after it."""
    found = report(steps_trace(14))
    assert (found.steps, found.step_microseconds) == (10, STEP_US)
    assert (found.kernels_per_step, found.kernels_outside_graphs_per_step, found.copies_per_step) == (3, 1, 1)
    assert (found.ring_microseconds, found.wait_microseconds) == (0, 400)
    assert found.gpu_busy_share == pytest.approx(1 - 7 / STEP_US)
    assert found.largest_gap_microseconds == pytest.approx(5)
    assert list(found.longest_kernels) == ["attention", "wait_and_add", "sample"]
    assert found.passed


def test_gaps_between_graphs_are_named() -> None:
    """The work of one step begins 45 us late: one gap of 45 us, in the step before it, and it fails."""
    events = steps_trace(14)
    for item in events:
        if (item.get("args") or {}).get("correlation") == 61 and item["cat"] != "cuda_runtime":
            item["ts"] += 40
            item["dur"] -= 40 if item["name"] == "attention" else 0
    found = report(events)
    assert [round(gap.microseconds) for gap in found.gaps_over_limit] == [45]
    # Of 14 launches the last two are left out, and ten steps begin at the second.
    assert found.gaps_over_limit[0].step == 4
    assert not found.passed
    assert "gap after step 4: 45.0 us" in table(found)


def test_host_functions_fail_a_step() -> None:
    """Whatever calls back to the host is listed, and so is what blocks; launches are neither."""
    events = steps_trace(14)
    events.append(event("cuda_runtime", "cudaLaunchHostFunc", 5300, 4, 999))
    events.append(event("cuda_runtime", "cudaStreamSynchronize", 5400, 4, 998))
    found = report(events)
    assert found.host_functions == {"cudaLaunchHostFunc": 1}
    assert found.blocking_calls == {"cudaStreamSynchronize": 1}
    assert not found.passed


def test_what_lies_before_or_after_does_not_count() -> None:
    """Prefill before the steps, and the step in flight at the end."""
    events = steps_trace(14)
    events.append(event("cuda_runtime", "cudaLaunchHostFunc", -4000, 4, 999))
    events.append(event("kernel", "prefill", -9000, 8000, 997))
    events.append(event("cuda_runtime", "cudaStreamSynchronize", 14 * STEP_US, 4, 998))
    assert report(events) == report(steps_trace(14))


def test_too_few_launches_are_refused() -> None:
    """Without graphs there is nothing to look at, and the message says what to change."""
    with pytest.raises(UserError, match=r"has 12 graph launches; 13 are needed.*cuda_graphs"):
        report(steps_trace(12))


def test_intervals_and_runs() -> None:
    """Work on two streams joins where it overlaps; a launch without work is no run."""
    spans = read_events(
        [
            event("kernel", "a", 0, 10, 1),
            event("kernel", "b", 5, 10, 1),
            event("kernel", "c", 20, 5, 2),
            event("cuda_driver", "cuGraphLaunch", -5, 1, 1),
            event("cuda_runtime", "cudaGraphLaunch", -4, 1, 3),
        ]
    )
    assert busy_intervals(spans) == [(0, 15), (20, 25)]
    [run] = graph_runs(spans)
    assert (run.launched, run.begin, run.end, run.kernels) == (-5, 0, 15, 2)


def test_files_are_read_or_refused(tmp_path: Path) -> None:
    """A trace as torch writes it, and a file that is none."""
    (tmp_path / "good.json").write_text(json.dumps({"traceEvents": steps_trace(2)}))
    assert len(load_trace(tmp_path / "good.json")) == 12
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(UserError, match=r"bad\.json is not a profiler trace"):
        load_trace(tmp_path / "bad.json")
