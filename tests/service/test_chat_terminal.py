"""Guards `moebius chat` as people use it: in a terminal, with keys, pasted text and interruptions."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.sse_server import ScriptedServer, delta_event, scripted_server, usage_event
from tests.unit.app.top.test_top import answer as live_answer

WAIT_S = 60.0
# A terminal is asked to mark pasted text whenever the prompt appears.
PROMPT = re.escape("\x1b[?2004h")
UP, LEFT, CTRL_C, CTRL_D = "\x1b[A", "\x1b[D", "\x03", "\x04"


class Terminal:
    """A command in a pseudo-terminal; `screen` has everything that it wrote."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._fd, inner = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(inner)
        self.screen = ""

    def type(self, keys: str) -> None:
        """Presses keys."""
        os.write(self._fd, keys.encode())

    def wait_for(self, pattern: str, after: int = 0) -> int:
        """Reads until the pattern shows behind that much of the screen; returns how much there is then."""
        end = time.monotonic() + WAIT_S
        while re.search(pattern, self.screen[after:]) is None:
            assert time.monotonic() < end, f"no {pattern!r} in {self.screen[after:]!r}"
            if select.select([self._fd], [], [], 0.2)[0]:
                data = os.read(self._fd, 65536).decode(errors="replace")
                self.screen += data
                if "\x1b[6n" in data:
                    self.type("\x1b[1;1R")  # a terminal says where its cursor is
        return len(self.screen)

    def attributes(self) -> list[Any]:
        """Returns how the terminal treats what is typed (tcgetattr(3))."""
        import termios

        return termios.tcgetattr(self._fd)

    def close(self) -> None:
        """Ends whatever still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


def _take_terminal() -> None:
    """Makes standard input the controlling terminal, so that Ctrl-C is a signal, and not one that is ignored:
    as by whatever a shell without job control runs in the background."""
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextlib.contextmanager
def chatting(server: ScriptedServer, home: Path, *arguments: str) -> Iterator[Terminal]:
    """`moebius chat` with that server, at its prompt."""
    environment = {**os.environ, "HOME": str(home), "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    environment.pop("XDG_STATE_HOME", None)
    command = [sys.executable, "-m", "moebius", "chat", "--base-url", server.url, *arguments]
    terminal = Terminal(command, environment)
    try:
        terminal.wait_for("/help lists")
        terminal.wait_for(PROMPT)
        yield terminal
    finally:
        terminal.close()


def asked(server: ScriptedServer) -> list[Any]:
    """Returns the messages of each request, as (role, content)."""
    return [[(m["role"], m["content"]) for m in request["messages"]] for request in server.requests]


def test_keys_history_and_commands(tmp_path: Path) -> None:
    """Arrows edit and recall, also in the next session; commands change the request; Ctrl-D ends."""
    with scripted_server([delta_event("Paris"), usage_event(1)]) as server:
        with chatting(server, tmp_path, "--system", "Be brief.") as terminal:
            terminal.type(f"helo{LEFT}l\r")
            seen = terminal.wait_for("tokens/s")
            terminal.type(f"{UP}!\r")
            seen = terminal.wait_for("tokens/s", seen)
            terminal.type("/set temperature 0\r")
            seen = terminal.wait_for("temperature = 0", seen)
            terminal.type("/clear\r")
            seen = terminal.wait_for("cleared", seen)
            terminal.type("/cler\r")
            seen = terminal.wait_for("did you mean /clear", seen)
            terminal.type("last\r")
            seen = terminal.wait_for(f"tokens/s(.|\n)*{PROMPT}", seen)
            terminal.type(CTRL_D)
            assert terminal.process.wait(WAIT_S) == 0
        with chatting(server, tmp_path) as terminal:
            terminal.type(f"{UP}\r")
            terminal.wait_for("tokens/s")
            terminal.type("/exit\r")
            assert terminal.process.wait(WAIT_S) == 0
    system, first = ("system", "Be brief."), ("user", "hello")
    assert asked(server) == [
        [system, first],
        [system, first, ("assistant", "Paris"), ("user", "hello!")],
        [system, ("user", "last")],
        [("user", "last")],
    ]
    assert [request["temperature"] for request in server.requests] == [0.7, 0.7, 0, 0.7]


def test_pasted_lines_are_one_message(tmp_path: Path) -> None:
    """Text of several lines, pasted, is sent as it is when Enter is pressed, and not line by line."""
    with (
        scripted_server([delta_event("ok"), usage_event(1)]) as server,
        chatting(server, tmp_path) as terminal,
    ):
        terminal.type("\x1b[200~one\ntwo\n/three\x1b[201~\r")
        terminal.wait_for("tokens/s")
    assert asked(server) == [[("user", "one\ntwo\n/three")]]


def test_a_history_that_can_not_be_written_is_said_once(tmp_path: Path) -> None:
    """The dialogue goes on, as on a disk that has become full, without a traceback at each message."""
    with (
        scripted_server([delta_event("ok"), usage_event(1)]) as server,
        chatting(server, tmp_path) as terminal,
    ):
        shutil.rmtree(tmp_path / ".local" / "state" / "moebius")
        for question in ("one", "two"):
            seen = len(terminal.screen)
            terminal.type(f"{question}\r")
            terminal.wait_for(f"(?s)tokens/s.*{PROMPT}", seen)
        assert terminal.screen.count("messages are not remembered") == 1
        assert "Traceback" not in terminal.screen
    assert len(server.requests) == 2


def test_an_interrupted_answer_is_kept(tmp_path: Path) -> None:
    """Ctrl-C stops the answer, what came stays in the conversation, and /regenerate asks again."""
    with scripted_server([delta_event(f"w{n} ") for n in range(1000)]) as server:
        server.pause_s = 0.05
        with chatting(server, tmp_path) as terminal:
            terminal.type("count\r")
            seen = terminal.wait_for("w2 ")
            terminal.type(CTRL_C)
            seen = terminal.wait_for("interrupted", seen)
            server.pause_s, server.events = 0.0, [delta_event("done"), usage_event(1)]
            terminal.type("go on\r")
            seen = terminal.wait_for("tokens/s", seen)
            terminal.type("/regenerate\r")
            terminal.wait_for("tokens/s", seen)
    partial = asked(server)[1][1]
    assert partial[0] == "assistant"
    assert partial[1].startswith("w0 w1 w2 ")
    assert asked(server)[1] == asked(server)[2] == [("user", "count"), partial, ("user", "go on")]


def test_reasoning_and_tool_calls_show_dimmed_and_controls_do_nothing(tmp_path: Path) -> None:
    """What the model thinks and calls is marked as such; its text cannot steer the terminal."""

    def delta(**fields: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}

    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": ""}}
    events = [
        delta(reasoning_content="hmm", reasoning="hmm"),
        delta(content="Hi\x1b[2Jthere"),
        delta(tool_calls=[call]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a": 1}'}}]),
        usage_event(3),
    ]
    with scripted_server(events) as server, chatting(server, tmp_path) as terminal:
        terminal.type("?\r")
        terminal.wait_for("tokens/s")
        assert "\x1b[2mhmm\x1b[0m" in terminal.screen
        assert "Hi\ufffd[2Jthere" in terminal.screen
        assert "\x1b[2m\r\ncalls weather \x1b[0m" in terminal.screen


def test_a_lost_server_ends_no_dialogue(tmp_path: Path) -> None:
    """The error is shown, the question stays, and the next request connects again."""
    with scripted_server([delta_event("back"), usage_event(1)]) as server:
        server.status = 503
        with chatting(server, tmp_path) as terminal:
            terminal.type("hello\r")
            seen = terminal.wait_for("answered 503")
            server.status = 200
            terminal.type("/regenerate\r")
            terminal.wait_for("tokens/s", seen)
    assert asked(server) == [[("user", "hello")]] * 2


@pytest.mark.parametrize("ending", ["", "/exit\n"])
def test_a_pipe_is_read_line_by_line(tmp_path: Path, ending: str) -> None:
    """Without a terminal every line is a message and stdout has the answers only."""
    with scripted_server([delta_event("Paris"), usage_event(1)]) as server:
        command = [sys.executable, "-m", "moebius", "chat", "--base-url", server.url]
        ended = subprocess.run(
            command, input=f"one\ntwo\n{ending}", capture_output=True, text=True, timeout=WAIT_S, check=True
        )
    assert ended.stdout == "Paris\nParis\n"
    assert len(server.requests) == 2


@pytest.mark.parametrize(("closed", "requests"), [("<&-", 0), (">&-", 1), ("<&- >&- 2>&-", 0)])
def test_closed_streams_are_no_defect(closed: str, requests: int) -> None:
    """A stream that the caller has closed reads and writes nothing: no traceback, no message lost."""
    with scripted_server([delta_event("Paris"), usage_event(1)]) as server:
        script = f"'{sys.executable}' -m moebius chat {server.url} {closed}"
        ended = subprocess.run(
            ["bash", "-c", script], input="one\n", capture_output=True, text=True, timeout=WAIT_S, check=False
        )
    assert (ended.returncode, ended.stdout, ended.stderr.count("Traceback")) == (0, "", 0)
    assert len(server.requests) == requests


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(("locale", "out"), [({"PYTHONUTF8": "1"}, "\n5 €\n"), (ASCII, "\n5 ?\n")])
def test_no_encoding_ends_a_dialogue(locale: dict[str, str], out: str) -> None:
    """A line that is no UTF-8 is refused, the next one answered; letters that a locale lacks become ?."""
    with scripted_server([delta_event("5 €"), usage_event(1)]) as server:
        command = [sys.executable, "-m", "moebius", "chat", "--base-url", server.url]
        ended = subprocess.run(
            command,
            input=b"\xff\n\xc3\x9cber\n",
            capture_output=True,
            timeout=WAIT_S,
            check=True,
            env={**os.environ, **locale},
        )
    assert ended.stdout.decode() == out
    assert b"not valid UTF-8" in ended.stderr
    assert asked(server) == [[("user", "Über")]]


def test_top_gives_the_terminal_back_while_it_is_suspended(tmp_path: Path) -> None:
    """Ctrl-Z shows the shell's screen with its echo, `fg` the figures again; `q` still ends it."""
    import termios

    with scripted_server([]) as server:
        server.documents["/v1/live?replica=0"] = live_answer(10)
        command = [sys.executable, "-m", "moebius", "top", server.url, "--interval", "0.2"]
        terminal = Terminal(command, {**os.environ, "TERM": "xterm", "HOME": str(tmp_path)})
        try:
            before = terminal.attributes()
            seen = terminal.wait_for("tiny")
            assert not terminal.attributes()[3] & termios.ECHO
            terminal.type("\x1a")
            # No process could continue the only one of a session, so the kernel does not stop it: it goes on.
            leaves, enters = re.escape("\x1b[?1049l"), re.escape("\x1b[?1049h")
            seen = terminal.wait_for(f"{leaves}(?s:.)*{enters}", seen)
            terminal.wait_for("tiny", seen)
            terminal.type("q")
            assert terminal.process.wait(WAIT_S) == 0
            assert terminal.attributes() == before
        finally:
            terminal.close()
