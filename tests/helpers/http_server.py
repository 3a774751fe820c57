"""What HTTP servers of tests share: a free port of this host, a thread of their own, and no access log."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LocalServer(ThreadingHTTPServer):
    """Listens on a free port of 127.0.0.1."""

    daemon_threads = True
    # How many connections may wait to be accepted; with five, requests that arrive at once are lost.
    request_queue_size = 128

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_port}"


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps connections open, and writes no access log."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        """Tests need no access log."""

    def begin(self, status: int, nbytes: int, headers: Mapping[str, str] | None = None) -> None:
        """Sends the head of an answer whose body has `nbytes` bytes."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(nbytes))
        self.end_headers()

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Sends a whole answer."""
        self.begin(status, len(body), headers)
        self.wfile.write(body)


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
