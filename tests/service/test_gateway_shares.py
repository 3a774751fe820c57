"""Guards that clients of one server have equal shares of it, even if one of them sends more at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
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


async def answered(url: str, keys: Sequence[str]) -> list[str]:
    """Returns keys in the order in which the requests are answered that each of `keys` sends, all at once."""
    order: list[str] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def send(number: int, key: str) -> None:
            prompt = [3 + number % 60, 3 + number // 60, *[5] * 30]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "ignore_eos": True, "seed": 1}
            headers = {"Authorization": f"Bearer {key}"}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            order.append(key)

        await asyncio.gather(*(send(*each) for each in enumerate(keys)))
    return order


def test_one_key_with_many_requests_leaves_others_their_share(tmp_path: Path) -> None:
    """While a key's 16 requests are answered, which came after 64 of another's, about as many of those are.
    The only request of a key is not behind those that came first.
    """
    keys = str(tmp_path / "keys")
    greedy, other = (add_key(keys, name, KeyLimits()) for name in ("greedy", "other"))
    with engine(tmp_path) as address, running_gateway(gateway_config(address, api_key_file=keys)) as url:
        order = asyncio.run(answered(url, [greedy] * 64 + [other] * 16))
        meanwhile = order[order.index(other) : len(order) - order[::-1].index(other)]
        assert 12 <= meanwhile.count(greedy) <= 20
        # In the order of their arrival it would be the last one.
        order = asyncio.run(answered(url, [greedy] * 64 + [other]))
        assert order.index(other) <= 48


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
