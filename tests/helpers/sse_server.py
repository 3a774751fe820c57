"""A little HTTP server that answers like an OpenAI-compatible one: a model list, and a stream of events."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from tests.helpers.http_server import LocalServer, QuietHandler, serving


class ScriptedServer(LocalServer):
    """Answers every POST with `events`, and remembers the requests."""

    def __init__(self, events: list[Any], root: str = "", status: int = 200) -> None:
        super().__init__(_Handler)
        self.events = events
        self.root = root
        self.status = status
        self.get_status = 200
        # What GET of other paths than the model list answers.
        self.documents: dict[str, Any] = {}
        # Seconds before each event: an answer that can be interrupted.
        self.pause_s = 0.0
        self.requests: list[dict[str, Any]] = []


class _Handler(QuietHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        """The model list, or what else is there."""
        models = {"data": [{"id": "m", "root": self.server.root}]}
        self._send_json(self.server.get_status, self.server.documents.get(self.path, models))

    def do_POST(self) -> None:
        """The scripted events, or the scripted error."""
        length = int(self.headers["Content-Length"])
        self.server.requests.append(json.loads(self.rfile.read(length)))
        if self.server.status != 200:
            error = {"error": {"message": "no such model", "type": "invalid_request_error"}}
            self._send_json(self.server.status, error)
            return
        if self.server.pause_s:
            self._send_slowly()
            return
        lines = [f"data: {json.dumps(event)}\n\n" for event in self.server.events]
        text = ": ping\n\n" + "".join(lines) + "data: [DONE]\n\n"
        self.answer(200, text.encode(), {"Content-Type": "text/event-stream"})

    def _send_json(self, status: int, document: Any) -> None:
        self.answer(status, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send_slowly(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client has seen enough
            for event in self.server.events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
                time.sleep(self.server.pause_s)


@contextlib.contextmanager
def scripted_server(events: list[Any], **options: Any) -> Iterator[ScriptedServer]:
    """A running server with that script."""
    server = ScriptedServer(events, **options)
    with serving(server):
        yield server


def text_event(text: str) -> dict[str, Any]:
    """Returns a completion chunk."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}]}


def delta_event(text: str) -> dict[str, Any]:
    """Returns a chat chunk."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def usage_event(tokens: int) -> dict[str, Any]:
    """The last event, with the server's own count."""
    return {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}
