"""Guards the whole system with mutual TLS between all processes and HTTPS to clients: a short set of the
clients' checks and of the faults, with expert servers that are reached by gRPC."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from app.commands.experts import distinct_experts
from moebius.config import SecurityConfig
from moebius.network.tls import configure_tls
from tests.helpers.certificates import Authority, grpc_flags, grpc_security, write_secret
from tests.helpers.demo import EXACT_FLAGS, MODEL, demo_checkpoint
from tests.helpers.openai_checks import ALL_CHECKS
from tests.helpers.stack import Stack, running_stack

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The certificates; clients of this process trust their CA."""
    directory, authority = tmp_path_factory.mktemp("secret"), Authority()
    write_secret(directory, authority.issue("moebius"), authority.pem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(directory / "ca.crt"))
        yield directory


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, secret: Path) -> Iterator[Stack]:
    """Yields the stack of test_end_to_end.py, with TLS everywhere."""
    directory = tmp_path_factory.mktemp("stack")
    flags = list(EXACT_FLAGS)
    flags += ["--expert-transport", "grpc", *grpc_flags(secret)]
    flags += ["--http-cert-file", str(secret / "tls.crt"), "--http-key-file", str(secret / "tls.key")]
    with running_stack(demo_checkpoint(), directory, *flags, scheme="https") as running:
        yield running


def complete(stack: Stack, prompt: str, max_tokens: int = 64) -> str:
    """Returns greedy text of one completion."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.full  # `make test-tls` runs all of them, of test_end_to_end.py
@pytest.mark.parametrize("check", ALL_CHECKS[:4], ids=lambda check: check.__name__)
def test_openai_client(stack: Stack, check: Callable[[str, str], None]) -> None:
    """What clients see is what they see without TLS."""
    check(stack.base_url, MODEL)


@pytest.mark.full
def test_expert_server_killed_while_decoding(stack: Stack) -> None:
    """A server that is killed comes back through new handshakes, and no token changes."""
    prompts = [f"Chapter {number}. The history of the lighthouse began when" for number in range(2)]
    expected = [complete(stack, prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(complete, stack, prompt) for prompt in prompts]
        time.sleep(0.5)
        os.kill(stack.children("expert")[0].pid, signal.SIGKILL)
        assert [future.result(timeout=120) for future in futures] == expected


def test_processes_answer_no_client_without_a_certificate(stack: Stack, secret: Path) -> None:
    """Neither the engine's nor an expert server's socket says a word in plain text; with the certificate,
    commands such as `moebius experts record` are answered."""
    for name in ("gpu", "expert-0"):
        (path,) = stack.state_dir.rglob(f"{name}.sock")
        with grpc.insecure_channel(f"unix:{path}") as channel, pytest.raises(grpc.RpcError) as caught:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    (engine,) = stack.state_dir.rglob("gpu.sock")
    configure_tls(grpc_security(secret))
    try:
        with distinct_experts(f"unix:{engine}") as found:
            complete(stack, "One, two,", 4)
    finally:
        configure_tls(SecurityConfig())
    assert found
