"""Clients of a drill: greedy streams without end, in a thread of their own, and what became of each."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import httpx

from tests.drills.checkpoint import GreedyCase

# right: the whole text. wrong: another text. refused: an error in OpenAI's shape, by status or in the stream.
# broken: no answer, half an answer without an error, or an error without shape. late: nothing in time.
Fate = Literal["right", "wrong", "refused", "broken", "late"]
# A client that was refused waits so long, as the Retry-After of servers asks for at least.
PAUSE_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """One request; filled by `ask`."""

    fate: Fate
    # Of time.monotonic().
    started: float
    seconds: float
    detail: str = ""


@dataclass(frozen=True)
class Tally:
    """Outcomes in numbers; filled by `tally`."""

    sent: int
    fates: dict[str, int]
    slowest_s: float
    # The first few of each kind of failure.
    details: list[str]

    def count(self, *fates: Fate) -> int:
        """Returns the number of requests of these fates."""
        return sum(self.fates.get(fate, 0) for fate in fates)


def tally(outcomes: Sequence[Outcome]) -> Tally:
    """Counts them."""
    fates = Counter(outcome.fate for outcome in outcomes)
    details = Counter(f"{one.fate}: {one.detail}" for one in outcomes if one.fate != "right")
    return Tally(
        len(outcomes),
        dict(fates),
        max((outcome.seconds for outcome in outcomes), default=0.0),
        [f"{count} x {text[:300]}" for text, count in details.most_common(8)],
    )


def error_of(document: Any) -> str | None:
    """Returns the message of an error in OpenAI's shape; None when it has another one."""
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= error.keys():
        return None
    return str(error["message"])


async def stream_text(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[Fate, str]:
    """Returns the text of a streamed chat answer ("right": it is whole, whatever it says), or what came
    instead.
    """
    pieces: list[str] = []
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        if response.status_code != 200:
            return refusal(response.status_code, await response.aread())
        finished = ended = False
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                ended = True
                continue
            event = json.loads(data)
            if "error" in event:
                message = error_of(event)
                return ("refused", message) if message else ("broken", f"error without shape: {data}")
            for choice in event["choices"]:
                pieces.append(choice["delta"].get("content") or "")
                finished = finished or choice["finish_reason"] is not None
    if not (finished and ended):
        return "broken", f"the stream ended early (finish_reason {finished}, [DONE] {ended})"
    return "right", "".join(pieces)


def refusal(status: int, content: bytes) -> tuple[Fate, str]:
    """Returns what an answer with an error status is."""
    try:
        message = error_of(json.loads(content))
    except ValueError:
        message = None
    if message is None:
        return "broken", f"HTTP {status} without OpenAI's shape: {content[:200]!r}"
    return "refused", f"HTTP {status}: {message}"


async def ask(client: httpx.AsyncClient, case: GreedyCase, deadline_s: float) -> Outcome:
    """Streams one greedy request and compares its text."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(deadline_s):
            fate, detail = await stream_text(client, "/v1/chat/completions", case.body)
    except TimeoutError:
        fate, detail = "late", f"no end within {deadline_s:g} s"
    except (httpx.HTTPError, ValueError, KeyError) as error:
        fate, detail = "broken", f"{type(error).__name__}: {error}"
    if fate == "right":
        fate, detail = ("right", "") if detail == case.text else ("wrong", f"{detail!r}")
    return Outcome(fate, started, time.monotonic() - started, detail)


class GreedyLoad:
    """`streams` clients, each sending one case after another until the end of the `with` block.

    At the end requests that run are awaited. `outcomes` may be read at any time.
    """

    def __init__(self, base_url: str, cases: Sequence[GreedyCase], streams: int, deadline_s: float) -> None:
        self.outcomes: list[Outcome] = []
        self._base_url, self._cases, self._streams = base_url, cases, streams
        self._deadline_s = deadline_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> GreedyLoad:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def since(self, moment: float) -> list[Outcome]:
        """Requests that were sent after `moment` (time.monotonic()) and have ended."""
        return [outcome for outcome in list(self.outcomes) if outcome.started >= moment]

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._streams)
        async with httpx.AsyncClient(base_url=self._base_url, timeout=None, limits=limits) as client:
            await asyncio.gather(*(self._client(client, number) for number in range(self._streams)))

    async def _client(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._stop.is_set():
            outcome = await ask(client, self._cases[number % len(self._cases)], self._deadline_s)
            self.outcomes.append(outcome)
            number += self._streams + 1
            if outcome.fate in ("refused", "broken"):
                await asyncio.sleep(PAUSE_S)
