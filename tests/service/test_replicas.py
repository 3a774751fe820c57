"""Guards that the death of an engine replica costs no client an answer that had not begun."""

from __future__ import annotations

import contextlib
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.helpers.engine_process import engine_process, write_one_layer
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.waiting import wait_until

PROMPT_TOKENS, TOKENS = 8, 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny checkpoint with random weights and a tokenizer."""
    return write_one_layer(tmp_path_factory.mktemp("model") / "tiny")


def test_no_answer_that_had_not_begun_is_lost_with_its_replica(model: Path, tmp_path: Path) -> None:
    """One of two engines is killed under load. Whole answers, which have shown nothing, all arrive, though
    some were being computed there; of streams only those that had begun there end, with an error in-band, or
    with 503 where nothing of them was shown yet; the gateway is ready all the time."""
    addresses = [f"unix:{tmp_path}/{number}.sock" for number in range(2)]
    with contextlib.ExitStack() as stack:
        first, _ = (
            stack.enter_context(
                engine_process(model, address, tmp_path / f"{number}.log", "--num-pages", "512")
            )
            for number, address in enumerate(addresses)
        )
        url = stack.enter_context(running_gateway(gateway_config("unused:1", engines=addresses)))
        both = [f'moebius:gateway_replica_up{{replica="{address}"}} 1.0' for address in addresses]
        wait_until(lambda: all(line in httpx.get(f"{url}/metrics").text for line in both))
        pool = stack.enter_context(ThreadPoolExecutor(24))
        killed = threading.Event()
        whole = [pool.submit(ask_until, killed, url, number, stream=False) for number in range(16)]
        streams = [pool.submit(ask_until, killed, url, number, stream=True) for number in range(16, 24)]
        busy = [
            f'moebius:gateway_replica_requests_in_flight{{replica="{address}"}} 0.0' for address in addresses
        ]
        wait_until(
            lambda: not any(line in text for text in [httpx.get(f"{url}/metrics").text] for line in busy)
        )
        first.send_signal(signal.SIGKILL)
        killed.set()
        answers = [answer for one in whole for answer in one.result()]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {TOKENS}
        streamed = [answer for one in streams for answer in one.result()]
        texts = [answer.text for answer in streamed if answer.status_code == 200]
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        failed = [text for text in texts if '"error"' in text]
        assert all('"code":"engine_unavailable"' in text and '"text"' in text for text in failed)
        unshown = [answer for answer in streamed if answer.status_code != 200]
        assert {answer.status_code for answer in unshown} <= {503}
        assert all('"code":"engine_unavailable"' in answer.text for answer in unshown)
        assert httpx.get(f"{url}/ready").status_code == 200
        assert [ask(url, number, stream=False).status_code for number in range(4)] == [200] * 4


def ask(url: str, number: int, stream: bool) -> httpx.Response:
    """Returns one request with a prompt of its own."""
    prompt = [(number * 7 + position) % 200 + 3 for position in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": stream, "model": "tiny"}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def ask_until(event: threading.Event, url: str, number: int, stream: bool) -> list[httpx.Response]:
    """Returns one request after the other, the last of which was sent before the event: however slow the
    reader of the load is, there is some.
    """
    answers = [ask(url, number, stream)]
    while not event.is_set():
        answers.append(ask(url, number, stream))
    return answers
