"""Guards that what one API key has sent makes no answer to another key faster, on the device and below it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from moebius.network.api_keys import KeyLimits, add_key, revoke_key
from tests.helpers.engine_process import write_one_layer
from tests.helpers.fake_engine import MODEL, FakeEngine, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.prefix_server import cached_tokens, prefix_server, wait_until_kept
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

pytestmark = pytest.mark.plain_http


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    return write_one_layer(tmp_path_factory.mktemp("model") / "tiny")


def test_keys_share_no_prefix_unless_they_are_to(model: Path, tmp_path: Path) -> None:
    """The prompt of one key is computed again for another, and for another salt of the same key; with
    `cache_isolation: none` only the salt counts."""
    keys = str(tmp_path / "keys")
    alice, bob = (add_key(keys, name, KeyLimits()) for name in ("alice", "bob"))
    with prefix_server(model, tmp_path) as url:
        assert cached_tokens(url, alice) == 0
        assert cached_tokens(url, alice) > 0
        assert cached_tokens(url, bob) == 0
        assert cached_tokens(url, alice, "salt") == 0
        assert cached_tokens(url, alice, "salt") > 0
        assert cached_tokens(url, bob, "salt") == 0
        shared = gateway_config(f"unix:{tmp_path}/engine.sock", api_key_file=keys, cache_isolation="none")
        with running_gateway(shared) as other:
            assert cached_tokens(other, alice) == 0
            assert cached_tokens(other, bob) > 0
            assert cached_tokens(other, bob, "salt") == 0


def test_keys_share_no_prefix_on_disk(model: Path, tmp_path: Path) -> None:
    """After a restart of the engine only the key that sent a prompt finds it again."""
    keys = str(tmp_path / "keys")
    alice, bob = (add_key(keys, name, KeyLimits()) for name in ("alice", "bob"))
    options = ("--kv-disk-gib", "0.1", "--kv-disk-dir", str(tmp_path / "kv"))
    with prefix_server(model, tmp_path, *options) as url:
        assert cached_tokens(url, alice) == 0
        wait_until_kept(url, alice, "disk")
    with prefix_server(model, tmp_path, *options) as url:
        assert cached_tokens(url, bob) == 0
        assert cached_tokens(url, alice) > 0


def test_the_engine_gets_hashes_of_keys(tmp_path: Path) -> None:
    """A salt has neither the key nor its name nor the client's own salt in it; the next key of the same name
    has another."""
    tokenizer, keys = byte_level_tokenizer(), str(tmp_path / "keys")
    write_tokenizer(tmp_path, tokenizer)
    engine, address = FakeEngine(tmp_path, tokenizer), f"unix:{tmp_path}/engine.sock"
    other, first = (add_key(keys, name, KeyLimits()) for name in ("other", "alice"))
    config = gateway_config(address, api_key_file=keys)
    body = {"model": MODEL, "prompt": "The", "max_tokens": 1, "cache_salt": "tenant"}
    with serving(engine, address), running_gateway(config) as url:

        def post(key: str) -> None:
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text

        for key in (first, first, other):
            post(key)
        revoke_key(keys, "alice")
        post(add_key(keys, "alice", KeyLimits()))
    salts = [request.cache_salt for request in engine.seen.requests]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3
    assert not any(word in salt for salt in salts for word in (first, other, "alice", "other", "tenant"))
