"""Guards that no request makes the streams of others wait: whatever is large is taken in small pieces."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from gateway.server import server_for
from moebius.app.bench.gateway.engine import write_tokenizer
from moebius.app.bench.gateway.processes import scripted_engine
from moebius.app.bench.gateway.stalls import HEAVY
from moebius.config import MoebiusConfig
from tests.helpers import tls_everywhere
from tests.helpers.stack import free_port

# Of one turn of the event loop, in the loop's own processor time, which a busy machine does not prolong. The
# figure by the clock is that of `moebius bench gateway`.
LONGEST_TURN_S = 0.06


class Watched:
    """A gateway in a thread, and the longest turn of its event loop."""

    def __init__(self, config: MoebiusConfig) -> None:
        self.url = f"{tls_everywhere.scheme()}://127.0.0.1:{config.gateway.port}"
        self.longest_s = 0.0
        self._server = server_for(tls_everywhere.with_https(config))
        self.thread = threading.Thread(target=uvloop.run, args=(self._run(),), daemon=True)

    async def _run(self) -> None:
        watching = asyncio.create_task(self._watch())
        await self._server.serve()
        watching.cancel()

    async def _watch(self) -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.thread_time() - before)

    def stop(self) -> None:
        """Ends it."""
        self._server.should_exit = True
        self.thread.join(30)


@contextmanager
def watched(directory: Path) -> Iterator[Watched]:
    """A gateway in front of the bench's engine, ready."""
    write_tokenizer(directory)
    address = f"unix:{directory}/engine.sock"
    values: dict[str, Any] = {
        "model": {"model": str(directory)},
        "gateway": {"port": free_port(), "engine_address": address, "max_body_mib": 64.0},
        "images": {"max_images_per_request": 32},
    }
    with tls_everywhere.plain_grpc(), scripted_engine(address, directory, 10):
        running = Watched(MoebiusConfig.model_validate(values))
        running.thread.start()
        try:
            end = time.monotonic() + 60
            while True:
                assert time.monotonic() < end
                try:
                    if httpx.get(f"{running.url}/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.05)
            yield running
        finally:
            running.stop()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """One for this file."""
    with watched(tmp_path_factory.mktemp("stalls")) as running:
        yield running


@pytest.mark.parametrize("name", HEAVY)
def test_no_turn_of_the_loop_is_long(gateway: Watched, name: str) -> None:
    """Bodies are received, handed on and answered, and what comes of them is sent to the engine, in pieces:
    the longest computation between two looks at other streams stays short."""
    heavy = HEAVY[name]
    body = heavy.body("scripted")
    gateway.longest_s = 0.0
    answer = httpx.post(
        f"{gateway.url}{heavy.path}",
        **({"content": body} if isinstance(body, bytes) else {"json": body}),
        timeout=120,
    )
    assert answer.status_code == heavy.status, answer.text[:300]
    print(f"{name}: {gateway.longest_s * 1e3:.1f} ms")
    assert gateway.longest_s < LONGEST_TURN_S
