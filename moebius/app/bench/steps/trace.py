"""Reads a profiler's trace: which GPU work each graph launch caused, when the GPU idled, what the host did.

Events are those of the Chrome trace format that torch.profiler exports: "X" events with `cat`, `name`, `ts`
and `dur` in microseconds, and `args.correlation`, which GPU work shares with the call that launched it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    # -1: the event has none.
    correlation: int


@dataclass(frozen=True, slots=True)
class GraphRun:
    """One graph launch and the time its work took on the GPU; filled by `graph_runs`."""

    launched: float
    begin: float
    end: float
    kernels: int


def load_trace(path: Path) -> list[Span]:
    """The events of a trace file. Raises UserError when it is none."""
    try:
        document = json.loads(path.read_bytes())
        return read_events(document["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no profiler trace: {error}") from None


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
    """All graph launches that caused GPU work, in order."""
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
    """Times in which at least one stream of the GPU works, joined where they touch or overlap."""
    joined: list[tuple[float, float]] = []
    work = [span for span in spans if span.category in GPU_CATEGORIES]
    for span in sorted(work, key=lambda span: span.begin):
        if joined and span.begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], span.end))
        else:
            joined.append((span.begin, span.end))
    return joined
