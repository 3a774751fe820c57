"""Guards that no single request can stall or end the gateway: each is answered with a 4xx that says why."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gateway.prompts.worker import COMMAND
from tests.helpers.fake_engine import CONTEXT, MODEL, WAITING, FakeEngine, Script, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.tiny_tokenizer import CHAT_TEMPLATE, byte_level_tokenizer, write_tokenizer

pytestmark = pytest.mark.plain_http

MIB = 2**20
# What a user's first word makes this template do.
TEMPLATE = (
    "{% set word = messages[0].content %}"
    "{% if word == 'large' %}{{ 'a' * 10**9 }}{% endif %}"
    "{% if word == 'larger' %}{{ 'a' * 10**11 }}{% endif %}"
    "{% if word == 'number' %}{{ 10**(10**10) }}{% endif %}"
    "{% if word == 'loops' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}" + CHAT_TEMPLATE
)


class Setup:
    """Gateway and engine; made by the fixture."""

    def __init__(self, url: str, engine: FakeEngine) -> None:
        self.url = url
        self.engine = engine

    def post(self, path: str, content: Any, **headers: str) -> httpx.Response:
        """Sends a POST of bytes, or of pieces without a length."""
        return httpx.post(f"{self.url}{path}", content=content, headers=headers, timeout=120)

    def refusal(self, path: str, body: dict[str, Any]) -> tuple[int, str | None, str, str]:
        """Status, param, code and message."""
        response = self.post(path, json.dumps(body).encode())
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error", error
        return response.status_code, error["param"], error["code"], error["message"]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """Small bounds, so that reaching them is quick; two processes, one of them for small requests."""
    directory: Path = tmp_path_factory.mktemp("limits")
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer, TEMPLATE)
    address = f"unix:{directory}/engine.sock"
    engine = FakeEngine(directory, tokenizer)
    config = gateway_config(
        address, max_body_mib=2, prompt_workers=2, prompt_timeout_s=0.5, prompt_memory_gib=0.5
    )
    with pytest.MonkeyPatch.context() as patch, serving(engine, address), running_gateway(config) as url:
        patch.setattr("gateway.prompts.pool._WALL_FACTOR", 200)  # bounds are of processor time, however busy
        yield Setup(url, engine)


def chat(content: Any = "hello", **fields: Any) -> dict[str, Any]:
    """Returns a chat request with one message of a user."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def test_bodies_are_bounded_as_they_arrive(setup: Setup) -> None:
    """With a length before a byte is read, without one as soon as there are too many: 413 either way."""
    port = int(setup.url.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(10**12))
    connection.endheaders()
    response = connection.getresponse()
    declared = json.loads(response.read())["error"]
    assert (response.status, declared["code"]) == (413, "request_too_large")
    assert "2 MiB (max_body_mib)" in declared["message"]

    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 2**30:
            sent += 2**16
            yield b" " * 2**16

    try:
        answer = setup.post("/v1/chat/completions", endless())
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    except (httpx.WriteError, httpx.ReadError):
        pass  # the gateway closed the connection while this client still wrote, and was not reading
    # It reads and drops 64 MiB for the sake of clients that read only then.
    assert sent < 192 * MIB


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize"])
def test_compressed_bodies_are_refused_by_that_name(setup: Setup, path: str) -> None:
    """A few kilobytes could become gigabytes. Headers that name none are ignored."""
    content = gzip.compress(json.dumps(chat()).encode())
    for encoding in ("gzip", "identity, GZIP", "br", "zstd", "deflate"):
        answer = setup.post(path, content, **{"Content-Encoding": encoding})
        assert answer.status_code == 415, answer.text
        assert f"Content-Encoding '{encoding}'" in answer.text
        assert answer.headers["Connection"] == "close"
    content = json.dumps(chat(stream=False)).encode()
    for encoding in ("identity", "utf-8", ""):
        answer = setup.post(path, content, **{"Content-Encoding": encoding})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat("x" * MIB), "messages"),
        ({"model": MODEL, "prompt": "x " * (MIB // 2)}, "prompt"),
        ({"model": MODEL, "prompt": [1] * (CONTEXT + 1)}, "prompt"),
    ],
)
def test_what_can_not_fit_is_refused_by_its_size(setup: Setup, body: dict[str, Any], param: str) -> None:
    """A text longer than the context's tokens is refused as such."""
    status, found, code, message = setup.refusal(
        "/v1/chat/completions" if param == "messages" else "/v1/completions", body
    )
    assert (status, found, code) == (400, param, "context_length_exceeded"), message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", chat("half \ud800 pair"), "messages[0].content"),
        ("chat/completions", chat(cache_salt="\udfff"), "cache_salt"),
        ("completions", {"model": MODEL, "prompt": ["a", "\ud83d"]}, "prompt[1]"),
        ("chat/completions", chat(logit_bias={"1" * 5000: 1}), "logit_bias"),
        ("completions", {"model": MODEL, "prompt": "x", "logit_bias": {"9" * 12: 1}}, "logit_bias"),
        ("chat/completions", chat(logit_bias={str(i): 1 for i in range(4097)}), "logit_bias"),
        ("chat/completions", chat(stop_token_ids=[1] * 1025), "stop_token_ids"),
        ("chat/completions", chat(stop=["a" * 1025]), "stop"),
        ("chat/completions", chat(n=WAITING + 1), "n"),
        ("completions", {"model": MODEL, "prompt": ["a"] * 9, "n": WAITING // 8}, "n"),
        ("chat/completions", chat(chat_template_kwargs={"a": json.loads("[" * 70 + "]" * 70)}), None),
        ("chat/completions", chat(repetition_penalty=1e300), "repetition_penalty"),
        ("detokenize", {"tokens": [2**40]}, "tokens[0]"),
    ],
)
def test_input_that_was_a_500_is_a_400_that_names_it(
    setup: Setup, path: str, body: dict[str, Any], param: str | None
) -> None:
    """Text that is no text, numbers that are none, more entries than are allowed."""
    status, found, _, message = setup.refusal(f"/v1/{path}", body)
    assert status == 400, message
    assert param is None or found == param, message


@pytest.mark.parametrize(
    "arguments", ["[" * 100_000, "[1]", '{"a": "\\ud800"}', '{"a": ' * 80 + "1" + "}" * 80]
)
def test_arguments_of_former_calls_that_are_no_objects_stay_text(setup: Setup, arguments: str) -> None:
    """`arguments` is JSON within JSON, and a model may have written anything: clients send it back as it is,
    and a conversation goes on.
    """
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = {"role": "assistant", "tool_calls": [call]}
    body = chat() | {"messages": [{"role": "user", "content": "x"}, history]}
    response = setup.post("/v1/chat/completions", json.dumps(body).encode())
    assert response.status_code == 200, response.text


def test_the_content_type_does_not_matter(setup: Setup) -> None:
    """`curl -d` sends a form's content type, others none."""
    for headers in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):
        response = setup.post("/v1/chat/completions", json.dumps(chat()).encode(), **headers)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("word", ["large", "larger", "number", "loops"])
