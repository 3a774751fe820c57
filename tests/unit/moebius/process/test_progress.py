"""Guards what people see of a start: nothing of quick phases, how far long ones are, what is waited for."""

from __future__ import annotations

import gc
import io
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import structlog
from rich.console import Console
from structlog.testing import capture_logs

from app.cli_options import log_warnings_only
from app.commands.running import BarView, LineView, start_display
from app.supervisor.supervisor import Supervisor
from moebius.config import TelemetryConfig
from moebius.process import progress
from moebius.process.progress import (
    counted,
    is_end_of_phase,
    note_imports,
    phase,
    take_phases,
    text_of_line,
)
from moebius.telemetry import configure_logging
from tests.helpers.fake_programs import OBEDIENT, QUICK, plan, spec
from tests.helpers.waiting import wait_until


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Puts the test process's own logging set-up back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level
    logging.getLogger(progress.__name__).setLevel(logging.NOTSET)
    structlog.reset_defaults()


def test_a_quick_phase_says_nothing() -> None:
    """A quick phase logs nothing, neither while it runs nor at its end; its time is kept for the summary."""
    take_phases()
    with capture_logs() as logs:
        assert list(counted("ab", "reading", 2)) == ["a", "b"]
        with phase("reading"):
            pass
    assert logs == []
    assert list(take_phases()) == ["reading"]
    assert take_phases() == {}


