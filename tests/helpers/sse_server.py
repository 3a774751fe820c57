"""A little HTTP server that answers like an OpenAI-compatible one: a model list, and a stream of events."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedServer(ThreadingHTTPServer):
    """Answers every POST with `events`, and remembers the requests."""

    daemon_threads = True

    def __init__(self, events: list[Any], root: str = "", status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.events = events
        self.root = root
        self.status = status
        self.get_status = 200
        # What GET of other paths than the model list answers.
        self.documents: dict[str, Any] = {}
        # Seconds before each event: an answer that can be interrupted.
        self.pause_s = 0.0
        self.requests: list[dict[str, Any]] = []

    @property
    def base_url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The model list, or what else is there."""
        self._send(
            self.server.get_status,
            "application/json",
            json.dumps(
                self.server.documents.get(self.path, {"data": [{"id": "m", "root": self.server.root}]})
            ),
        )

    def do_POST(self) -> None:
        """The scripted events, or the scripted error."""
        length = int(self.headers["Content-Length"])
        self.server.requests.append(json.loads(self.rfile.read(length)))
        if self.server.status != 200:
            error = {"error": {"message": "no such model", "type": "invalid_request_error"}}
            self._send(self.server.status, "application/json", json.dumps(error))
            return
        if self.server.pause_s:
            self._send_slowly()
            return
        lines = [f"data: {json.dumps(event)}\n\n" for event in self.server.events]
        self._send(200, "text/event-stream", ": ping\n\n" + "".join(lines) + "data: [DONE]\n\n")

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

    def log_message(self, format: str, *arguments: Any) -> None:
        """Tests need no access log."""

    def _send(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@contextlib.contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    """The server answers from a thread of its own meanwhile."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
