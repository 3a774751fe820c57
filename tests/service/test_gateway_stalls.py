"""Guards that no request makes the streams of others wait: large ones are processed in small pieces."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from gateway.app.server import server_for
from lab.bench.gateway.engine import write_tokenizer
from lab.bench.gateway.processes import scripted_engine
from lab.bench.gateway.stalls import HEAVY
from moebius.config import MoebiusConfig
from tests.helpers import tls_everywhere
from tests.helpers.fake_engine import FakeEngine, serving
from tests.helpers.ports import free_port
from tests.helpers.tiny_tokenizer import byte_level_tokenizer
from tests.helpers.tiny_tokenizer import write_tokenizer as write_small_tokenizer

# Of one turn of the event loop, in the loop's own processor time; 6 ms is usual. What computes for long
# does so for each request, a busy machine disturbs one of them: a request may be sent again. The figure by
# the clock is that of `moebius bench gateway`.
LONGEST_TURN_S = 0.06
TRIALS = 10


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

    def shortest_stall(self, send: Callable[[], None]) -> float:
        """The longest turn of the loop while a request is answered, in seconds, of the best trial."""
        stalls = []
        for _ in range(TRIALS):
            self.longest_s = 0.0
            send()
            stalls.append(self.longest_s)
            if stalls[-1] < LONGEST_TURN_S:
                break
        return min(stalls)

    def stop(self) -> None:
        """Ends the gateway."""
        self._server.should_exit = True
        self.thread.join(30)


@contextmanager
def watched(directory: Path) -> Iterator[Watched]:
    """A gateway in front of the bench's engine, ready."""
    write_tokenizer(directory)
    address = f"unix:{directory}/engine.sock"
    values: dict[str, Any] = {
        "model": {"model": str(directory)},
        "gateway": {
            "port": free_port(),
            "engine_address": address,
            "max_body_mib": 64.0,
            "batch_dir": str(directory / "batches"),
        },
        "images": {"max_images_per_request": 32},
    }
    with (
        tls_everywhere.plain_grpc(),
        scripted_engine(address, directory, 10),
        serving_watched(values) as running,
    ):
        yield running


@contextmanager
def serving_watched(values: dict[str, Any]) -> Iterator[Watched]:
    """A gateway with these settings, ready."""
    running = Watched(MoebiusConfig.model_validate(values))
    # A gateway's own process has a small heap. Collecting that of the tests before this one takes 100 ms.
    gc.collect()
    gc.freeze()
    running.thread.start()
    try:
        end = time.monotonic() + 60
        while True:
            assert time.monotonic() < end
            try:
                if httpx.get(f"{running.url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        yield running
    finally:
        running.stop()
        gc.unfreeze()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A gateway shared by this file."""
    with watched(tmp_path_factory.mktemp("stalls")) as running:
        yield running


@pytest.mark.parametrize("name", HEAVY)
def test_no_turn_of_the_loop_is_long(gateway: Watched, name: str) -> None:
    """Bodies are received, handed on and answered, and what comes of them is sent to the engine, in pieces:
    the longest computation between two looks at other streams stays short."""
    heavy = HEAVY[name]
    body = heavy.body("scripted")

    def send() -> None:
        content: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = httpx.post(f"{gateway.url}{heavy.path}", **content, timeout=120)
        assert answer.status_code == heavy.status, answer.text[:300]

    assert gateway.shortest_stall(send) < LONGEST_TURN_S


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_long_answer_is_read_and_written_beside_the_loop(gateway: Watched, path: str) -> None:
    """An answer that comes as a whole has all its tokens in one message: other streams go on meanwhile."""
    chat = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 200_000}
    body = {"input": "go", "max_output_tokens": 200_000} if path.endswith("responses") else chat

    def send() -> None:
        answer = httpx.post(f"{gateway.url}{path}", json=body, timeout=120)
        assert answer.status_code == 200
        assert len(answer.content) > 1_000_000

    assert gateway.shortest_stall(send) < LONGEST_TURN_S


def test_a_batch_file_is_stored_and_checked_beside_the_loop(gateway: Watched) -> None:
    """A large upload goes to the disk in pieces, and its lines are read in prompt processes; the last one is
    broken, so that all are checked and none is run."""
    chat = {"messages": [{"role": "user", "content": "go " * 1000}]}
    fields = {"method": "POST", "url": "/v1/chat/completions", "body": chat}
    lines = [json.dumps({"custom_id": str(number), **fields}) for number in range(10_000)]
    files = {"file": ("lines.jsonl", "\n".join([*lines, "{"]).encode())}

    def send() -> None:
        file = httpx.post(
            f"{gateway.url}/v1/files", files=files, data={"purpose": "batch"}, timeout=120
        ).json()
        body = {"input_file_id": file["id"], "endpoint": fields["url"], "completion_window": "24h"}
        batch = httpx.post(f"{gateway.url}/v1/batches", json=body, timeout=120).json()
        end = time.monotonic() + 120
        while batch["status"] != "failed":
            assert batch["status"] == "validating", batch
            assert time.monotonic() < end
            time.sleep(0.1)
            batch = httpx.get(f"{gateway.url}/v1/batches/{batch['id']}", timeout=120).json()
        assert [one["line"] for one in batch["errors"]["data"]] == [10_001]

    assert gateway.shortest_stall(send) < LONGEST_TURN_S


def test_log_probabilities_of_many_tokens_are_written_beside_the_loop(tmp_path: Path) -> None:
    """Those of outputs and of prompts, with 20 alternatives each."""
    tokenizer = byte_level_tokenizer()
    write_small_tokenizer(tmp_path, tokenizer)
    address = f"unix:{tmp_path}/engine.sock"
    gateway = {"port": free_port(), "engine_address": address, "prompt_workers": 1}
    engine = FakeEngine(tmp_path, tokenizer, 20_000)
    with serving(engine, address), serving_watched({"gateway": gateway}) as running:
        body = {
            "prompt": [7] * 3000,
            "max_tokens": 3000,
            "ignore_eos": True,
            "logprobs": 20,
            "prompt_logprobs": 20,
        }

        def send() -> None:
            answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=120)
            choice = answer.json()["choices"][0]
            assert [len(choice["logprobs"]["tokens"]), len(choice["prompt_logprobs"])] == [3000, 3000]

        assert running.shortest_stall(send) < LONGEST_TURN_S
