"""Guards several gateway processes on one port: to clients they are one, whatever happens to any of them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from moebius.config import MoebiusConfig, SupervisorConfig
from moebius.models.identity import identity_text, text_parts
from tests.helpers import tls_everywhere
from tests.helpers.fake_engine import MODEL, FakeEngine, Script, serving
from tests.helpers.gateway_server import gateway_config
from tests.helpers.ports import free_port
from tests.helpers.swapped_files import put, swap_tokens
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer
from tests.helpers.warm_processes import Program, run_program, start_program

# Where it is a fork, it names what it starts processes by: they become forks, too (warm_processes.py).
PROGRAM = """
import sys
import gateway.workers.group
from gateway.main import run
from moebius.config import MoebiusConfig
from moebius.errors import UserError
try:
    sys.exit(run(MoebiusConfig.model_validate_json(sys.argv[1])))
except UserError as error:
    sys.exit(f"error: {error}")
"""
BODY = {"model": MODEL, "prompt": "The", "max_tokens": 3, "ignore_eos": True}
STREAM = {**BODY, "max_tokens": 40, "stream": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, str]]:
    """A scripted engine and its address."""
    directory = tmp_path_factory.mktemp("workers")
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    fake = FakeEngine(directory, tokenizer)
    with serving(fake, f"unix:{directory}/engine.sock"):
        yield fake, f"unix:{directory}/engine.sock"


class Gateway:
    """The processes of one port."""

    def __init__(self, process: Program, port: int, log: Path) -> None:
        self.process, self.url, self.log = process, f"{tls_everywhere.scheme()}://127.0.0.1:{port}", log

    def workers(self) -> list[psutil.Process]:
        """Returns those that serve, oldest first."""
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # a process that has just ended is one of these
                found += [one] if "gateway.workers.member" in one.cmdline() else []
        return sorted(found, key=lambda one: (one.create_time(), one.pid))

    def post(self, body: Any) -> httpx.Response:
        """Sends a request on a connection of its own: each may reach another process."""
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def metric(self, name: str) -> float:
        """Returns the sum of a metric's samples."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for it: processes start slowly on a busy machine, and one that ends resets connections."""

        def holds() -> bool:
            try:
                return condition()
            except httpx.TransportError:
                return False

        end = time.monotonic() + 240
        while not holds():
            assert time.monotonic() < end, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def answers(self) -> bool:
        """Returns whether a request would be answered by any process it reaches; asked several times."""
        return all(httpx.get(f"{self.url}/ready").status_code == 200 for _ in range(8))


@contextmanager
def gateway(
    engine: tuple[FakeEngine, str],
    directory: Path,
    hang_timeout_s: float = 120.0,
    model: Path | None = None,
    **settings: Any,
) -> Iterator[Gateway]:
    """Two processes, ready; `model`: where they read their files, None: where the engine says."""
    engine[0].reset()
    port, log = free_port(), directory / "log"
    config: MoebiusConfig = gateway_config(engine[1], port=port, workers=2, **settings)
    sections: dict[str, Any] = {"supervisor": SupervisorConfig(hang_timeout_s=hang_timeout_s)}
    sections["model"] = config.model.model_copy(update={"model": str(model or "")})
    config = config.model_copy(update=sections)
    config = tls_everywhere.with_https(config)
    with log.open("wb") as sink:
        process = start_program(["-c", PROGRAM, config.model_dump_json()], sink, sink)
    started = Gateway(process, port, log)
    try:
        started.until(lambda: len(started.workers()) == 2 and started.answers())
        yield started
    finally:
        if process.poll() is None:
            for worker in started.workers():
                worker.kill()
        process.kill()
        process.wait()


def test_to_clients_they_are_one(engine: tuple[FakeEngine, str], tmp_path: Path) -> None:
    """Any process answers, and continues what another one answered; counts are of all of them, in any
    answer; the bound on requests in flight is common; a process that is killed is replaced, its counts
    stay, and others never notice; at SIGTERM streams end in order and all processes are gone."""
    with gateway(engine, tmp_path, max_queued_requests=3) as running:
        for _ in range(12):
            assert running.post(BODY).status_code == 200
        success = "vllm:request_success_total"
        assert {running.metric(success) for _ in range(6)} == {12}
        assert running.metric("moebius:gateway_workers") == 2
        first_id = httpx.post(f"{running.url}/v1/responses", json={"input": "x"}).json()["id"]
        follow = {"input": "y", "previous_response_id": first_id}
        answers = [httpx.post(f"{running.url}/v1/responses", json=follow) for _ in range(8)]
        assert {answer.status_code for answer in answers} == {200}

        held = threading.Event()
        engine[0].script = Script(held=held)
        with ThreadPoolExecutor(3) as pool:
            streams = [pool.submit(running.post, STREAM) for _ in range(3)]
            running.until(lambda: running.metric("moebius:gateway_requests_in_flight") == 3)
            assert [running.post(BODY).status_code for _ in range(6)] == [429] * 6
            held.set()
            assert all(one.result().text.endswith("data: [DONE]\n\n") for one in streams)

        engine[0].script = Script()
        first = running.workers()[0]
        finished = running.metric(success)
        assert finished == 24
        first.kill()
        running.until(
            lambda: len(running.workers()) == 2 and first.pid not in {w.pid for w in running.workers()}
        )
        running.until(running.answers)
        assert running.metric(success) == finished
        assert running.metric("moebius:gateway_worker_restarts_total") == 1

        held = threading.Event()
        engine[0].script = Script(held=held)
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(running.post, STREAM)
            running.until(lambda: running.metric("moebius:gateway_requests_in_flight") == 1)
            workers = running.workers()
            running.process.terminate()
            held.set()
            assert stream.result().text.endswith("data: [DONE]\n\n")
        assert running.process.wait(60) == 0
        assert not [worker for worker in workers if worker.is_running()]
        assert "Traceback" not in running.log.read_text()


