"""Guards keys in the running gateway: tokens of answers and streams are counted against their key's limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from moebius.network.api_keys import KeyLimits, add_key
from tests.helpers.fake_engine import MODEL, FakeEngine, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

BODY = {"model": MODEL, "prompt": "The", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A gateway and its key file."""
    directory = tmp_path_factory.mktemp("keys")
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    address, keys = f"unix:{directory}/engine.sock", directory / "keys"
    add_key(str(keys), "first", KeyLimits())
    config = gateway_config(address, api_key_file=str(keys))
    with serving(FakeEngine(directory, tokenizer), address), running_gateway(config) as running:
        yield running, keys


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tokens_count_against_the_key(url: tuple[str, Path], stream: bool) -> None:
    """A key that was made while the gateway runs may send until it has had its tokens; then it waits, and
    others do not."""
    base, keys = url
    name = "streams" if stream else "answers"
    limited = add_key(str(keys), name, KeyLimits(tokens_per_minute=12))
    free = add_key(str(keys), f"{name}-free", KeyLimits())

    def post(key: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        body = {**BODY, "stream": stream}
        return httpx.post(f"{base}/v1/completions", json=body, headers=headers, timeout=60)

    assert [post(limited).status_code for _ in range(2)] == [200, 200]
    # The last tokens of a stream are counted once it has ended, which its client may see first. Of later ones
    # none is asked for: a key has a token more every five seconds.
    refused = next(answer for answer in (post(limited) for _ in range(3)) if answer.status_code != 200)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "12 tokens per minute" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert post(free).status_code == 200
    assert httpx.post(f"{base}/v1/completions", json=BODY, timeout=60).status_code == 401
