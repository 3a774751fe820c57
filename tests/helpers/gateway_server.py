"""Runs the real gateway application on a free port, in a thread of the test process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx
import uvicorn

from gateway.app.server import server_for
from gateway.prompts import pool
from moebius.config import MoebiusConfig
from tests.helpers import tls_everywhere
from tests.helpers.waiting import wait_until
from tests.helpers.warm_processes import WarmForkServer


def gateway_config(engine_address: str, **gateway: Any) -> MoebiusConfig:
    """Returns a configuration for tests; keyword arguments are leaves of the `gateway` section."""
    settings = {"engine_address": engine_address, "port": 0, "prompt_workers": 1, **gateway}
    return MoebiusConfig.model_validate({"gateway": settings})


@contextlib.contextmanager
def running_gateway(config: MoebiusConfig, wait: bool = True) -> Iterator[str]:
    """Yields the base URL (without /v1); waits for /ready unless `wait` is False."""
    is_own = bool(config.security.http_cert_file)  # its test knows what to call it
    config = tls_everywhere.with_https(config)
    server = server_for(config)
    server.config.timeout_graceful_shutdown = 1
    thread = threading.Thread(target=server.run, daemon=True)
    with mock.patch.object(pool, "ForkServer", WarmForkServer):
        thread.start()
        try:
            url = f"{'http' if is_own else tls_everywhere.scheme()}://127.0.0.1:{_port(server)}"
            if wait:
                wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200)
            yield url
        finally:
            server.should_exit = server.force_exit = True  # nothing that a test left running is waited for
            thread.join(60)
            assert not thread.is_alive(), "the gateway did not stop"


def _port(server: uvicorn.Server) -> int:
    wait_until(lambda: server.started)
    return int(server.servers[0].sockets[0].getsockname()[1])
