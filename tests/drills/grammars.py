"""Grammars that take seconds to compile, one after another: requests of others are answered meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

from tests.drills.checkpoint import MODEL
from tests.drills.report import Report
from tests.drills.session import Session, served, wait_for
from tests.drills.watcher import processes_of
from tests.helpers.heavy_grammars import heavy_requests

# A small request among the heavy ones takes no longer, seconds; it is a token of a tiny model.
SMALL_S = 5.0
# With all processes for prompts stopped, /ready says so within this time.
NOTICED_S = 25.0
_PAUSE_S = 0.05
_SMALL: list[dict[str, Any]] = [{}, {"response_format": {"type": "json_object"}}]


def run(report: Report, duration_s: float, clients: int) -> None:
    """`clients` send grammars that are new for `duration_s` seconds; then readiness."""
    with served(report, "--prompt-workers", "2") as session:
        heavy, small, ready = asyncio.run(_load(session, duration_s, clients))
        for answer, count in sorted(heavy.items()):
            report.inject(f"grammars answered {answer}", count)
        report.facts["small requests"] = len(small)
        report.facts["slowest, 99 %, median of small requests (s)"] = [
            round(max(small), 3),
            round(sorted(small)[len(small) * 99 // 100], 3),
            round(statistics.median(small), 3),
        ]
        report.promise(
            f"no small request took longer than {SMALL_S:g} s", max(small) <= SMALL_S, f"{max(small):.2f} s"
        )
        report.promise("ready all the time", all(ready), f"{ready.count(False)} of {len(ready)} times not")
        wrong = {answer: count for answer, count in heavy.items() if answer not in ("200", "400", "429")}
        report.promise("each grammar is answered 200, 400 or 429", not wrong, wrong)
        _readiness(session)


async def _load(
    session: Session, duration_s: float, clients: int
) -> tuple[Counter[str], list[float], list[bool]]:
    """Returns the answers of the heavy requests; seconds of each small one; whether /ready said so."""
    heavy, small, ready = Counter[str](), list[float](), list[bool]()
    end = time.monotonic() + duration_s
    seeds = itertools.count(1)
    async with httpx.AsyncClient(base_url=session.stack.base_url, timeout=120) as client:

        async def send_heavy() -> None:
            for fields in _endless(seeds):
                if time.monotonic() > end:
                    return
                heavy[str(await _status(client, fields))] += 1

        async def send_small() -> None:
            for fields in itertools.cycle(_SMALL):
                if time.monotonic() > end:
                    return
                begun = time.monotonic()
                status = await _status(client, fields)
                small.append(time.monotonic() - begun if status == 200 else float("inf"))
                ready.append((await client.get("/ready")).status_code == 200)
                await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(send_small(), *(send_heavy() for _ in range(clients)))
    return heavy, small, ready


def _endless(seeds: Iterator[int]) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        yield heavy_requests(seed)[seed % len(heavy_requests())]


async def _status(client: httpx.AsyncClient, fields: dict[str, Any]) -> int | str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **fields}
    try:
        return (await client.post("/v1/chat/completions", json=body)).status_code
    except httpx.HTTPError as error:
        return type(error).__name__


def _readiness(session: Session) -> None:
    """With its processes for prompts stopped and a request in each, a gateway is not ready; later it is."""
    stopped = processes_of(session.stack).get("prompts", [])
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
        session.report.inject("SIGSTOP prompts")
    waiting = [asyncio.run(_begin(session)) for _ in range(2)]
    begun = time.monotonic()
    noticed = wait_for(lambda: not session.ready(), NOTICED_S)
    session.report.promise(
        "not ready while no request can be read", noticed, f"{time.monotonic() - begun:.0f} s"
    )
    for process in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
    del waiting
    session.report.promise("ready again", wait_for(session.ready, NOTICED_S))


async def _begin(session: Session) -> None:
    """A request that is sent and not waited for."""
    with contextlib.suppress(httpx.TimeoutException):
        async with httpx.AsyncClient(base_url=session.stack.base_url, timeout=1) as client:
            await _status(client, {})
