"""Guards the gateway as a process of its own: uvloop, signals, exit codes, and what it loads."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from moebius.config import SupervisorConfig
from tests.helpers import tls_everywhere
from tests.helpers.fake_engine import MODEL, FakeEngine, Script, serving
from tests.helpers.gateway_server import gateway_config
from tests.helpers.ports import free_port
from tests.helpers.stack import ROOT
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer
from tests.helpers.waiting import wait_ready

PROGRAM = """
import sys
from gateway.main import run
from moebius.config import MoebiusConfig
code = run(MoebiusConfig.model_validate_json(sys.argv[1]))
loaded = [name for name in ("torch", "transformers") if name in sys.modules]
print("loaded:", loaded, file=sys.stderr)
sys.exit(code)
"""


def start(address: str, port: int, stop_timeout_s: float = 20.0) -> subprocess.Popen[str]:
    """Starts a gateway process."""
    supervisor = SupervisorConfig(stop_timeout_s=stop_timeout_s)
    config = gateway_config(address, port=port).model_copy(update={"supervisor": supervisor})
    config = tls_everywhere.with_https(config)
    command = [sys.executable, "-c", PROGRAM, config.model_dump_json()]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[FakeEngine, str]]:
    """A scripted engine and its address."""
    tokenizer = byte_level_tokenizer()
    write_tokenizer(tmp_path, tokenizer)
    fake = FakeEngine(tmp_path, tokenizer)
    address = f"unix:{tmp_path}/engine.sock"
    with serving(fake, address):
        yield fake, address


def test_serves_then_stops_cleanly_on_sigterm(engine: tuple[FakeEngine, str]) -> None:
    """SIGTERM lets an open stream finish, then the process exits with 0, torch never loaded."""
    fake, address = engine
    port = free_port()
    process = start(address, port)
    try:
        url = f"{tls_everywhere.scheme()}://127.0.0.1:{port}"
        wait_ready(url, process)
        held = threading.Event()
        fake.script = Script(held=held)
        body = {"model": MODEL, "prompt": "The", "max_tokens": 15, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            until_refused(f"{url}/ready")
            held.set()
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, log
    assert "loaded: []" in log


BODY = {"model": MODEL, "prompt": "The", "max_tokens": 200, "ignore_eos": True}


@pytest.mark.parametrize("end", ["time", "second signal"])
def test_what_does_not_end_in_time_gets_an_error(engine: tuple[FakeEngine, str], end: str) -> None:
    """stop_timeout_s, or a second signal, ends running requests with an error of their own shape; meanwhile
    new ones are refused with Retry-After. No traceback, status 0."""
    fake, address = engine
    port = free_port()
    process = start(address, port, stop_timeout_s=12.0 if end == "time" else 600.0)
    try:
        url = f"{tls_everywhere.scheme()}://127.0.0.1:{port}"
        wait_ready(url, process)
        fake.script = Script(delay_s=0.5)
        with ThreadPoolExecutor(2) as pool, httpx.Client(timeout=60) as client:
            whole = pool.submit(httpx.post, f"{url}/v1/completions", json=BODY, timeout=60)
            with client.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                ready = until_refused(f"{url}/ready")
                late = httpx.post(f"{url}/v1/completions", json=BODY)
                if end == "second signal":
                    process.send_signal(signal.SIGTERM)
                events = [line.removeprefix("data: ") for line in lines if line]
            answer = whole.result(timeout=60)
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
    for refused in (ready, late, answer):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["Retry-After"] == "2"
    assert json.loads(events[-2])["error"]["code"] == "shutting_down"
    assert events[-1] == "[DONE]"
    assert process.returncode == 0, log
    assert "Traceback" not in log


def test_signal_without_requests_ends_at_once(engine: tuple[FakeEngine, str]) -> None:
    """Nothing runs, so nothing is waited for."""
    port = free_port()
    process = start(engine[1], port, stop_timeout_s=600.0)
    try:
        wait_ready(f"{tls_everywhere.scheme()}://127.0.0.1:{port}", process)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, log
    assert "Traceback" not in log


def until_refused(url: str) -> httpx.Response:
    """Returns the first answer of a server that has begun to drain."""
    end = time.monotonic() + 60
    while (answer := httpx.get(url)).status_code == 200:
        assert time.monotonic() < end, "it does not drain"
        time.sleep(0.02)
    return answer


def test_taken_port_is_an_exit_code(engine: tuple[FakeEngine, str]) -> None:
    """A port in use ends the process with 1 and says so."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(engine[1], taken.getsockname()[1])
        try:
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "(--host, --port): Address already in use" in log


def test_broken_template_ends_the_process_before_any_engine_is_there(tmp_path: Path) -> None:
    """Files that cannot be used are refused at once, in one line that names the file, without a wait
    until the engine has loaded."""
    write_tokenizer(tmp_path, byte_level_tokenizer())
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    template = tmp_path / "broken.jinja"
    template.write_text("{% for message in messages %}")
    command = [sys.executable, "-m", "moebius", "gateway", str(tmp_path)]
    command += ["--port", str(free_port()), "--engine-address", f"unix:{tmp_path}/nobody.sock"]
    command += ["--chat-template", str(template)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("moebius: error: the model cannot be served")
    assert str(template) in last
    assert "Traceback" not in ended.stderr