def test_templates_are_bounded_in_time_and_memory(setup: Setup, word: str) -> None:
    """A template that computes or writes without end costs its request, and the next one is served."""
    status, _, code, message = setup.refusal("/v1/chat/completions", chat(word))
    assert status == 400, message
    assert code == "request_too_expensive", message
    assert ("prompt_memory_gib" if word.startswith("large") else "prompt_timeout_s") in message
    assert setup.post("/v1/chat/completions", json.dumps(chat()).encode()).status_code == 200


def prompt_processes() -> list[psutil.Process]:
    """Returns the processes that this one's gateway reads requests in, and the one that they are forks of."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            found += [child] if child.name() == COMMAND else []
    return found


def test_a_prompt_process_that_is_killed_costs_no_request(setup: Setup) -> None:
    """Any process may end, waiting or working: the request goes to the next one."""
    large = json.dumps({**chat(), "user": "x" * 1000, "messages": chat()["messages"] * 4000}).encode()
    for body, status in ((json.dumps(chat()).encode(), 200), (large, 400)):
        for process in prompt_processes():
            process.kill()
        answer = setup.post("/v1/chat/completions", body)
        assert answer.status_code == status, answer.text


def hostile() -> dict[str, Callable[[], bytes]]:
    """Returns the bodies that cost most: to parse, to validate, to tokenise, to render."""
    size = 2 * MIB - 200
    return {
        "lists": lambda: b'{"model":"m","prompt":[' + b"[]," * (size // 3) + b"[]]}",
        "messages": lambda: json.dumps(chat() | {"messages": [{"a": 1}] * (size // 12)}).encode(),
        "text": lambda: json.dumps({"model": MODEL, "prompt": "x" * size}).encode(),
        "loops": lambda: json.dumps(chat("loops", user=" " * 1000)).encode(),
    }


def test_streams_go_on_while_hostile_requests_run(setup: Setup) -> None:
    """The event loop never waits for what a request costs: a stream ends and others are answered meanwhile.

    One of the hostile requests, computed on the loop, would not end. How long the loop computes at once is
    measured in test_gateway_stalls.py.
    """
    setup.engine.script = Script(delay_s=0.02)
    lines: list[str] = []
    done = threading.Event()

    async def stream(client: httpx.AsyncClient) -> None:
        body = {"model": MODEL, "prompt": "go", "stream": True, "max_tokens": 60, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines.extend([line async for line in response.aiter_lines()])

    async def attack(client: httpx.AsyncClient, content: bytes) -> None:
        while not done.is_set():
            path = "/v1/chat/completions" if b"messages" in content[:100] else "/v1/completions"
            response = await client.post(path, content=content)
            assert response.status_code in (400, 404, 429, 503), response.text

    async def everything() -> int:
        async with httpx.AsyncClient(base_url=setup.url, timeout=120) as client:
            attacks = [asyncio.create_task(attack(client, make())) for make in hostile().values()]
            streaming = asyncio.create_task(stream(client))
            answered = 0
            while not streaming.done():
                assert (await client.get("/health")).status_code == 200
                answered += 1
                await asyncio.sleep(0.02)
            await streaming
            done.set()
            await asyncio.gather(*attacks)
            return answered

    assert asyncio.run(everything()) > 0
    assert len(lines) >= 60


def test_the_document_tells_which_answers_there_are(setup: Setup) -> None:
    """OpenAPI promises 400 in the error's shape, not 422, and says what bodies look like."""
    document = httpx.get(f"{setup.url}/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        operation = document["paths"][path]["post"]
        assert "422" not in operation["responses"]
        for status in ("400", "413", "429", "503"):
            shape = operation["responses"][status]["content"]["application/json"]["schema"]["$ref"]
            assert shape == "#/components/schemas/ErrorResponse"
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.rpartition("/")[2] in document["components"]["schemas"]
    text = json.dumps(document)
    assert "404" in document["paths"]["/v1/models/{model_id}"]["get"]["responses"]
    missing = {
        part.split('"')[0]
        for part in text.split("#/components/schemas/")[1:]
        if part.split('"')[0] not in document["components"]["schemas"]
    }
    assert not missing
