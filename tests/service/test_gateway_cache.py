"""Guards that `/v1/cache` says what each tier of the prefix cache holds, and drops all of it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from moebius.network.api_keys import KeyLimits, add_key
from tests.helpers.engine_process import write_one_layer
from tests.helpers.prefix_server import (
    PROMPT,
    cached_tokens,
    headers,
    prefix_server,
    tiers_of,
    wait_until_kept,
)

pytestmark = pytest.mark.plain_http


def test_the_cache_is_counted_and_dropped(tmp_path: Path) -> None:
    """Tokens, bytes and hits of each tier after a prompt, the same in the live view; nothing after a drop,
    which needs a key, and by which the prompt is computed again."""
    model, key = write_one_layer(tmp_path / "tiny"), add_key(str(tmp_path / "keys"), "alice", KeyLimits())
    tiers = ("--kv-offload-gib", "0.01", "--kv-disk-gib", "0.1", "--kv-disk-dir", str(tmp_path / "kv"))
    with prefix_server(model, tmp_path, *tiers) as url:
        assert list(tiers_of(url, key)) == ["device", "ram", "disk"]
        cached_tokens(url, key)
        hits = cached_tokens(url, key)
        for name in ("ram", "disk"):
            wait_until_kept(url, key, name)
        held = tiers_of(url, key)
        for tier in held.values():
            assert 0 < tier["tokens"] <= len(PROMPT)
            assert 0 < tier["bytes"] <= tier["total_bytes"]
        assert (held["device"]["hit_tokens"], held["ram"]["hit_tokens"]) == (hits, 0)
        live = httpx.get(f"{url}/v1/live", headers=headers(key), timeout=60).json()
        assert live["kv_cache"]["tiers"] == list(held.values())
        other = httpx.get(f"{url}/v1/cache?replica=1", headers=headers(key), timeout=60)
        assert (other.status_code, other.json()["error"]["param"]) == (400, "replica")

        assert httpx.delete(f"{url}/v1/cache", timeout=60).status_code == 401
        dropped = httpx.delete(f"{url}/v1/cache", headers=headers(key), timeout=60).json()
        assert dropped == {"success": True, "freed_tokens": held["device"]["tokens"]}
        assert [tier["tokens"] for tier in tiers_of(url, key).values()] == [0, 0, 0]
        assert cached_tokens(url, key) == 0
