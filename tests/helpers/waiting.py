"""Waits for what other threads and processes do, with limits that only end a hang."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx

# A machine that runs four workers and all their servers may leave a process without a core for a minute.
LIMIT_S = 240.0


def wait_until(
    condition: Callable[[], object], detail: Callable[[], object] = lambda: "", limit_s: float = LIMIT_S
) -> None:
    """Returns once `condition` holds; AssertionError with `detail` after `limit_s`."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"the condition did not come true: {detail()}"
        time.sleep(0.01)


async def until(condition: Callable[[], object]) -> None:
    """The same for what tasks of this event loop do as well; TimeoutError after `LIMIT_S`."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - what others do, seen from outside
            await asyncio.sleep(0.01)


def wait_ready(
    base_url: str,
    process: subprocess.Popen[bytes] | subprocess.Popen[str],
    log: Path | None = None,
    limit_s: float = LIMIT_S,
) -> None:
    """Returns once a server's `/ready` answers 200; AssertionError with the log's end when its process has
    ended, or after `limit_s`."""

    def said() -> str:
        end = "" if log is None else log.read_text()[-4000:]
        return f"not ready: exit={process.poll()}\n{end}"

    def is_ready() -> bool:
        assert process.poll() is None, said()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{base_url}/ready", timeout=10).status_code == 200
        return False

    wait_until(is_ready, said, limit_s)
