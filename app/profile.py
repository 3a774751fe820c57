"""`moebius profile`: one Chrome trace of a running engine and its expert servers, which Perfetto shows.

What the engine sends are pieces: the trace of torch's profiler as text, and times of expert threads and of
calls to them by CLOCK_MONOTONIC. All of it is put on one clock here, so that the serving processes need not.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moebius.errors import UserError
from moebius.kernels import SPAN_FIELDS, SPAN_KINDS
from protos import engine_pb2 as pb

# Processes of the trace that are none of the engine's host: beyond any process id.
_CALLS_PID, _SERVERS_PID = 10_000_000, 10_000_001
_BASE = re.compile(r'"baseTimeNanoseconds":\s*(\d+)')
_EVENTS = re.compile(r'"traceEvents":\s*\[')


def chrome_trace(answer: pb.ProfileResponse) -> str:
    """Returns the document. Raises UserError when torch's part is no trace that we know."""
    text = gzip.decompress(answer.torch_trace).decode() if answer.torch_trace else ""
    if not text:
        base_ns = _first_ns(answer)
        events = ",\n".join(_own_events(answer, base_ns))
        return (
            f'{{"displayTimeUnit": "ms", "baseTimeNanoseconds": {base_ns}, "traceEvents": [\n{events}\n]}}\n'
        )
    base, start = _BASE.search(text), _EVENTS.search(text)
    if base is None or start is None:
        raise UserError("the engine's torch wrote a trace without baseTimeNanoseconds or traceEvents")
    events = "".join(f"{event},\n" for event in _own_events(answer, int(base[1])))
    return f"{text[: start.end()]}\n{events}{text[start.end() :]}"


def _first_ns(answer: pb.ProfileResponse) -> int:
    """Returns Unix nanoseconds of the first event; times in a trace are better small."""
    begins = [
        int(spans[:, SPAN_FIELDS.index("begin_ns")].min()) + server.clock_offset_ns
        for server in answer.servers
        if len(spans := _spans(server))
    ]
    calls = _calls(answer)
    if len(calls):
        begins.append(int(calls[:, 2].min()))
    return min(begins, default=answer.engine_end_ns) + answer.unix_offset_ns


def _spans(server: pb.ExpertSpans) -> Any:
    return np.frombuffer(server.spans, "<i8").reshape(-1, len(SPAN_FIELDS))


def _calls(answer: pb.ProfileResponse) -> Any:
    return np.frombuffer(answer.calls, "<i8").reshape(-1, 5)


def _own_events(answer: pb.ProfileResponse, base_ns: int) -> Iterator[str]:
    """Everything that torch does not know, as JSON objects."""
    to_base = answer.unix_offset_ns - base_ns
    calls = _calls(answer)
    if len(calls):
        yield from _names(_CALLS_PID, "calls to expert servers", {0: "in flight", 1: "waited for"}, -1)
        for layer, rows, submitted, collecting, collected in calls.tolist():
            arguments = {"layer": layer, "rows": rows}
            name = f"layer {layer}"
            # The next layer is submitted when this one is collected: one row shows them all.
            yield _event(_CALLS_PID, 0, name, submitted + to_base, collected + to_base, arguments)
            yield _event(_CALLS_PID, 1, name, collecting + to_base, collected + to_base, arguments)
    for server in answer.servers:
        yield from _server_events(server, to_base)
    if answer.engine_end_ns:
        # A mark across the whole picture, where what is missing begins to be missing.
        for note in answer.notes:
            mark = {"ph": "i", "s": "g", "cat": "experts", "name": note, "pid": _CALLS_PID, "tid": 0}
            yield json.dumps({**mark, "ts": (answer.engine_end_ns + to_base) / 1e3})


def _server_events(server: pb.ExpertSpans, to_base: int) -> Iterator[str]:
    pid, offset = _SERVERS_PID + server.index, to_base + server.clock_offset_ns
    names = {worker: f"thread {worker}" for worker in range(server.num_threads)}
    names[server.num_threads] = "calls"
    yield from _names(pid, f"expert server {server.index}", names, 1 + server.index)
    for kind, worker, layer, expert, rows, begin, end in _spans(server).tolist():
        what = SPAN_KINDS[kind] if 0 <= kind < len(SPAN_KINDS) else f"kind {kind}"
        name = f"layer {layer}" if what == "call" else what if expert < 0 else f"{what} expert {expert}"
        arguments = {"layer": layer, "rows": rows, **({} if expert < 0 else {"expert": expert})}
        yield _event(pid, worker, name, begin + offset, end + offset, arguments)


def _event(pid: int, tid: int, name: str, begin_ns: int, end_ns: int, arguments: dict[str, int]) -> str:
    times = {"ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
    return json.dumps(
        {"ph": "X", "cat": "experts", "name": name, "pid": pid, "tid": tid, **times, "args": arguments}
    )


def _names(pid: int, process: str, threads: dict[int, str], order: int) -> Iterator[str]:
    def named(what: str, tid: int, key: str, value: str | int) -> str:
        return json.dumps({"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {key: value}})

    yield named("process_name", 0, "name", process)
    yield named("process_sort_index", 0, "sort_index", order)
    for tid, name in threads.items():
        yield named("thread_name", tid, "name", name)
        yield named("thread_sort_index", tid, "sort_index", tid)


def summary(answer: pb.ProfileResponse) -> list[str]:
    """Returns the lines for people: what is in the trace, what is not."""
    lines = []
    if answer.torch_trace:
        trace = gzip.decompress(answer.torch_trace)
        kernels, copies = trace.count(b'"cat": "kernel"'), trace.count(b'"cat": "gpu_mem')
        on_gpu = f"{kernels} GPU kernels, {copies} copies, " if kernels or copies else ""
        operations = trace.count(b'"cat": "cpu_op"')
        lines.append(f"engine: {on_gpu}{operations} operations of the CPU")
    if len(_calls(answer)):
        lines.append(f"{len(_calls(answer))} calls to expert servers")
    for server in answer.servers:
        missing = f", {server.dropped} more were too many" if server.dropped else ""
        clock = f", clock set by {server.clock_offset_ns / 1e6:.3f} ms" if server.clock_offset_ns else ""
        spans = len(_spans(server))
        lines.append(
            f"expert server {server.index}: {spans} spans of {server.num_threads} threads{missing}{clock}"
        )
    if answer.servers and not any(server.spans for server in answer.servers):
        lines.append("no expert server was asked meanwhile: send requests while a profile runs")
    return [*lines, *answer.notes]


def check_output(path: Path) -> None:
    """Raises UserError, before anything is watched, when no trace can be written there."""
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        reason = "it is a directory" if path.is_dir() else f"{place} is not there, or not writable"
        raise UserError(f"--output: {path} cannot be written: {reason}")


def write_trace(answer: pb.ProfileResponse, path: Path) -> None:
    """Writes the document, compressed where the name ends in .gz. Raises UserError."""
    content = chrome_trace(answer).encode()
    try:
        path.write_bytes(gzip.compress(content, compresslevel=4) if path.suffix == ".gz" else content)
    except OSError as error:
        raise UserError(f"--output: {path} cannot be written: {error.strerror}") from None