def test_a_long_phase_says_how_far_it_is_while_its_work_blocks() -> None:
    """Lines come from another thread: the work may be one call that returns at the end."""
    with capture_logs() as logs:
        with phase("loading", 17_000_000_000, "GB", first_s=0.01) as progress:
            threads = [threading.Thread(target=progress.advance, args=(1_300_000_000,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wait_until(lambda: logs)
            before = len(logs)
            wait_until(lambda: len(logs) > before)
        events = [line["event"] for line in logs]
    assert re.fullmatch(r"loading, 5\.2 of 17\.0 GB, \d+ s", text_of_line(events[before]) or "")
    assert re.fullmatch(r"finished: loading, 5\.2 of 17\.0 GB, \d+ s", events[-1])


def test_a_phase_that_fails_ends() -> None:
    """An error passes through, and nothing is said of the phase afterwards."""

    def fail(logs: list[structlog.typing.EventDict]) -> None:
        with phase("loading", first_s=0.01):
            wait_until(lambda: logs)
            raise ValueError("damaged")

    with capture_logs() as logs:
        with pytest.raises(ValueError, match="damaged"):
            fail(logs)
        count = len(logs)
        time.sleep(0.05)
        assert len(logs) == count


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("log_format", ["console", "json"])
def test_lines_are_found_in_a_process_output(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rendered as any process does, progress is found as its text alone, and other lines are not."""
    configure_logging(TelemetryConfig(log_format=log_format), "gpu")  # type: ignore[arg-type]
    written, end = "", time.monotonic() + 60
    with phase("compiling modules", 4, first_s=0.01) as progress:
        progress.advance(3)
        while "3 of 4" not in written:
            assert time.monotonic() < end, written
            time.sleep(0.01)
            written += capsys.readouterr().err
    structlog.get_logger("moebius.test").info("kernels calibrated", seconds=3)
    lines = (written + capsys.readouterr().err).splitlines()
    # On a busy machine the first line may come before the advance.
    assert re.fullmatch(r"compiling modules, [03] of 4, \d+ s", text_of_line(lines[0]) or "")
    assert re.fullmatch(r"compiling modules, 3 of 4, \d+ s", text_of_line(lines[-3]) or "")
    assert [text_of_line(line) for line in lines[-2:]] == [None, None]
    assert [is_end_of_phase(line) for line in lines[-2:]] == [True, False]


def test_imports_count_from_the_process_start() -> None:
    """The interpreter and its imports are part of a start, though no code of ours runs yet."""
    take_phases()
    note_imports()
    assert 0 < take_phases()["starting Python"] < 100_000


def test_waiting_is_shown_at_new_phases_and_now_and_then() -> None:
    """A line when somebody begins a phase, else one every ten seconds; the text says since when."""
    now, lines = [100.0], list[str]()
    view = LineView(lines.append, clock=lambda: now[0])
    for seconds, text in ((1, ""), (3, "loading, 1 of 4, 2 s"), (5, "loading, 2 of 4, 4 s")):
        now[0] = 100.0 + seconds
        view.on_waiting({"gpu": text, "gateway": ""})
    assert lines == ["waiting for gpu (loading, 1 of 4, 2 s), gateway; 3 s since the start"]
    now[0] = 106.0
    view.on_waiting({"gpu": "compiling, 2 s"})
    now[0] = 107.0
    view.on_waiting({"gpu": "capturing, 2 s"})
    now[0] = 117.0
    view.on_waiting({"gpu": "capturing, 12 s"})
    assert [line.partition(" s)")[0] for line in lines[1:]] == [
        "waiting for gpu (compiling, 2",
        "waiting for gpu (capturing, 12",
    ]


def bars(names: list[str]) -> tuple[BarView, Console]:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    return BarView(start_display(console), names), console


def text_of(view: BarView) -> list[str]:
    """Returns the lines that stand on the terminal now."""
    plain = Console(file=io.StringIO(), width=80, color_system=None)
    plain.print(view.display.get_renderable())
    assert isinstance(plain.file, io.StringIO)
    return plain.file.getvalue().splitlines()


def test_a_terminal_has_a_line_for_each_process() -> None:
    """How far its phase is as a bar, then that it is ready; nothing wider than 80 columns."""
    view, _ = bars(["expert-0", "gpu"])
    view.on_event("expert-0", "starting")
    view.on_event("gpu", "starting")
    view.on_waiting(
        {"expert-0": "packing experts, 1.0 of 4.0 GB, 3 s", "gpu": "compiling kernels, 3 of 4, 2 s"}
    )
    expert, gpu = text_of(view)
    assert expert.count("━") == 4  # of 16
    assert "packing experts, 1.0 of 4.0 GB, 3 s" in expert
    shares = [task.percentage for task in view.display.tasks]
    assert shares == [25, 75]
    view.on_waiting({"gpu": "warming attention up, 2 s"})
    assert view.display.tasks[1].total is None
    view.on_event("expert-0", "ready")
    expert, gpu = text_of(view)
    assert expert.startswith("✓ expert-0")
    assert "ready" in expert
    assert "warming attention up" in gpu
    assert max(map(len, text_of(view))) <= 80


def test_log_lines_do_not_disturb_the_terminal() -> None:
    """Warnings and what is no log line are shown at once, the others only if the start fails."""
    view, console = bars(["gpu"])
    info = "gpu      | 21:15:46 [info     ] starting something [x] a=1"
    warning = "gpu      | 21:15:46 [warning  ] odd [x]"
    for line in (info, warning, "gpu      | Traceback (most recent call last):"):
        view.on_line("gpu", line)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [warning, "gpu      | Traceback (most recent call last):"]
    view.on_failure(["gpu"])
    assert console.file.getvalue().splitlines()[-1] == info


# Is ready once its lines were seen, which the test says.
SLOW = """
import pathlib, sys, time
print("12:00:00 [info     ] in progress: packing experts, 1.0 of 2.0 GB, 3 s [moebius.process.progress]")
print("12:00:00 [info     ] something else [x]", flush=True)
while not pathlib.Path(sys.argv[1]).with_name("seen").exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("shown", [True, False])
def test_the_supervisor_shows_what_a_process_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], shown: bool
) -> None:
    """Where progress is displayed its lines are not repeated; elsewhere they are forwarded."""
    seen: list[dict[str, str]] = []

    def on_waiting(waiting: Mapping[str, str]) -> None:
        seen.append(dict(waiting))
        if "packing experts" in waiting.get("expert", ""):
            (tmp_path / "seen").touch()

    if not shown:
        (tmp_path / "seen").touch()
    one = plan(tmp_path, spec("expert", SLOW + OBEDIENT, tmp_path, stop_stage=0))
    with Supervisor(one, QUICK, on_waiting=on_waiting if shown else None) as supervisor:
        assert supervisor.wait_ready()
    output = capfd.readouterr().err
    assert ("packing experts" in output) is not shown
    assert "something else" in output
    if shown:
        assert {"expert": "packing experts, 1.0 of 2.0 GB, 3 s"} in seen


def test_lines_go_to_the_view_until_the_start_has_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They would be written over it; afterwards they are forwarded as ever."""
    lines: list[tuple[str, str]] = []

    def on_line(name: str, line: str) -> None:
        lines.append((name, line))
        if "something else" in line:
            (tmp_path / "seen").touch()

    one = plan(tmp_path, spec("expert", SLOW + OBEDIENT, tmp_path, stop_stage=0))
    with Supervisor(one, QUICK, on_line=on_line) as supervisor:
        assert supervisor.wait_ready()
        supervisor.silence_events()
        assert all(process.on_line is None for process in supervisor.processes)
    assert ("expert", True) in [(name, "something else" in line) for name, line in lines]
    assert "something else" not in capfd.readouterr().err


def test_what_was_imported_is_not_looked_at_again() -> None:
    """The collector, off while a service is imported, is on afterwards, and leaves the modules alone."""
    gc.disable()
    try:
        note_imports()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.enable()


def test_a_benchmark_shows_phases_and_no_other_information(
    restored_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start that compiles for minutes says so, where the command's own output is all else that is shown."""
    log_warnings_only("bench")
    structlog.get_logger("gpu_service.main").info("ready")
    shown, end = "", time.monotonic() + 60
    with phase("running the first steps", first_s=0.01):
        while "in progress: running the first steps" not in shown:
            assert time.monotonic() < end, shown
            time.sleep(0.01)
            shown += capsys.readouterr().err
    shown += capsys.readouterr().err
    assert "ready" not in shown
