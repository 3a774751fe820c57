"""Guards the fault path of the whole system: no death of an expert server changes a single token."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers.demo import demo_checkpoint
from tests.helpers.stack import Stack, mailboxes_of, running_stack

pytestmark = pytest.mark.demo
MODEL = "moebius-demo"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo model in fp32 with all 16 experts (no near ties of the router) on two expert servers."""
    directory = tmp_path_factory.mktemp("stack")
    flags = [
        "--expert-servers",
        "2",
        "--dtype",
        "float32",
        "--experts-per-token",
        "16",
        "--served-model-name",
        MODEL,
    ]
    with running_stack(demo_checkpoint(), directory, *flags) as running:
        yield running


def complete(stack: Stack, prompt: str, max_tokens: int = 96) -> str:
    """Greedy text of one completion."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_expert_server_killed_while_decoding(stack: Stack) -> None:
    """SIGKILL of one server mid-decode: it is restarted and every request ends with the same tokens."""
    prompts = [f"Chapter {number}. The history of the lighthouse began when" for number in range(4)]
    expected = [complete(stack, prompt) for prompt in prompts]
    httpx.get(f"{stack.base_url}/health").raise_for_status()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(complete, stack, prompt) for prompt in prompts]
        time.sleep(0.7)
        victim = stack.children("expert")[0]
        assert not all(future.done() for future in futures), "the kill must hit running requests"
        os.kill(victim.pid, signal.SIGKILL)
        answers = [future.result(timeout=120) for future in futures]
    assert answers == expected
    assert victim.pid not in [child.pid for child in stack.children("expert")]
    assert len(stack.children("expert")) == 2
    # What it had packed was still there.
    assert stack.log.read_text().count("experts loaded") == 3
    assert stack.log.read_text().count("packed experts are there already") == 1


def test_killed_supervisor_leaves_nothing(tmp_path: Path) -> None:
    """kill -9 of the supervisor: its children die with it, and the next start removes the shared memory."""
    flags = ["--expert-servers", "2", "--served-model-name", MODEL]
    with running_stack(demo_checkpoint(), tmp_path, *flags) as first:
        children = psutil.Process(first.process.pid).children(recursive=True)
        first.process.kill()
        first.process.wait()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
        assert len(mailboxes_of(first)) == 1
        links = sorted(first.state_dir.rglob("*.weights"))
        assert [(link.name, link.exists()) for link in links] == [
            ("expert-0.weights", False),
            ("expert-1.weights", False),
        ]
    with running_stack(demo_checkpoint(), tmp_path, *flags) as second:
        assert complete(second, "One, two,", 4)
        assert mailboxes_of(first) == []
        assert len(mailboxes_of(second)) == 1
    assert mailboxes_of(second) == []
