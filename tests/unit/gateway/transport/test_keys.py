"""Guards the limits of API keys: how many requests and tokens, and what a client reads beyond them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from gateway.processes.shared import KeyTable, shared_memory
from gateway.schemas.errors import ApiError
from gateway.telemetry.metrics import GatewayMetrics
from gateway.transport.keys import KeyMiddleware, KeyUse
from moebius.network.api_keys import ApiKeys, KeyLimits, add_key, revoke_key


def refusal(use: KeyUse) -> ApiError:
    """Returns what the next request of the key gets."""
    with pytest.raises(ApiError) as caught, use.request():
        pass
    return caught.value


def allowed(use: KeyUse) -> bool:
    """Whether the key may have another request."""
    try:
        with use.request():
            return True
    except ApiError:
        return False


def test_requests_per_minute_come_back_with_time() -> None:
    """A minute's worth at once, then one more each time that has passed; Retry-After says when."""
    clock = [0.0]
    use = KeyUse("a", KeyLimits(requests_per_minute=3), lambda: clock[0])
    assert [allowed(use) for _ in range(4)] == [True, True, True, False]
    error = refusal(use)
    assert (error.status, error.code, error.retry_after_s) == (429, "rate_limit_exceeded", 20)
    assert "3 requests per minute" in error.message
    clock[0] = 19.0
    assert not allowed(use)
    clock[0] = 20.0
    assert allowed(use)
    assert not allowed(use)
    clock[0] = 1000.0
    assert [allowed(use) for _ in range(4)] == [True, True, True, False]


def test_tokens_are_paid_back() -> None:
    """What a request takes is known at its end: a large one is waited for by those that follow."""
    clock = [0.0]
    use = KeyUse("a", KeyLimits(tokens_per_minute=60), lambda: clock[0])
    with use.request():
        use.took(100)
    error = refusal(use)
    assert error.retry_after_s == 41  # 40 tokens too many, and one to go on with
    clock[0] = 40.5
    assert not allowed(use)
    clock[0] = 41.5
    assert allowed(use)


def test_limits_hold_over_processes() -> None:
    """Two processes of one port: what a key has had from one is missing with the other, whatever either of
    them counted before; other keys have their own; requests of a process that died are given back."""
    clock = [0.0]
    memory = shared_memory(2)
    tables = [KeyTable(2, index, memory) for index in range(2)]
    limits = KeyLimits(requests_per_minute=4, tokens_per_minute=60, requests_in_flight=2)
    one, two = (KeyUse("a", limits, lambda: clock[0], table) for table in tables)
    other = KeyUse("b", limits, lambda: clock[0], tables[0])
    with one.request(), two.request():
        assert "2 requests in flight" in refusal(one).message
        assert "2 requests in flight" in refusal(two).message
        assert allowed(other)
    assert [allowed(two), allowed(one), allowed(two), allowed(one)] == [True, True, False, False]
    clock[0] = 60.0
    one.took(100)
    assert refusal(two).retry_after_s == 41
    clock[0] = 3600.0
    running = [one.request(), two.request()]
    for request in running:
        request.__enter__()
    assert not allowed(two)
    tables[1].clear(0)
    assert allowed(two)
    os.close(memory)


def test_a_full_table_counts_in_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """More keys than there are slots: each still has its limits."""
    monkeypatch.setattr("gateway.processes.shared._SLOTS", 2)
    table = KeyTable()
    uses = [KeyUse(name, KeyLimits(requests_per_minute=1), table=table) for name in "abc"]
    assert all(allowed(use) for use in uses)
    assert not any(allowed(use) for use in uses)


def test_requests_in_flight_are_given_back() -> None:
    """A request gives its place back, also one that fails."""
    use = KeyUse("a", KeyLimits(requests_in_flight=1))
    with use.request():
        assert "1 requests in flight" in refusal(use).message
    with pytest.raises(RuntimeError), use.request():
        raise RuntimeError
    assert allowed(use)


def test_no_limits_are_no_limits() -> None:
    """A key without limits may have anything."""
    use = KeyUse("a", KeyLimits())
    use.took(10**9)
    assert all(allowed(use) for _ in range(1000))


def test_own_limits_come_before_those_of_all() -> None:
    """A key's own number counts; where it has none, the gateway's."""
    limits = KeyLimits(requests_per_minute=5).or_else(KeyLimits(1, 2, 3))
    assert limits == KeyLimits(1, 5, 3)


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({"key": scope["state"]["key_use"].name})(scope, receive, send)


async def test_keys_are_distinguished(tmp_path: Path) -> None:
    """Each key has its own count, by name; a 429 is in OpenAI's shape, with Retry-After, and in Anthropic's
    for its paths; a revoked key is a stranger. Reading is not counted."""
    path = str(tmp_path / "keys")
    alice = add_key(path, "alice", KeyLimits(requests_per_minute=1))
    bob = add_key(path, "bob", KeyLimits())
    metrics = GatewayMetrics()
    app = KeyMiddleware(_answer, ApiKeys("", path), {"/health"}.__contains__, KeyLimits(), metrics)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

        async def post(key: str, url: str = "/v1/chat/completions") -> httpx.Response:
            return await client.post(url, headers={"Authorization": f"Bearer {key}"})

        assert (await post(alice)).json() == {"key": "alice"}
        refused = await post(alice)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        error: dict[str, Any] = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert (await post(alice, "/v1/messages")).json()["type"] == "error"
        assert [(await post(bob)).status_code for _ in range(5)] == [200] * 5
        assert (await post("nobody")).status_code == 401
        revoke_key(path, "bob")
        assert (await post(bob)).status_code == 401
    assert b'vllm:admission_rejections_total{model_name="",reason="key_limit"} 2.0' in metrics.render()
