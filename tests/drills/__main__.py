"""`python -m tests.drills DRILL`: one drill; prints a table and a JSON row; status 1 for a broken promise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tests.drills import (
    again,
    crash,
    files,
    freeze,
    grammars,
    kill,
    malformed,
    memory,
    replace,
    residents,
    soak,
)
from tests.drills.report import Report

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
Duration = Annotated[float, typer.Option(help="Seconds of faults (freeze: that each process is stopped)")]
Period = Annotated[float, typer.Option(help="Seconds between two faults")]
Streams = Annotated[int, typer.Option(min=1, help="Greedy streams at once")]
Seed = Annotated[int, typer.Option(help="Of what is sent")]
Output = Annotated[Path | None, typer.Option(help="File that the JSON row is appended to")]


@app.command("kill")
def run_kill(
    duration: Duration = 600, period: Period = 10, streams: Streams = 16, output: Output = None
) -> None:
    """kill -9 of expert-0, expert-1 and both, in turn: 0 failed, 0 wrong, none slower than 15 s."""
    report = Report("kill", {"duration": duration, "period": period, "streams": streams})
    kill.run(report, duration, period, streams)
    raise typer.Exit(report.finish(output))


@app.command("again")
def run_again(
    rounds: Annotated[int, typer.Option(help="Second kills, right after the return from the first")] = 100,
    others: Annotated[int, typer.Option(help="Of each other second fault")] = 6,
    streams: Streams = 8,
    hang_timeout: Annotated[float, typer.Option(help="hang_timeout_s of the supervisor")] = 5,
    output: Output = None,
) -> None:
    """A second fault while the engine recovers from a first one: 0 failed, 0 wrong."""
    settings = {"rounds": rounds, "others": others, "streams": streams, "hang_timeout": hang_timeout}
    report = Report("again", settings)
    again.run(report, rounds, others, streams, hang_timeout)
    raise typer.Exit(report.finish(output))


@app.command("freeze")
def run_freeze(
    duration: Duration = 60,
    period: Period = 5,
    streams: Streams = 8,
    hang_timeout: Annotated[float, typer.Option(help="hang_timeout_s of the supervisor")] = 30,
    output: Output = None,
) -> None:
    """SIGSTOP of each process: replaced, nothing hangs; of servers and supervisor no request fails."""
    settings = {"duration": duration, "period": period, "streams": streams, "hang_timeout": hang_timeout}
    report = Report("freeze", settings)
    freeze.run(report, duration, period, streams, hang_timeout)
    raise typer.Exit(report.finish(output))


@app.command("crash")
def run_crash(
    duration: Duration = 300, period: Period = 5, streams: Streams = 8, output: Output = None
) -> None:
    """kill -9 of engine and gateway: clean errors, service returns, nothing is left."""
    report = Report("crash", {"duration": duration, "period": period, "streams": streams})
    crash.run(report, duration, period, streams)
    raise typer.Exit(report.finish(output))


@app.command("replace")
def run_replace(
    duration: Duration = 60, period: Period = 5, streams: Streams = 4, output: Output = None
) -> None:
    """The checkpoint is replaced on disk, then an expert server is killed: refused by name, no wrong text."""
    report = Report("replace", {"duration": duration, "period": period, "streams": streams})
    replace.run(report, duration, period, streams)
    raise typer.Exit(report.finish(output))


@app.command("files")
def run_files(period: Period = 5, streams: Streams = 4, output: Output = None) -> None:
    """Files of the model are replaced one by one, who reads them is killed: named, never another text."""
    report = Report("files", {"period": period, "streams": streams})
    files.run(report, period, streams)
    raise typer.Exit(report.finish(output))


@app.command("memory")
def run_memory(
    duration: Duration = 300, period: Period = 3, streams: Streams = 8, seed: Seed = 1, output: Output = None
) -> None:
    """Bits of packed experts flip, or become NaN: found and repaired, no wrong text once it is known."""
    settings = {"duration": duration, "period": period, "streams": streams, "seed": seed}
    report = Report("memory", settings)
    memory.run(report, duration, period, streams, seed)
    raise typer.Exit(report.finish(output))


@app.command("residents")
def run_residents(
    duration: Duration = 120, period: Period = 3, streams: Streams = 8, seed: Seed = 1, output: Output = None
) -> None:
    """Runs the drill `memory` for experts that the engine holds itself, with the host as its device."""
    settings = {"duration": duration, "period": period, "streams": streams, "seed": seed}
    report = Report("residents", settings)
    residents.run(report, duration, period, streams, seed)
    raise typer.Exit(report.finish(output))


@app.command("soak")
def run_soak(
    duration: Duration = 1800,
    period: Annotated[float, typer.Option(help="Seconds between two quiet moments")] = 30,
    seed: Seed = 1,
    output: Output = None,
) -> None:
    """Mixed load with aborts and disconnects: memory, descriptors, threads, KV pages, shared memory flat."""
    report = Report("soak", {"duration": duration, "period": period, "seed": seed})
    soak.run(report, duration, period, seed)
    raise typer.Exit(report.finish(output))


@app.command("grammars")
def run_grammars(
    duration: Duration = 60,
    clients: Annotated[int, typer.Option(min=1, help="Clients that send grammars of seconds")] = 4,
    output: Output = None,
) -> None:
    """Grammars of 56 KB that take seconds to compile: small requests are answered, /ready stays true."""
    report = Report("grammars", {"duration": duration, "clients": clients})
    grammars.run(report, duration, clients)
    raise typer.Exit(report.finish(output))


@app.command("malformed")
def run_malformed(
    requests: Annotated[int, typer.Option(min=60, help="Malformed things to send")] = 100_000,
    seed: Seed = 1,
    output: Output = None,
) -> None:
    """HTTP bodies, broken HTTP, gRPC messages, headers of files: no 5xx, no hang, no growth, no crash."""
    report = Report("malformed", {"requests": requests, "seed": seed})
    malformed.run(report, requests, seed)
    raise typer.Exit(report.finish(output))


if __name__ == "__main__":
    app()
