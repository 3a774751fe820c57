"""Guards that clients of one server have equal shares of it, even if one of them sends more at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from moebius.network.api_keys import KeyLimits, add_key
from tests.helpers.engine_process import engine_process, write_one_layer
from tests.helpers.fake_engine import MODEL, FakeEngine, Script, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

pytestmark = pytest.mark.plain_http
SEQS = 2


@contextlib.contextmanager
def engine(directory: Path) -> Iterator[str]:
    """The address of a real engine process with few places, which computes a tiny checkpoint."""
    address = f"unix:{directory}/engine.sock"
    options = ("--num-pages", "4096", "--max-num-seqs", str(SEQS), "--gpu-threads", "1")
    with engine_process(write_one_layer(directory / "tiny"), address, directory / "log", *options):
        yield address


class Load:
    """Clients that each send their next request when one is answered, until a number of tokens is served."""

    def __init__(self, url: str, tokens: int) -> None:
        self.url = url
        self.left = tokens
        self.tokens: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()

    async def _send(self, client: httpx.AsyncClient, key: str, number: int) -> None:
        sent = 0
        while self.left > 0:
            sent += 1
            prompt = [3 + number % 60, 3 + sent % 60, *[5] * 30]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 32, "ignore_eos": True, "seed": 1}
            answer = await client.post(
                f"{self.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            )
            assert answer.status_code == 200, answer.text
            if self.left <= 0:  # what was in progress then says nothing of shares
                return
            served = answer.json()["usage"]["total_tokens"]
            self.left -= served
            self.tokens[key] += served
            self.answers[key] += 1

    async def run(self, connections: dict[str, int]) -> Load:
        """`connections`: number per key."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            await asyncio.gather(
                *(
                    self._send(client, key, 100 * place + number)
                    for place, (key, many) in enumerate(connections.items())
                    for number in range(many)
                )
            )
        return self


def test_one_key_with_many_connections_leaves_others_their_share(tmp_path: Path) -> None:
    """Next to one key with 64 connections another one with 16 has as many tokens, within 10 %; and one with a
    single connection is not behind those who came first, but has a place in every turn.
    """
    keys = str(tmp_path / "keys")
    greedy, other = (add_key(keys, name, KeyLimits()) for name in ("greedy", "other"))
    with engine(tmp_path) as address, running_gateway(gateway_config(address, api_key_file=keys)) as url:
        load = asyncio.run(Load(url, 6_400).run({greedy: 64, other: 16}))
        share = load.tokens[other] / load.tokens.total()
        print(f"64 and 16 connections: the smaller one has {share:.1%} of {load.tokens.total()} tokens")
        assert 0.45 <= share <= 0.55
        load = asyncio.run(Load(url, 3_200).run({greedy: 64, other: 1}))
        print(f"64 connections and 1: {load.answers[other]} of {load.answers.total()} answers")
        # One place of SEQS + 1, as each of its requests waits for the next place that is free.
        assert load.answers[other] >= load.answers.total() / (SEQS + 1) / 2


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, str, Path]]:
    """A scripted engine, its address and a directory."""
    directory = tmp_path_factory.mktemp("shares")
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    address = f"unix:{directory}/engine.sock"
    scripted = FakeEngine(directory, tokenizer)
    with serving(scripted, address):
        yield scripted, address, directory


def test_a_client_that_fills_the_gateway_keeps_no_other_out(fake: tuple[FakeEngine, str, Path]) -> None:
    """All places are one key's: its next request gets 429, another key's is answered, up to an equal share.
    The engine gets a client identifier that is no key and no name."""
    scripted, address, directory = fake
    keys = str(directory / "keys")
    greedy, other = (add_key(keys, name, KeyLimits()) for name in ("greedy", "other"))
    body = {"model": MODEL, "prompt": "The", "max_tokens": 8, "ignore_eos": True}
    config = gateway_config(address, api_key_file=keys, max_queued_requests=4)
    with running_gateway(config) as url, ThreadPoolExecutor(16) as threads:

        def post(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code

        scripted.reset()
        go_on = threading.Event()
        scripted.script = Script(held=go_on)
        held = [threads.submit(post, greedy) for _ in range(4)]
        while len(scripted.seen.requests) < 4:
            assert not any(one.done() for one in held)
        assert post(greedy) == 429
        others = [threads.submit(post, other) for _ in range(2)]
        while len(scripted.seen.requests) < 6:
            assert not any(one.done() for one in others)
        assert post(other) == 429  # it has a half of the places
        go_on.set()
        assert [one.result() for one in (*held, *others)] == [200] * 6
    fairness_ids = Counter(request.fairness_id for request in scripted.seen.requests)
    assert sorted(fairness_ids.values()) == [2, 4]
    for name in fairness_ids:
        assert not any(secret in name for secret in (greedy, other, "greedy", "other"))


def test_without_keys_an_address_is_a_client(fake: tuple[FakeEngine, str, Path]) -> None:
    """The one that connects, whatever it says it forwards for, or the one that a proxy on this machine says;
    requests of all APIs have it."""
    scripted, address, _ = fake
    scripted.reset()
    with running_gateway(gateway_config(address, host="0.0.0.0")) as url:
        port = url.rpartition(":")[2]
        for local, forwarded in (
            ("127.0.0.2", ""),
            ("127.0.0.2", "1.2.3.4"),
            ("127.0.0.1", ""),
            ("127.0.0.1", "1.2.3.4"),
        ):
            transport = httpx.HTTPTransport(local_address=local)
            headers = {"X-Forwarded-For": forwarded} if forwarded else {}
            body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            with httpx.Client(transport=transport, headers=headers, timeout=60) as client:
                for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
                    sent = {**body, "stream": False}
                    assert client.post(f"http://127.0.0.1:{port}{path}", json=sent).status_code == 200
    fairness_ids = [request.fairness_id for request in scripted.seen.requests]
    assert len(set(fairness_ids[:6])) == len(set(fairness_ids[6:9])) == len(set(fairness_ids[9:])) == 1
    assert len(set(fairness_ids)) == 3
    assert all(fairness_ids)
