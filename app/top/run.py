"""Asks again and again, and shows it until `q` is typed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from app.client import ApiClient, Unreachable
from app.top.figures import figures_between
from app.top.layers import layer_table
from app.top.view import costs_line, memory_line, render
from moebius.errors import UserError

# Lines of everything but the layers, and how many more they become where 80 columns are not to be had.
_OTHER_LINES, _FOLDED_LINES = 19, 6
_RETRY_S = 2.0


class Source(ABC):
    """Where figures come from."""

    @abstractmethod
    def ask(self) -> dict[str, Any]:
        """Returns an answer as `/v1/live` gives it. Raises Unreachable for what may pass, else UserError."""


class GatewaySource(Source):
    """`/v1/live` of a gateway."""

    def __init__(self, client: ApiClient, replica: int) -> None:
        self._client, self._replica = client, replica

    def ask(self) -> dict[str, Any]:
        return self._client.get_json(f"/v1/live?replica={self._replica}")


class EngineSource(Source):
    """`GetLive` of an engine without a gateway."""

    def __init__(self, stub: Any, address: str) -> None:
        self._stub, self._address = stub, address

    def ask(self) -> dict[str, Any]:
        import grpc

        from gateway.web.live import live_object
        from protos import engine_pb2 as pb

        try:
            return {
                **live_object(self._stub.GetLive(pb.GetLiveRequest(), timeout=10)),
                "model": self._address,
            }
        except grpc.RpcError as error:
            if "http1.x" in (error.details() or ""):
                raise UserError(
                    f"{self._address} is an HTTP server, not an engine: moebius top http://{self._address}"
                ) from None
            raise Unreachable(f"cannot reach an engine at {self._address}: {error.details()}") from None


def print_once(source: Source, interval_s: float, as_json: bool) -> None:
    """Two answers, `interval_s` apart, and what they say. Raises UserError."""
    before = source.ask()
    time.sleep(interval_s)
    now = source.ask()
    figures = figures_between(before, now)
    if as_json:
        print(json.dumps({"live": now, "figures": figures.to_json()}))
        return
    console = Console(highlight=False)
    console.print(render(now, figures, width=console.width))


def print_layers(source: Source, interval_s: float, as_json: bool) -> None:
    """Prints what two answers, `interval_s` apart, say: a line for each MoE layer, and what limits a step.
    Raises UserError.

    Raises UserError.
    """
    before = source.ask()
    time.sleep(interval_s)
    now = source.ask()
    if not now.get("experts"):
        raise UserError(f"{now.get('model', 'the model')} has no routed experts")
    figures = figures_between(before, now)
    if as_json:
        layers = [asdict(rate) for rate in figures.placement]
        found = {"layers": layers, "costs": now.get("costs"), "memory": now.get("memory")}
        print(json.dumps(found | {"limit": figures.limit}))
        return
    console = Console(highlight=False)
    console.print(layer_table(figures.placement, figures.roofline_bytes_per_second))
    console.print(costs_line(now, figures))
    if now.get("memory"):
        console.print(f"GPU memory: {memory_line(now['memory'])}")
    console.print(f"limited by {figures.limit}")


def watch(source: Source, interval_s: float, console: Console | None = None) -> None:
    """Shows figures until `q` or Ctrl-C; a server that goes away is waited for.

    Raises UserError for what stays.
    """
    console = console or Console(highlight=False)
    before: dict[str, Any] | None = None
    now: dict[str, Any] | None = None
    shown: Any = Text("asking …")
    with (
        _single_keys() as pressed,
        Live(shown, console=console, screen=True, auto_refresh=False) as live,
        _suspended_by_keys(live),
    ):
        while True:
            pause_s = interval_s
            try:
                before, now = now, source.ask()
                figures, problem = figures_between(before, now), ""
            except Unreachable as error:
                # A server that comes back counts from zero.
                problem, pause_s = f"{error}; trying again", max(interval_s, _RETRY_S)
            if now is None:
                shown = Text(problem, style="bold red")
            else:
                other = _OTHER_LINES + (_FOLDED_LINES if console.width < 80 else 0)
                shown = render(now, figures, console.height - other, problem, console.width)
            live.update(shown, refresh=True)
            if pressed(pause_s) in ("q", "Q", "\x03"):
                return


@contextlib.contextmanager
def _suspended_by_keys(live: Live) -> Iterator[None]:
    """Ctrl-Z gives the terminal back to the shell as it was, `fg` takes it again."""
    if not sys.stdin.isatty() or threading.current_thread() is not threading.main_thread():
        yield
        return
    import termios

    def suspend(number: int, frame: FrameType | None) -> None:
        own = termios.tcgetattr(sys.stdin)
        live.stop()
        echoing = [*own]
        echoing[3] |= termios.ICANON | termios.ECHO
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, echoing)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # returns once somebody has continued this process
        signal.signal(number, suspend)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, own)
        live.start(refresh=True)

    earlier = signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, earlier)


@contextlib.contextmanager
def _single_keys() -> Iterator[Any]:
    """Yields a function of a number of seconds, which waits that long for a key; "" without one, or a
    terminal.
    """
    if not sys.stdin.isatty():

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def read(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if ready else ""

    try:
        tty.setcbreak(sys.stdin)
        yield read
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
