"""`moebius bench steps`: what a GPU does in ten decode steps, from the profiler's own events.

Events are those of the Chrome trace format that torch.profiler exports: "X" events with `cat`, `name`, `ts`
and `dur` in microseconds, and `args.correlation`, which GPU work shares with the call that launched it.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.bench.bounds import facts
from app.bench.output import write_json
from lab.bench.engine.drive import EngineUnderTest, running_engine
from lab.bench.engine.measure import random_prompts
from lab.bench.engine.run import EngineBenchOptions, with_room
from lab.bench.engine.servers import running_servers
from moebius.config import MoebiusConfig
from moebius.errors import UserError

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CATEGORIES = ("cuda_runtime", "cuda_driver")
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
# Calls that make the GPU wait for a function on the host.
HOST_FUNCTIONS = ("LaunchHostFunc", "StreamAddCallback", "GraphAddHostNode")
# Calls that make the host wait for the GPU or allocate.
BLOCKING = ("Synchronize", "cudaMalloc", "cudaFree", "cuMemAlloc", "cuMemFree")

# Kernels of the hand-off to expert servers (gpu_service/experts/doorbell/doorbell.cu).
RING, WAIT = "pack_and_ring", "wait_and_add"


@dataclass(frozen=True, slots=True)
class Span:
    """One event, microseconds; filled by `read_events`."""

    category: str
    name: str
    begin: float
    end: float
    correlation: int  # -1: the event has none.


@dataclass(frozen=True, slots=True)
class GraphRun:
    """One graph launch and the time its work took on the GPU; filled by `graph_runs`."""

    launched: float
    begin: float
    end: float
    kernels: int


def load_trace(path: Path) -> list[Span]:
    """Returns the events of a trace file. Raises UserError when it is none."""
    try:
        document = json.loads(path.read_bytes())
        return read_events(document["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a profiler trace: {error}") from None


def read_events(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    """GPU work and CUDA calls, by begin."""
    wanted = GPU_CATEGORIES + HOST_CATEGORIES
    spans = [
        Span(
            str(event["cat"]),
            str(event["name"]),
            float(event["ts"]),
            float(event["ts"]) + float(event.get("dur", 0.0)),
            int((event.get("args") or {}).get("correlation", -1)),
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in wanted
    ]
    return sorted(spans, key=lambda span: span.begin)


def graph_runs(spans: Sequence[Span]) -> list[GraphRun]:
    """Returns all graph launches that caused GPU work, in order."""
    launches = {
        span.correlation: span
        for span in spans
        if span.category in HOST_CATEGORIES and span.name.startswith(GRAPH_LAUNCHES)
    }
    work: dict[int, list[Span]] = {}
    for span in spans:
        if span.category in GPU_CATEGORIES and span.correlation in launches:
            work.setdefault(span.correlation, []).append(span)
    runs = [
        GraphRun(
            launches[correlation].begin,
            min(span.begin for span in done),
            max(span.end for span in done),
            sum(span.category == "kernel" for span in done),
        )
        for correlation, done in work.items()
    ]
    return sorted(runs, key=lambda run: run.begin)


def busy_intervals(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Returns the times in which at least one stream of the GPU works, joined where they touch or overlap."""
    joined: list[tuple[float, float]] = []
    work = [span for span in spans if span.category in GPU_CATEGORIES]
    for span in sorted(work, key=lambda span: span.begin):
        if joined and span.begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], span.end))
        else:
            joined.append((span.begin, span.end))
    return joined


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
    gpu_busy_share: float  # Waiting for expert servers counts as work: a kernel spins.
    # Per step: handing rows to expert servers, and waiting for their answers.
    ring_microseconds: float
    wait_microseconds: float
    # Longest idle time between one graph's last work and the next one's first, other GPU work taken out.
    largest_gap_microseconds: float
    gaps_over_limit: list[Gap]
    # Host functions and blocking calls within the steps, by name.
    host_functions: dict[str, int]
    blocking_calls: dict[str, int]
    longest_kernels: dict[str, float]  # The names that take most GPU time, microseconds per step.

    @property
    def passed(self) -> bool:
        """Returns whether the CPU was no part of any step."""
        return not self.gaps_over_limit and not self.host_functions


def summarise(spans: Sequence[Span], steps: int) -> StepsReport:
    """Summarises the last `steps` whole steps, each from its graph's first work to the next one's.

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
    """Returns the longest idle interval between each two graphs."""
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
    """Returns the profile as a table for people."""
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


# Steps that are not summarised: the first ones after a prefill, and those launched before the end.
_SPARE_STEPS = 12


@dataclass(frozen=True)
class StepsOptions:
    """Filled by the command line."""

    streams: int = 1
    steps: int = 10
    prompt_len: int = 64
    temperature: float = 0.0
    trace_file: Path | None = None  # Where the trace is kept, for a trace viewer; None: nowhere.


def run(config: MoebiusConfig, options: StepsOptions, json_file: Path | None = None) -> StepsReport:
    """Raises UserError on a machine without a GPU, and what `moebius serve` would refuse."""
    from gpu_service.assembly.process import resolve_device

    device = resolve_device(config.gpu)
    if device.type != "cuda":
        raise UserError("moebius bench steps looks at a GPU's work; there is none here, or device is 'cpu'")
    config = with_room(config, EngineBenchOptions(streams=(options.streams,)))
    with tempfile.TemporaryDirectory(prefix="moebius-steps-") as directory:
        path = options.trace_file or Path(directory) / "trace.json"
        with running_servers(config) as servers, running_engine(servers.config) as engine:
            profile_decode(engine, options, path)
        report = summarise(load_trace(path), options.steps)
    print(table(report))
    if json_file is not None:
        summary = {"passed": report.passed, "streams": options.streams}
        write_json({"host": facts(device)} | summary | asdict(report), json_file)
    return report


def profile_decode(engine: EngineUnderTest, options: StepsOptions, path: Path) -> None:
    """Writes the trace of one run; an unprofiled one before pays for everything that happens once."""
    from torch.profiler import ProfilerActivity, profile

    tokens = options.steps + _SPARE_STEPS
    vocab_size = engine.built.model_config.vocab_size
    for seed in (7, 8):
        prompts = random_prompts(options.streams, options.prompt_len, vocab_size, seed)
        if seed == 7:
            engine.submit(prompts, tokens, options.temperature).wait(tokens)
            continue
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            engine.submit(prompts, tokens, options.temperature).wait(tokens)
        profiler.export_chrome_trace(str(path))
