"""Guards that a batch survives kills of the gateway: each of its requests has exactly one result."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from moebius.config import MoebiusConfig
from tests.helpers import tls_everywhere
from tests.helpers.agent_gateway import agent_gateway
from tests.helpers.fake_engine import MODEL, FakeEngine, Script, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.ports import free_port
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer
from tests.helpers.waiting import wait_ready, wait_until
from tests.helpers.warm_processes import Program, start_program

PROGRAM = """
import sys
from gateway.main import run
from moebius.config import MoebiusConfig
from moebius.errors import UserError
try:
    sys.exit(run(MoebiusConfig.model_validate_json(sys.argv[1])))
except UserError as error:
    sys.exit(f"error: {error}")
"""
ENDPOINT = "/v1/completions"


def input_file(count: int) -> bytes:
    """Returns a file of `count` requests, each with a prompt of its own."""
    lines = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": ENDPOINT,
            "body": {"model": MODEL, "prompt": f"The fox {number}", "max_tokens": 4, "temperature": 0},
        }
        for number in range(count)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class Restarted:
    """A gateway that is killed and started again on the same port."""

    def __init__(self, config: MoebiusConfig, log: Path) -> None:
        self._config = config
        self._log = log
        self.url = f"{tls_everywhere.scheme()}://127.0.0.1:{config.gateway.port}"
        self.process = self._started()

    def _started(self) -> Program:
        with self._log.open("ab") as sink:
            return start_program(["-c", PROGRAM, self._config.model_dump_json()], sink, sink)

    def restart(self) -> None:
        """Kills the gateway as the kernel does, and starts it again."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = self._started()

    def wait_ready(self) -> None:
        """Waits until requests are answered."""
        wait_ready(self.url, self.process, self._log)


@contextmanager
def restartable(directory: Path, workers: int) -> Iterator[tuple[Restarted, FakeEngine]]:
    """A gateway in processes of its own, in front of a scripted engine."""
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    address = f"unix:{directory}/engine.sock"
    engine = FakeEngine(directory, tokenizer)
    config = gateway_config(address, port=free_port(), workers=workers, batch_dir=str(directory / "batches"))
    with serving(engine, address):
        started = Restarted(tls_everywhere.with_https(config), directory / "log")
        try:
            started.wait_ready()
            yield started, engine
        finally:
            started.process.terminate()
            started.process.wait(60)


def status(client: openai.OpenAI, batch_id: str) -> Any:
    """The batch, from whichever process answers."""
    while True:
        try:
            return client.batches.retrieve(batch_id)
        except (openai.APIConnectionError, openai.InternalServerError):
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("count", "workers"),
    [(300, 1), pytest.param(300, 2, marks=pytest.mark.full), pytest.param(10_000, 1, marks=pytest.mark.full)],
)
def test_a_batch_survives_kills(tmp_path: Path, count: int, workers: int) -> None:
    """Killed twice at random points, a batch completes, with each id and its tokens once in its results."""
    draw = random.Random(count + workers)
    points = sorted(draw.sample(range(count // 10, count * 9 // 10), 2))
    with restartable(tmp_path, workers) as (gateway, engine):
        engine.script = Script(text="fox", delay_s=0.005)
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60)
        file_id = client.files.create(file=("lines.jsonl", input_file(count)), purpose="batch").id
        batch = client.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")
        for point in points:
            # By what the engine was sent: what the gateway says is a second behind.
            while len(engine.seen.requests) < point:
                assert gateway.process.poll() is None
                time.sleep(0.002)
            gateway.restart()
        end = time.monotonic() + 60 + count / 10
        while (batch := status(client, batch.id)).status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing"), batch
            assert time.monotonic() < end, batch
            time.sleep(0.2)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.total) == (count, count)
        assert batch.usage is not None
        results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    ids = Counter(one["custom_id"] for one in results)
    assert ids == Counter(f"line-{number}" for number in range(count))
    assert all(one["response"]["status_code"] == 200 for one in results)
    usages = [one["response"]["body"]["usage"] for one in results]
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages) > 0
    assert batch.usage.total_tokens == sum(usage["total_tokens"] for usage in usages)


def test_two_gateways_run_a_batch_once(tmp_path: Path) -> None:
    """Gateways with a common directory share the work: no request reaches the engine twice, and each
    gateway knows of the other's batches."""
    shared = str(tmp_path / "batches")
    with agent_gateway(tmp_path, batch_dir=shared) as one:
        address = f"unix:{tmp_path}/engine.sock"
        with running_gateway(gateway_config(address, batch_dir=shared)) as url:
            clients = [
                openai.OpenAI(base_url=f"{base}/v1", api_key="none", timeout=60) for base in (one.url, url)
            ]
            file_id = clients[0].files.create(file=("lines.jsonl", input_file(60)), purpose="batch").id
            one.says("fox", delay_s=0.005)
            made = [
                client.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h").id
                for client in (*clients, *clients)
            ]
            wait_until(lambda: all(clients[1].batches.retrieve(one).status == "completed" for one in made))
            assert len(one.engine.seen.requests) == 4 * 60
