"""What `moebius top` and `moebius profile` have to show of a served model, on a CPU and on a GPU alike."""

from __future__ import annotations

import contextlib
import json
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.cli import main
from lab.bench.steps import RING, WAIT
from tests.helpers.stack import Stack

# Microseconds. Within one clock nothing is off; CUPTI's times are converted from the GPU's clock.
_SLACK = {"cpu": 2.0, "cuda": 200.0}
_SHIFTS = (-50_000.0, -20_000.0, 20_000.0, 50_000.0)
_PAUSE_S = 0.08
Interval = tuple[float, float]


@contextlib.contextmanager
def bursts(stack: Stack, model: str) -> Iterator[None]:
    """Short requests with pauses between them: a trace whose parts have different clocks shows it there."""
    over, failures = threading.Event(), []

    def ask() -> None:
        body = {"model": model, "prompt": "a", "max_tokens": 4, "ignore_eos": True}
        with httpx.Client(timeout=300) as http:
            while not over.wait(_PAUSE_S):
                answer = http.post(f"{stack.base_url}/v1/completions", json=body)
                if answer.status_code != 200:
                    failures.append(answer.text)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failures


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns what `moebius …` prints; it has to end with status 0."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured.err
    return captured.out


def check_top(stack: Stack, model: str, layers: int, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of a second in which requests are computed, for scripts and for people."""
    with bursts(stack, model):
        looked = json.loads(command(capsys, "top", stack.base_url, "--interval", "1", "--once", "--json"))
        said = command(capsys, "top", stack.base_url, "--interval", "1", "--once")
        shown = json.loads(command(capsys, "experts", "show", stack.base_url, "--interval", "1", "--json"))
    figures = looked["figures"]
    assert figures["step"] > 0
    assert figures["experts_per_step"] > 0
    # Between two layers on a GPU no host code runs that could measure it.
    assert (figures["hand_off_per_call"] is not None) == (device == "cpu")
    assert len(figures["layers"]) == layers
    assert all(server["busy_share"] > 0 for server in figures["servers"])
    assert len(shown["layers"]) == layers
    assert all(layer["cpu_bytes_per_second"] > 0 for layer in shown["layers"])
    assert shown["costs"]["cpu_expert_seconds"] > 0
    scraped = httpx.get(f"{stack.base_url}/metrics").text
    assert "moebius:step_predicted_seconds_total" in scraped
    assert "moebius:step_measured_seconds_total" in scraped
    for part in ("tokens/s", "requests", "KV cache", "step", "CPU reads", "limited by", "experts' time"):
        assert part in said
    assert "none computed" not in said


def check_profile(
    stack: Stack, model: str, device: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One trace: the engine's operations or GPU kernels, hand-offs, every expert thread, on one clock."""
    trace, address = directory / "trace.json", f"unix:{next(stack.state_dir.glob('*/gpu.sock'))}"
    with bursts(stack, model):
        for _ in range(1 + (device == "cuda")):  # with CUDA graphs a second profile is as good as the first
            said = command(capsys, "profile", address, "--seconds", "1", "--output", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    engine = "GPU kernels" if device == "cuda" else "operations of the CPU"
    assert f"engine: {sum(event.get('cat') == _CATEGORY[device] for event in spans)} {engine}" in said
    _check_threads(events)
    calls = _kernel_calls(spans) if device == "cuda" else _noted_calls(spans)
    servers = [pid for pid, name in _processes(events).items() if name.startswith("expert server ")]
    assert len(servers) == 2
    for pid in servers:
        served = [_interval(event) for event in spans if event["pid"] == pid and _is_call(event)]
        first, last = calls[0][0], calls[-1][1]  # servers may look for longer than the engine does
        served = [span for span in served if first <= span[0] and span[1] <= last]
        assert len(served) > 20
        assert _share_within(calls, served, 0.0, _SLACK[device]) > 0.95
        for shift in _SHIFTS:
            assert _share_within(calls, served, shift, _SLACK[device]) < 0.8, "these clocks could be any"


_CATEGORY = {"cpu": "cpu_op", "cuda": "kernel"}


def _check_threads(events: Sequence[dict[str, Any]]) -> None:
    """Each server's threads have names, and their work lies on them, by expert."""
    for pid, name in _processes(events).items():
        if not name.startswith("expert server "):
            continue
        own = [event for event in events if event["pid"] == pid]
        named = {
            event["tid"]: event["args"]["name"]
            for event in own
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        worked = {event["tid"] for event in own if event["ph"] == "X" and "expert" in event["args"]}
        assert worked
        assert {named[tid] for tid in worked} <= {f"thread {tid}" for tid in worked}


def _processes(events: Sequence[dict[str, Any]]) -> dict[int, str]:
    return {
        event["pid"]: event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "process_name"
    }


def _is_call(event: dict[str, Any]) -> bool:
    return bool(event["name"].startswith("layer "))


def _interval(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _noted_calls(spans: Sequence[dict[str, Any]]) -> list[Interval]:
    """Returns what the engine's host code noted, in one row of the trace."""
    pid = min(event["pid"] for event in spans if event.get("cat") == "experts")
    return sorted(_interval(event) for event in spans if (event["pid"], event["tid"]) == (pid, 0))


def _kernel_calls(spans: Sequence[dict[str, Any]]) -> list[Interval]:
    """Returns the calls of the mailbox's kernels: from the first that rings to the last that waits before the
    next rings.
    """
    kernels = [event for event in spans if event.get("cat") == "kernel"]
    handing = sorted(
        (*_interval(event), RING in event["name"])
        for event in kernels
        if RING in event["name"] or WAIT in event["name"]
    )
    assert len(kernels) > len(handing) > 20
    found: list[list[float]] = []
    has_waited = True
    for begin, end, rings in handing:
        if rings and has_waited:
            found.append([begin, begin])
        if not rings and found:
            found[-1][1] = end
        has_waited = not rings
    return [(begin, end) for begin, end in found if end > begin]


def _share_within(calls: Sequence[Interval], served: Sequence[Interval], shift: float, slack: float) -> float:
    """Returns the share of `served`, moved by `shift`, that lies within the last call that had begun."""
    begins = [begin for begin, _ in calls]
    within = 0
    for begin, end in served:
        index = bisect_right(begins, begin + shift + slack) - 1
        within += index >= 0 and end + shift <= calls[index][1] + slack
    return within / len(served)
