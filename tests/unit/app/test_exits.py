"""Guards how commands end: by signals at any moment, by readers that go away, and with which status."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer

from app.commands.once import ask_once
from app.exits import TOGETHER_S, EndingSignals, exit_with
from moebius.errors import USER_ERROR_EXIT

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 60

# Cleans up for longer than two signals are apart. Waits in short sleeps: a signal that comes after Python has
# looked for one, and before the system's call has begun, is seen when that call returns.
SLOW_TO_CLEAN_UP = """
import pathlib, sys, time
from app import exits
exits.TOGETHER_S = 60.0  # however long the sender of two signals waits for a processor between them
def run():
    try:
        print("runs", flush=True)
        while True:
            time.sleep(0.01)
    finally:
        time.sleep(0.2)
        pathlib.Path(sys.argv[1]).touch()
exits.exit_with(run)
"""

# As a lost device has it: what an engine holds aborts the process when it is freed.
LOST = """
import os
from app.exits import exit_with
from moebius.errors import EngineLost
class Held:
    def __del__(self):
        os.abort()
held = Held()
def run():
    raise EngineLost("the engine is lost: its log says where")
exit_with(run)
"""

# The first module that `main` imports takes its time.
SLOW_TO_IMPORT = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "app.exits":
            print("imports", flush=True)
            time.sleep(60)
from moebius.__main__ import main
sys.meta_path.insert(0, Slow())
main()
"""


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Returns the program after its first line, with the signals that a shell's foreground job has.

    What ignores them, as nohup does, has children that ignore them too. `env` and no `preexec_fn`: that runs
    between fork and exec, which libraries with threads of their own do not survive.
    """
    process = subprocess.Popen(
        ["env", "--default-signal=INT,HUP", sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


@pytest.mark.parametrize(
    ("number", "times", "status"),
    [(signal.SIGINT, 1, 130), (signal.SIGINT, 2, 130), (signal.SIGTERM, 1, 143), (signal.SIGHUP, 1, 129)],
)
def test_a_signal_lets_a_command_clean_up(tmp_path: Path, number: int, times: int, status: int) -> None:
    """What the command made is removed whatever ends it, also twice within a millisecond, and nothing is
    said.
    """
    cleaned = tmp_path / "cleaned"
    process = started(SLOW_TO_CLEAN_UP, str(cleaned))
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.001)
    _, said = process.communicate(timeout=WAIT_S)
    assert (process.returncode, said, cleaned.exists()) == (status, "", True)


def test_an_interrupt_while_modules_are_imported_says_nothing() -> None:
    """Ctrl-C half a second after typing a command ends it at once, without a traceback of imports."""
    process = started(SLOW_TO_IMPORT)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=WAIT_S)
    assert (process.returncode, said) == (-signal.SIGINT, "")


def test_signals_close_together_are_one() -> None:
    """Only a signal that comes later interrupts again, as a dialogue and an impatient user need it."""
    now = 100.0
    signals = EndingSignals(lambda: now)
    with pytest.raises(KeyboardInterrupt):
        signals.handle(signal.SIGINT, None)
    signals.handle(signal.SIGINT, None)
    now += 1.01 * TOGETHER_S
    with pytest.raises(SystemExit) as ended:
        signals.handle(signal.SIGTERM, None)
    assert ended.value.code == signals.status == 143


def test_an_error_that_a_signal_caused_is_no_defect() -> None:
    """A library that turns the interruption into an error of its own does not cause a traceback."""
    # A job in the background of a script ignores it, and so does what the job starts.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)

    def run() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise RuntimeError("import failed") from error

    try:
        with pytest.raises(SystemExit) as ended:
            exit_with(run)
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert ended.value.code == 130


def test_a_defect_long_after_an_interrupt_keeps_its_traceback() -> None:
    """A dialogue that went on after Ctrl-C does not hide what breaks later."""
    now = 0.0
    signals = EndingSignals(lambda: now)
    with pytest.raises(KeyboardInterrupt):
        signals.handle(signal.SIGINT, None)
    now += 10
    assert not signals.explains(ZeroDivisionError())


def test_handlers_are_given_back_and_ignored_signals_stay_ignored() -> None:
    """`nohup` keeps its meaning, and a caller of `exit_with` has its own handlers again."""
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            exit_with(lambda: signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and 7)
        assert ended.value.code == 7
        assert signal.getsignal(signal.SIGINT) == interrupt
    finally:
        signal.signal(signal.SIGHUP, hangup)


# Since Python 3.12 a fork of a process with threads warns; the child does nothing but look.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_ends_by_signals_as_any_process() -> None:
    """A benchmark's child process does not clean up what belongs to its parent."""
    signals = EndingSignals()
    with signals.handled():
        child = os.fork()
        if not child:
            os._exit(0 if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert signal.getsignal(signal.SIGTERM) == signals.handle


PRINTS_BY_RICH = """
from rich.console import Console
from app.exits import exit_with
exit_with(lambda: Console().print("a table"))
"""


@pytest.mark.parametrize("arguments", [["-m", "moebius", "version"], ["-c", PRINTS_BY_RICH]])
def test_a_reader_that_goes_away_ends_a_command_silently(arguments: list[str]) -> None:
    """`moebius plan MODEL | head -1` says nothing of broken pipes, and has the status that all programs have,
    whichever library printed."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("{python} -m moebius topology >/dev/full", "no room left to write the output"),
        ("PYTHONUNBUFFERED=1 {python} -m moebius topology >/dev/full", "no room left to write the output"),
        ("{python} -m moebius --help >/dev/full", "no room left to write the output"),
        (
            "mkdir {gone} && cd {gone} && rmdir {gone} && {python} -m moebius plan x",
            "working directory was deleted",
        ),
        ("{python} -m moebius topology >&-", ""),
        ("{python} -m moebius topology >/dev/null 2>&-", ""),
    ],
)
def test_what_the_system_lacks_is_one_line(tmp_path: Path, script: str, said: str) -> None:
    """A full disk, a directory that is gone and streams that are closed are no defects: no traceback."""
    command = script.format(python=f"'{sys.executable}'", gone=f"'{tmp_path}/gone'")
    ended = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
    )
    assert said in ended.stderr
    assert ended.stderr.count("\n") == (1 if said else 0)
    assert ended.returncode == (USER_ERROR_EXIT if said else 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_system_for_one_request_ends_with_the_signals_status(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Who starts `moebius run` in a script can tell Ctrl-C from a `kill`."""

    @contextlib.contextmanager
    def running(serve_plan: Any) -> Iterator[Any]:
        yield SimpleNamespace(stopping=True, ended_by=number)

    monkeypatch.setattr("app.commands.running.running", running)
    with pytest.raises(typer.Exit) as ended:
        ask_once(cast(Any, SimpleNamespace(base_url="http://127.0.0.1:1")), {}, [])
    assert ended.value.exit_code == 128 + number


def test_a_server_that_says_goodbye_leaves_no_line_of_grpcs() -> None:
    """What gRPC's library notes of another process's end is no part of what a command says."""
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    goodbye = bytes([0, 0, 8, 7, 0, 0, 0, 0, 0]) + bytes([0, 0, 0, 0, 0, 0, 0, 2])
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as connection:
                listening.close()  # who tries again is refused at once
                connection.recv(4096)
                connection.sendall(settings + goodbye)

        address = f"127.0.0.1:{listening.getsockname()[1]}"
        threading.Thread(target=serve, daemon=True).start()
        ended = subprocess.run(
            [sys.executable, "-m", "moebius", "top", address, "--once"],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert ended.returncode == USER_ERROR_EXIT
    assert ended.stderr.startswith(f"moebius: error: cannot reach an engine at {address}")
    assert "chttp2_transport" not in ended.stderr


def test_a_lost_engine_ends_a_command_without_freeing_anything() -> None:
    """One line says why, and the status is that of a failure; what is held is left to the system."""
    ended = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "moebius: error: the engine is lost: its log says where\n"