def test_a_process_that_hangs_is_replaced(engine: tuple[FakeEngine, str], tmp_path: Path) -> None:
    """One whose event loop stands still shows no sign of life, though it has not ended."""
    with gateway(engine, tmp_path, hang_timeout_s=3.0) as running:
        frozen = running.workers()[0]
        frozen.send_signal(signal.SIGSTOP)
        running.until(lambda: not frozen.is_running())
        running.until(lambda: len(running.workers()) == 2 and running.answers())
        assert "gateway process hangs" in running.log.read_text()


def test_sighup_replaces_all_and_loses_no_request(engine: tuple[FakeEngine, str], tmp_path: Path) -> None:
    """Every process is replaced; a stream that runs goes on to its end in the process that has it, and
    requests that are sent meanwhile are answered."""
    with gateway(engine, tmp_path) as running:
        engine[0].script = Script(delay_s=0.05)
        before = {worker.pid for worker in running.workers()}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=STREAM, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(running.process.pid, signal.SIGHUP)
            statuses: list[int] = []
            rest: list[str] = []
            while before & {worker.pid for worker in running.workers()}:
                # A connection that the kernel has given to a process in its last moment may be reset, as with
                # any server that is replaced: clients of HTTP try such a request again.
                with suppress(httpx.NetworkError, httpx.RemoteProtocolError):
                    statuses.append(running.post(BODY).status_code)
                if len(statuses) == 3:
                    rest = list(lines)
            rest = rest or list(lines)
        assert set(statuses) == {200}
        assert rest[-2:] == ["data: [DONE]", ""]
        running.until(lambda: len(running.workers()) == 2 and running.answers())


def test_one_that_finds_another_tokenizer_does_not_serve(
    engine: tuple[FakeEngine, str], tmp_path: Path
) -> None:
    """Killed after the file was replaced, it does not come back: the others have the right one and answer,
    and /ready names the file; with the file back all is as before. At SIGHUP files may be others, if they are
    the engine's, too."""
    files = tmp_path / "model"
    files.mkdir()
    write_tokenizer(files, byte_level_tokenizer())
    right = (files / "tokenizer.json").read_bytes()
    with gateway(engine, tmp_path, model=files) as running:

        def tokens() -> list[int]:
            found: list[int] = httpx.post(f"{running.url}/tokenize", json={"prompt": "ABC"}).json()["tokens"]
            return found

        expected = tokens()
        swap_tokens(files / "tokenizer.json")
        killed, kept = running.workers()
        killed.kill()
        said = "tokenizer.json has changed since the gateway was started"
        running.until(lambda: said in httpx.get(f"{running.url}/ready", timeout=60).text)
        assert httpx.get(f"{running.url}/ready").status_code == 503
        assert [tokens() for _ in range(8)] == [expected] * 8
        put(files / "tokenizer.json", right)
        running.until(lambda: len(running.workers()) == 2 and running.answers())
        assert kept.pid in {worker.pid for worker in running.workers()}

        swap_tokens(files / "tokenizer.json")
        engine[0].identity = identity_text(text_parts(files))
        running.process.send_signal(signal.SIGHUP)
        running.until(lambda: kept.pid not in {worker.pid for worker in running.workers()})
        running.until(lambda: running.answers() and tokens() != expected)
    engine[0].identity = ""


def test_settings_that_can_not_be_used_are_refused_once(
    engine: tuple[FakeEngine, str], tmp_path: Path
) -> None:
    """The settings are refused once, not by each process again and again; a model that cannot be served ends
    them all.
    """
    engine[0].reset()
    settings = gateway_config(engine[1], port=free_port(), workers=3, max_connections=10**9)
    wrong = json.loads(settings.model_dump_json())
    for config, words in (
        (wrong, "max_connections: 1000000000 is not allowed"),
        (
            {**wrong, "gateway": {**wrong["gateway"], "max_connections": None, "chat_template": "/nowhere"}},
            "/nowhere",
        ),
    ):
        ended = run_program(["-c", PROGRAM, json.dumps(config)])
        assert ended.returncode == 1, ended.stderr
        assert words in ended.stderr.splitlines()[-1]
        assert "Traceback" not in ended.stderr


def test_operators_have_a_port_and_no_process_outlives_the_first(
    engine: tuple[FakeEngine, str], tmp_path: Path
) -> None:
    """Metrics and probes of all processes are on one port, by the first one; metrics are nowhere else. The
    port of clients cannot be taken by accident until a process without its supervising process has ended.
    """
    operators = free_port()
    with gateway(engine, tmp_path, gateway_metrics_port=operators) as one:
        url = f"http://127.0.0.1:{operators}"
        assert one.post(BODY).status_code == 200
        page = httpx.get(f"{url}/metrics", timeout=60).text
        assert "moebius:gateway_workers 2.0" in page
        assert 'vllm:request_success_total{finished_reason="length",model_name="tiny-model"} 1.0' in page
        assert httpx.get(f"{one.url}/metrics", timeout=60).status_code == 404
        for path in ("/health", "/ready"):
            assert httpx.get(url + path, timeout=60).status_code == 200, path

        port = int(one.url.rsplit(":", 1)[1])
        config = gateway_config(engine[1], port=port, workers=2).model_dump_json()
        second = run_program(["-c", PROGRAM, config])
        assert second.returncode == 1
        assert f"cannot serve HTTP on 127.0.0.1:{port}" in second.stderr
        workers = one.workers()
        one.process.kill()
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive
