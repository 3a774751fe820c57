"""Guards the gateway's behaviour when clients leave, the engine fails, or there is too much to do."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2
from tokenizers import Tokenizer

from tests.helpers.fake_engine import MODEL, SERVICE, ExplainedHealth, FakeEngine, Script, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.openai_checks import client_for
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer
from tests.helpers.waiting import wait_until

ENDLESS: dict[str, Any] = {"model": MODEL, "prompt": "The", "max_tokens": 200, "ignore_eos": True}


@dataclass
class Setup:
    """A gateway with room for two requests, and its engine; filled by the fixture."""

    url: str
    address: str
    directory: Path
    tokenizer: Tokenizer
    engine: FakeEngine
    health: ExplainedHealth


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """Shared by this file; keep-alive comments, after which a failure has status 200, come later than any
    answer of a busy machine."""
    directory = tmp_path_factory.mktemp("faults")
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    address = f"unix:{directory}/engine.sock"
    engine = FakeEngine(directory, tokenizer)
    config = gateway_config(address, max_queued_requests=2, sse_keepalive_s=8.0)
    with serving(engine, address) as health_service, running_gateway(config) as url:
        yield Setup(url, address, directory, tokenizer, engine, health_service)


@pytest.fixture
def setup(running: Setup) -> Setup:
    """Returns the shared servers with a fresh script and record."""
    running.engine.reset()
    return running


def sse_payloads(body: str) -> list[str]:
    """Returns the text after `data: ` of each event."""
    return [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]


def wait_idle(url: str) -> None:
    """Waits until every admission place is free again."""
    wait_until(lambda: httpx.get(f"{url}/ready").json()["in_flight"] == 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/generate"])
def test_a_lost_engine_is_a_plain_sentence(setup: Setup, path: str) -> None:
    """The sentence is the same whatever gRPC calls the error, before the answer or in the middle of a stream,
    in the shape of each API, and has no word of streams and sockets.
    """
    body = {**ENDLESS, "messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 50}}
    if path == "/v1/messages":
        del body["prompt"], body["ignore_eos"]
    for fail_after in (0, 5):
        setup.engine.script = Script(
            fail_after=fail_after,
            fail_code=grpc.StatusCode.UNKNOWN,
            fail_details="Stream removed (Socket closed)",
            delay_s=0.01,
        )
        for stream in (False, True):
            answer = httpx.post(f"{setup.url}{path}", json={**body, "stream": stream}, timeout=60)
            assert answer.status_code == (
                200 if stream and fail_after else 529 if "messages" in path else 503
            )
            assert "the engine is not available: it is starting, or was lost" in answer.text
            assert not any(word in answer.text for word in ("Stream", "Socket", "UNKNOWN"))


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels_the_engine_call(setup: Setup, stream: bool) -> None:
    """A client that closes its connection stops the engine's work, streamed or not."""
    setup.engine.script = Script(held=threading.Event())
    with httpx.Client(timeout=httpx.Timeout(60, read=60 if stream else 1.0)) as client:
        if stream:
            body = {**ENDLESS, "stream": True}
            with client.stream("POST", f"{setup.url}/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{setup.url}/v1/completions", json=ENDLESS)
    assert setup.engine.seen.cancelled.wait(60)
    wait_idle(setup.url)


def test_stop_string_ends_the_engine_call(setup: Setup) -> None:
    """A finished output stops costing engine time at once, although the engine could go on."""
    setup.engine.script = Script(text="one two three STOP four five", delay_s=0.02)
    answer = client_for(setup.url).completions.create(
        model=MODEL, prompt="The", max_tokens=200, stop="STOP", extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == "one two three "
    assert setup.engine.seen.cancelled.wait(60)


def test_failure_in_the_middle_of_a_stream_is_an_event(setup: Setup) -> None:
    """Once text was sent a failure comes as an error event followed by [DONE], which openai raises."""
    setup.engine.script = Script(text="one two three four five", fail_after=3)
    body = {**ENDLESS, "stream": True}
    response = httpx.post(f"{setup.url}/v1/completions", json=body)
    assert response.status_code == 200
    *texts, error, done = sse_payloads(response.text)
    assert len(texts) >= 2
    assert json.loads(error)["error"]["code"] == "engine_error"
    assert done == "[DONE]"
    stream = client_for(setup.url).completions.create(model=MODEL, prompt="The", max_tokens=9, stream=True)
    with pytest.raises(openai.APIError, match="scripted failure"):
        list(stream)
    wait_idle(setup.url)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.INTERNAL, 500),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_failure_before_the_first_token_has_its_status(
    setup: Setup, code: grpc.StatusCode, status: int, stream: bool
) -> None:
    """Nothing was sent yet, so the HTTP status tells the failure, with Retry-After where waiting helps."""
    setup.engine.script = Script(fail_after=0, fail_code=code)
    response = httpx.post(f"{setup.url}/v1/completions", json={**ENDLESS, "stream": stream})
    assert response.status_code == status
    assert "scripted failure" in response.json()["error"]["message"]
    assert ("Retry-After" in response.headers) == (status in (429, 503))
    wait_idle(setup.url)


def test_output_that_ends_with_error_is_a_500(setup: Setup) -> None:
    """finish_reason "error" of the contract (a NaN, say) is a failure with the engine's words."""
    setup.engine.script = Script(error_message="not a number in layer 3")
    response = httpx.post(f"{setup.url}/v1/completions", json={"model": MODEL, "prompt": "The"})
    assert response.status_code == 500
    assert "layer 3" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_output_that_leaves_its_constraint_is_the_requests_fault(setup: Setup, stream: bool) -> None:
    """A grammar may become too complex in the course of an output: nothing of the server has failed."""
    setup.engine.script = Script(text="fox", error_message="too many items", constraint_failed=True)
    body = {"model": MODEL, "prompt": "The", "max_tokens": 4, "stream": stream}
    answer = httpx.post(f"{setup.url}/v1/completions", json=body)
    found = sse_payloads(answer.text)[-2] if stream else answer.text
    assert answer.status_code == (200 if stream else 400)
    assert json.loads(found)["error"] == {
        "message": "too many items",
        "type": "invalid_request_error",
        "param": None,
        "code": "constraint_failed",
    }
    wait_idle(setup.url)


def test_full_gateway_answers_429(setup: Setup) -> None:
    """Beyond its bound the gateway refuses at once, says when to return, counts it, and recovers."""
    setup.engine.script = Script(held=threading.Event())
    with httpx.Client() as client:
        open_streams = [
            client.send(
                client.build_request("POST", f"{setup.url}/v1/completions", json={**ENDLESS, "stream": True}),
                stream=True,
            )
            for _ in range(2)
        ]
        with pytest.raises(openai.RateLimitError) as caught:
            client_for(setup.url).completions.create(model=MODEL, prompt="The")
        assert caught.value.response.headers["Retry-After"] == "1"
        assert caught.value.code == "queue_full"
        for response in open_streams:
            response.close()
    wait_idle(setup.url)
    setup.engine.reset()
    assert client_for(setup.url).completions.create(model=MODEL, prompt="The").choices[0].text
    exposition = httpx.get(f"{setup.url}/metrics").text
    assert (
        f'vllm:admission_rejections_total{{model_name="{MODEL}",reason="gateway_queue_full"}} 1.0'
        in exposition
    )


def test_silence_is_filled_with_comments(setup: Setup) -> None:
    """While the engine is silent the stream is open and carries SSE comments; clients see only the text."""
    held = threading.Event()
    setup.engine.script = Script(text="fox", held=held, held_from=1)
    body = {"model": MODEL, "prompt": "The", "stream": True, "max_tokens": 2}
    received = ""
    with httpx.stream("POST", f"{setup.url}/v1/completions", json=body) as response:
        for piece in response.iter_text():
            received += piece
            if ": keep-alive\n\n" in received:
                held.set()
    assert ": keep-alive\n\n" in received
    assert sse_payloads(received)[-1] == "[DONE]"


def test_ready_follows_the_engines_health(setup: Setup) -> None:
    """/ready is 503 while the engine does not serve, with the engine's reason; /health only says that the
    gateway lives."""
    setup.health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    try:
        for reason in (
            "",
            "expert server 1: it was restarted and is refused: checkpoint is b, expected a",
        ):
            setup.health.not_ready = reason
            answer = httpx.get(f"{setup.url}/ready")
            assert answer.status_code == 503
            said = reason or "it is starting, stopping or gone"
            assert answer.json()["error"]["message"] == f"the engine is not serving: {said}"
        assert httpx.get(f"{setup.url}/health").status_code == 200
    finally:
        setup.health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        setup.health.not_ready = ""
    assert httpx.get(f"{setup.url}/ready").status_code == 200


def test_gateway_waits_for_an_engine_that_starts_later(setup: Setup, tmp_path: Path) -> None:
    """Processes start in any order: 503 naming the engine first, service as soon as it is there."""
    address = f"unix:{tmp_path}/late.sock"
    with running_gateway(gateway_config(address), wait=False) as url:
        refused = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "The"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert str(tmp_path) not in refused.text + httpx.get(f"{url}/ready").text
        with serving(FakeEngine(setup.directory, setup.tokenizer), address):
            wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200)


def test_engine_restart_is_survived(setup: Setup, tmp_path: Path) -> None:
    """While the engine is away requests are 503 with Retry-After; a new engine is found without a restart."""
    address = f"unix:{tmp_path}/restarted.sock"
    body = {"model": MODEL, "prompt": "The", "max_tokens": 2}
    with contextlib.ExitStack() as stack:
        with serving(FakeEngine(setup.directory, setup.tokenizer), address):
            url = stack.enter_context(running_gateway(gateway_config(address)))
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        away = httpx.post(f"{url}/v1/completions", json=body)
        assert (away.status_code, away.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "Retry-After" in away.headers
        not_ready = httpx.get(f"{url}/ready")
        assert not_ready.status_code == 503
        for answer in (away, not_ready):  # gRPC's own words name the socket that it could not reach
            assert str(tmp_path) not in answer.text
            assert "unix:" not in answer.text
        with serving(FakeEngine(setup.directory, setup.tokenizer), address):
            wait_until(lambda: httpx.post(f"{url}/v1/completions", json=body).status_code == 200)


def test_api_key_guards_all_but_probes(setup: Setup) -> None:
    """With a key set, requests without it are refused with 401, to unknown paths too; probes are open."""
    with running_gateway(gateway_config(setup.address, api_key="secret")) as url:
        with pytest.raises(openai.AuthenticationError) as caught:
            client_for(url, "wrong").models.list()
        assert caught.value.code == "invalid_api_key"
        assert [card.id for card in client_for(url, "secret").models.list()] == [MODEL]
        for headers in ({"x-api-key": "secret"}, {"x-api-key": "secret", "Authorization": "Bearer wrong"}):
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        assert httpx.get(f"{url}/v1/models", headers={"x-api-key": "wrong"}).status_code == 401
        refusal = httpx.post(f"{url}/v1/messages", json={})
        assert (refusal.status_code, refusal.json()["error"]["type"]) == (401, "authentication_error")
        assert refusal.json()["request_id"] == refusal.headers["request-id"]
        assert httpx.get(f"{url}/nowhere").status_code == 401
        assert httpx.post(f"{url}/tokenize", json={"prompt": "x"}).status_code == 401
        for path in ("/health", "/ping", "/ready", "/metrics", "/version"):
            assert httpx.get(f"{url}{path}").status_code == 200


def test_api_keys_from_a_file(setup: Setup, tmp_path: Path) -> None:
    """Each key of --api-key-file opens the door, without any restart also one that was added later."""
    path = tmp_path / "keys"
    path.write_text("alpha\nbeta\n")
    with running_gateway(gateway_config(setup.address, api_key_file=str(path))) as url:
        for key in ("alpha", "beta"):
            assert [card.id for card in client_for(url, key).models.list()] == [MODEL]
        with pytest.raises(openai.AuthenticationError):
            client_for(url, "gamma").models.list()
        path.write_text("gamma\n")
        assert [card.id for card in client_for(url, "gamma").models.list()] == [MODEL]
        with pytest.raises(openai.AuthenticationError):
            client_for(url, "alpha").models.list()


def test_outputs_of_one_request_do_not_block_each_other(setup: Setup) -> None:
    """Two prompts run at the same time: neither waits for the other's end, which the engine holds back until
    both have begun."""
    held, order = threading.Event(), list[int]()
    setup.engine.script = Script(text="one two three four five", held=held, held_from=2)
    body = {**ENDLESS, "prompt": ["The", "A"], "max_tokens": 5, "stream": True}
    with httpx.stream("POST", f"{setup.url}/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                order.append(json.loads(line.removeprefix("data: "))["choices"][0]["index"])
            if set(order) == {0, 1}:
                held.set()
    assert set(order) == {0, 1}
    assert held.is_set()
