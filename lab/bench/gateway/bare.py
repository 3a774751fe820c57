"""The limit of `moebius bench gateway`; its arguments are PORT DIRECTORY STEP_MS.

A bare ASGI application that reads the request's body and sends the bytes of a recorded answer, one event per
stream and step. `DIRECTORY` holds the records: events.json (a list of strings), whole.json.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import uvicorn


class Pace:
    """Wakes all who wait once per step, as an engine's batch does; steps begin with the first who waits."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._woken: asyncio.Future[None] | None = None
        self._at = 0.0

    async def step(self) -> None:
        """Waits until the next step of the common pace."""
        if self._woken is None:
            loop = asyncio.get_running_loop()
            self._woken = loop.create_future()
            now = loop.time()
            self._at = max(self._at + self._step_s, now)
            loop.call_at(self._at, self._wake)
        await asyncio.shield(self._woken)

    def _wake(self) -> None:
        woken, self._woken = self._woken, None
        assert woken is not None
        woken.set_result(None)


class BareApp:
    """The ASGI application."""

    def __init__(self, directory: Path, step_s: float) -> None:
        events: list[str] = json.loads((directory / "events.json").read_text(encoding="utf-8"))
        self._opening, self._token, self._end = events[0].encode(), events[1].encode(), events[-1].encode()
        self._whole = (directory / "whole.json").read_bytes()
        self._pace = Pace(step_s)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers any request by its body's `stream` and `max_tokens`."""
        if scope["type"] != "http":
            return
        pieces, more = [], True
        while more:
            message = await receive()
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = json.loads(b"".join(pieces) or b"{}")
        if not body.get("stream"):
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self._whole))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": self._whole})
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(body["max_tokens"]):
            if number:
                await self._pace.step()
            data = self._opening if number == 0 else self._token
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": self._end})


def main() -> None:
    """Serves until SIGTERM."""
    app = BareApp(Path(sys.argv[2]), float(sys.argv[3]) / 1e3)
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        ws="none",
        log_level="warning",
        access_log=False,
        backlog=1024,
    )


if __name__ == "__main__":
    main()
