"""`python -m tests.tools.screenshots [DIRECTORY]`: the pictures of terminals in the docs, of real commands.

It starts the demo model, as `moebius serve demo` does, in a pseudo-terminal of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pyte
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tests.helpers.ports import free_port
from tests.helpers.stack import ROOT

COLUMNS, ROWS = 80, 40
QUESTION = "What is the capital of France?"
# Names that the emulator has for what rich calls otherwise.
_COLOURS = {"brown": "yellow", "default": None}


class Terminal:
    """A command in a pseudo-terminal that understands what is written to it; a context manager."""

    def __init__(self, *arguments: str, rows: int = ROWS, environment: dict[str, str] | None = None) -> None:
        """Runs `moebius` with these arguments; `environment` is added to ours."""
        self.screen = pyte.Screen(COLUMNS, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))
        self.title = " ".join(("moebius", *arguments))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moebius", *arguments],
            cwd=ROOT,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "", **(environment or {})},
            start_new_session=True,
        )
        os.close(inner)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(AssertionError):  # it is looked at where its end is waited for
            self.until(lambda: self.process.poll() is not None, 60)
        self.process.kill()
        self.process.wait()
        os.close(self._fd)

    @property
    def text(self) -> str:
        """What stands on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def type(self, keys: str) -> None:
        """Presses keys."""
        os.write(self._fd, keys.encode())

    def until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Takes what is written until the condition holds, looking after each piece."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"{self.title}: not within {timeout_s:g} s:\n{self.text}"
            if not select.select([self._fd], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self._fd, 4096)
            except OSError:  # the command has closed its end
                time.sleep(0.05)
                continue
            self._stream.feed(data)
            if b"\x1b[6n" in data:
                self.type(f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")

    def save_svg(self, path: Path) -> None:
        """The screen as it is, without empty lines at its end."""
        lines = len(self.text.splitlines())
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
        for row in range(lines):
            console.print(self._line(row), no_wrap=True, overflow="crop", crop=True, soft_wrap=True)
        # Rich's own picture asks another host for its font.
        form = re.sub(r"\s*@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
        path.write_text(console.export_svg(title=self.title, code_format=form))

    def _line(self, row: int) -> Text:
        line = Text()
        for column in range(COLUMNS):
            cell = self.screen.buffer[row][column]
            colour = _COLOURS.get(cell.fg, cell.fg)
            if (
                colour is not None
                and len(colour) == 6
                and all(digit in "0123456789abcdef" for digit in colour)
            ):
                colour = f"#{colour}"
            elif colour is not None and colour.startswith("bright"):
                colour = f"bright_{colour.removeprefix('bright')}"
            line.append(
                cell.data, Style(color=colour, bold=cell.bold, italic=cell.italics, reverse=cell.reverse)
            )
        line.rstrip()
        return line


def chat_picture(url: str, path: Path) -> str:
    """Returns a question and its answer; the text of the screen."""
    with tempfile.TemporaryDirectory() as state:
        history = {"XDG_STATE_HOME": state}
        with Terminal("chat", "--base-url", url, rows=16, environment=history) as terminal:
            terminal.until(lambda: "\n>" in terminal.text, 120)
            terminal.type(f"{QUESTION}\r")
            terminal.until(lambda: "tokens/s, first after" in terminal.text, 300)
            terminal.title = "moebius chat"
            terminal.save_svg(path)
            text = terminal.text
            terminal.type("/exit\r")
            terminal.until(lambda: terminal.process.poll() is not None, 60)
    return text


def top_picture(url: str, path: Path) -> str:
    """Figures while requests run; the text of the screen. `q` ends it."""
    with _busy(url), Terminal("top", url, "--interval", "3") as terminal:
        # What is seen while it is drawn again lacks parts: the text that had all of them counts.
        seen = list[str]()

        def complete() -> bool:
            text = terminal.text
            found = all(part in text for part in ("limited by", "KV cache", "hand-off", "experts' time"))
            if found:
                seen.append(text)
            return found

        terminal.until(complete, 120)
        terminal.title = "moebius top"
        terminal.save_svg(path)
        text = seen[-1]
        terminal.type("q")
        terminal.until(lambda: terminal.process.poll() is not None, 60)
        assert terminal.process.returncode == 0, terminal.text
    return text


@contextlib.contextmanager
def _busy(url: str) -> Iterator[None]:
    """Three requests at a time meanwhile."""
    stop = threading.Event()
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]

    def ask() -> None:
        while not stop.is_set():
            body = {"model": model, "prompt": f"The year {time.time():.0f}", "max_tokens": 64}
            httpx.post(f"{url}/v1/completions", json=body, timeout=300)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def main(directory: Path) -> None:
    """Start-up, then the others of what has started."""
    port = free_port()
    with tempfile.TemporaryDirectory() as state:
        flags = ("--expert-servers", "2", "--port", str(port), "--state-dir", state)
        with Terminal("serve", "demo", *flags, rows=34) as terminal:
            terminal.title = "moebius serve demo --expert-servers 2"

            # One process is ready, others say how far they are.
            terminal.until(lambda: "✓" in terminal.text, 300)
            terminal.save_svg(directory / "screenshot-start.svg")
            terminal.until(lambda: "Ready: " in terminal.text, 300)
            # Somebody has to read what it writes.
            reader = threading.Thread(
                target=terminal.until, args=(lambda: terminal.process.poll() is not None, 3600)
            )
            reader.start()
            url = f"http://127.0.0.1:{port}"
            chat_picture(url, directory / "screenshot-chat.svg")
            top_picture(url, directory / "screenshot-top.svg")
            terminal.process.send_signal(signal.SIGINT)
            reader.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
