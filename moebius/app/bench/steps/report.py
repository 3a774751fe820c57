"""From spans to the summary that says whether the CPU took part in a decode step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moebius.app.bench.steps.trace import (
    BLOCKING,
    GPU_CATEGORIES,
    HOST_CATEGORIES,
    HOST_FUNCTIONS,
    RING,
    WAIT,
    GraphRun,
    Span,
    busy_intervals,
    graph_runs,
)
from moebius.errors import UserError

GAP_LIMIT_US = 20.0
# Of the last launches, the first of which may be a step that the engine scheduled ahead of the end.
_LEFT_OUT = 2


@dataclass(frozen=True)
class Gap:
    """The GPU idle between two graphs; filled by `summarise`."""

    # Number of the step whose graph ended before it, from 0.
    step: int
    microseconds: float


@dataclass(frozen=True)
class StepsReport:
    """The keys of the JSON document; filled by `summarise`."""

    steps: int
    step_microseconds: float
    kernels_per_step: float
    # Of these, launched by themselves, between graphs.
    kernels_outside_graphs_per_step: float
    copies_per_step: float
    # Waiting for expert servers counts as work: a kernel spins.
    gpu_busy_share: float
    # Per step: handing rows to expert servers, and waiting for their answers.
    ring_microseconds: float
    wait_microseconds: float
    # Longest idle time between one graph's last work and the next one's first, other GPU work taken out.
    largest_gap_microseconds: float
    gaps_over_limit: list[Gap]
    # Host functions and blocking calls within the steps, by name.
    host_functions: dict[str, int]
    blocking_calls: dict[str, int]
    # The names that take most GPU time, microseconds per step.
    longest_kernels: dict[str, float]

    @property
    def passed(self) -> bool:
        """Whether the CPU was no part of any step."""
        return not self.gaps_over_limit and not self.host_functions


def summarise(spans: Sequence[Span], steps: int) -> StepsReport:
    """Of the last `steps` whole steps, each from its graph's first work to the next one's.

    Raises UserError when the trace has too few graph launches.
    """
    runs = graph_runs(spans)
    if len(runs) < steps + 1 + _LEFT_OUT:
        raise UserError(
            f"the trace has {len(runs)} graph launches; {steps + 1 + _LEFT_OUT} are needed for {steps} steps "
            "(cuda_graphs has to be on, and the number of streams within cuda_graph_max_batch_size)"
        )
    chosen = runs[-(steps + 1 + _LEFT_OUT) : -_LEFT_OUT]
    begin, end = chosen[0].begin, chosen[-1].begin
    within = [span for span in spans if begin <= span.begin < end]
    gpu = [span for span in within if span.category in GPU_CATEGORIES]
    kernels = [span for span in gpu if span.category == "kernel"]
    busy = busy_intervals(gpu)
    in_graphs = sum(run.kernels for run in chosen[:-1])
    gaps = _gaps(chosen, busy)
    return StepsReport(
        steps=steps,
        step_microseconds=(end - begin) / steps,
        kernels_per_step=len(kernels) / steps,
        kernels_outside_graphs_per_step=max(0, len(kernels) - in_graphs) / steps,
        copies_per_step=(len(gpu) - len(kernels)) / steps,
        gpu_busy_share=sum(min(last, end) - first for first, last in busy) / (end - begin),
        ring_microseconds=_time_in(kernels, RING) / steps,
        wait_microseconds=_time_in(kernels, WAIT) / steps,
        largest_gap_microseconds=max(gap.microseconds for gap in gaps),
        gaps_over_limit=[gap for gap in gaps if gap.microseconds > GAP_LIMIT_US],
        host_functions=_calls(within, HOST_FUNCTIONS),
        blocking_calls=_calls(within, BLOCKING),
        longest_kernels=_longest(kernels, steps),
    )


def _gaps(runs: Sequence[GraphRun], busy: Sequence[tuple[float, float]]) -> list[Gap]:
    """The longest idle interval between each two graphs."""
    found = []
    for number, (early, late) in enumerate(itertools.pairwise(runs)):
        longest, at = 0.0, early.end
        for first, last in busy:
            if last <= at or first >= late.begin:
                continue
            longest = max(longest, first - at)
            at = max(at, last)
        found.append(Gap(number, max(longest, late.begin - at)))
    return found


def _time_in(kernels: Sequence[Span], name: str) -> float:
    return sum(span.end - span.begin for span in kernels if span.name.startswith(name))


def _calls(spans: Sequence[Span], parts: Sequence[str]) -> dict[str, int]:
    """Host calls whose name has one of these parts."""
    names = [span.name for span in spans if span.category in HOST_CATEGORIES]
    return dict(Counter(name for name in names if any(part in name for part in parts)))


def _longest(kernels: Sequence[Span], steps: int, count: int = 8) -> dict[str, float]:
    total: Counter[str] = Counter()
    for span in kernels:
        total[span.name] += span.end - span.begin  # type: ignore[assignment]
    return {name: time / steps for name, time in total.most_common(count)}


def table(report: StepsReport) -> str:
    """For people."""
    rows = [
        ("steps", f"{report.steps}"),
        ("microseconds per step", f"{report.step_microseconds:.1f}"),
        ("kernels per step", f"{report.kernels_per_step:.1f}"),
        ("  outside graphs", f"{report.kernels_outside_graphs_per_step:.1f}"),
        ("copies per step", f"{report.copies_per_step:.1f}"),
        ("GPU busy", f"{report.gpu_busy_share:.1%}"),
        ("  handing rows to experts", f"{report.ring_microseconds:.1f} us per step"),
        ("  waiting for experts", f"{report.wait_microseconds:.1f} us per step"),
        ("largest gap between graphs", f"{report.largest_gap_microseconds:.1f} us"),
        (f"gaps over {GAP_LIMIT_US:.0f} us", f"{len(report.gaps_over_limit)}"),
        ("host functions", _named(report.host_functions)),
        ("blocking calls", _named(report.blocking_calls)),
    ]
    lines = [f"{name:<28} {value}" for name, value in rows]
    lines += [f"  gap after step {gap.step}: {gap.microseconds:.1f} us" for gap in report.gaps_over_limit]
    lines += [f"{time:10.1f} us  {name[:90]}" for name, time in report.longest_kernels.items()]
    return "\n".join(lines)


def _named(calls: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in calls.items()) or "none"
