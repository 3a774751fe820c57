"""A gateway with keys in front of a real engine that computes a tiny checkpoint, and what its cache holds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.engine_process import engine_process
from tests.helpers.gateway_server import gateway_config, running_gateway

PROMPT = [3 + number % 60 for number in range(200)]


@contextlib.contextmanager
def prefix_server(model: Path, directory: Path, *options: str, **gateway: Any) -> Iterator[str]:
    """The URL of a gateway whose keys are in `directory`; `options` are the engine's."""
    address, keys = f"unix:{directory}/engine.sock", str(directory / "keys")
    with (
        engine_process(model, address, directory / "log", "--gpu-threads", "1", *options),
        running_gateway(gateway_config(address, api_key_file=keys, **gateway)) as url,
    ):
        yield url


def headers(key: str) -> dict[str, str]:
    """The headers of a request with a key."""
    return {"Authorization": f"Bearer {key}"}


def cached_tokens(url: str, key: str, salt: str | None = None) -> int:
    """Sends `PROMPT`, and returns how many of its tokens were cached."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "ignore_eos": True, "cache_salt": salt}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers(key), timeout=60)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def tiers_of(url: str, key: str) -> dict[str, dict[str, Any]]:
    """What each tier holds, by its name."""
    answer = httpx.get(f"{url}/v1/cache", headers=headers(key), timeout=60)
    assert answer.status_code == 200, answer.text
    return {tier["name"]: tier for tier in answer.json()["tiers"]}


def wait_until_kept(url: str, key: str, tier: str) -> None:
    """Waits until a tier has as many tokens as the device keeps for reuse, which are some."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        tiers = tiers_of(url, key)
        if 0 < tiers["device"]["tokens"] <= tiers[tier]["tokens"]:
            return
        time.sleep(0.1)
    raise AssertionError(f"{tier} did not get what the device has: {tiers}")
