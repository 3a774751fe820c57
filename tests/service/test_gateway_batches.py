"""Guards files and batches as the openai and anthropic clients use them, in front of a scripted engine."""

from __future__ import annotations

import errno
import io
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from gateway.batches.files import Upload
from gateway.batches.outcomes import usage_of
from gateway.transport.internal import TokenUsage
from moebius.config import GatewayConfig
from moebius.network.api_keys import KeyLimits, add_key
from tests.helpers.agent_gateway import GREEDY, AgentGateway, agent_gateway
from tests.helpers.fake_engine import MODEL, FakeEngine, Script
from tests.helpers.lazy import lazy
from tests.helpers.waiting import wait_until

if TYPE_CHECKING:
    import anthropic
else:
    anthropic = lazy("anthropic")

CHAT = "/v1/chat/completions"
LAST = 2**31 - 1
MESSAGE = {"role": "user", "content": "Hi"}


def line(number: int | str, body: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A line of an input file."""
    chat = {"model": MODEL, "messages": [MESSAGE], "temperature": 0}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body or chat, **fields}


def jsonl(lines: list[Any]) -> bytes:
    """The lines as a file."""
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


@pytest.fixture(scope="module")
def gateway_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns where batches are kept, and a size that files of tests exceed."""
    return {"batch_dir": str(tmp_path_factory.mktemp("batches")), "batch_file_mib": 4}


def uploaded(client: openai.OpenAI, data: bytes) -> str:
    """The id of a new file."""
    return client.files.create(file=("input.jsonl", data), purpose="batch").id


def finished(client: openai.OpenAI, batch_id: str) -> Any:
    """A batch once nothing about it changes any more."""
    end = time.monotonic() + 120
    while (batch := client.batches.retrieve(batch_id)).status in (
        "validating",
        "in_progress",
        "finalizing",
        "cancelling",
    ):
        assert time.monotonic() < end, batch
        time.sleep(0.05)
    return batch


def created(client: openai.OpenAI, data: bytes, endpoint: Any = CHAT, **fields: Any) -> Any:
    """A new batch of these lines."""
    return client.batches.create(
        input_file_id=uploaded(client, data), endpoint=endpoint, completion_window="24h", **fields
    )


def contents(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    """The lines of a file."""
    assert file_id is not None
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


def test_files(client: openai.OpenAI) -> None:
    """A file is listed in pages, described, read and deleted as OpenAI's client expects."""
    before = time.time()
    first = client.files.create(
        file=io.BytesIO(b"one\r\n--two\n"),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    second = client.files.create(file=("ü.jsonl", b""), purpose="batch")
    assert (first.bytes, first.purpose, second.filename, second.bytes) == (11, "batch", "ü.jsonl", 0)
    assert first.expires_at is not None
    assert first.expires_at - before == pytest.approx(3600, abs=60)
    assert client.files.content(first.id).read() == b"one\r\n--two\n"
    assert client.files.retrieve(first.id) == first
    page = client.files.list(limit=1)
    assert [one.id for one in page.data] == [second.id]
    assert [one.id for one in page.get_next_page().data] == [first.id]
    assert [one.id for one in client.files.list(order="asc")][:2] == [first.id, second.id]
    assert client.files.delete(first.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(first.id)
    assert client.files.list(purpose="batch_output").data == []


def test_a_batch(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """Answers are in the output file, refusals in the error file, each under its id; at low priority."""
    gateway.says(GREEDY)
    wrong = line("wrong", {"model": MODEL, "messages": [MESSAGE], "temperature": 99})
    lines = [line(number) for number in range(5)]
    batch = created(client, jsonl([*lines, wrong]), metadata={"for": "test"})
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"for": "test"})
    batch = finished(client, batch.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
    answers = contents(client, batch.output_file_id)
    assert sorted(one["custom_id"] for one in answers) == [f"line-{number}" for number in range(5)]
    response = answers[0]["response"]
    assert (response["status_code"], answers[0]["error"]) == (200, None)
    assert response["body"]["choices"][0]["message"]["content"] == GREEDY
    (refused,) = contents(client, batch.error_file_id)
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("line-wrong", 400)
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert {one.priority for one in gateway.engine.seen.requests} == {LAST}
    assert client.batches.list(limit=1).data[0].id == batch.id


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        ("/v1/completions", {"prompt": "The"}, "choices"),
        ("/v1/embeddings", {"input": "The"}, "data"),
        ("/v1/responses", {"input": "The"}, "output"),
    ],
)
def test_endpoints(client: openai.OpenAI, endpoint: str, body: dict[str, Any], field: str) -> None:
    """Every endpoint that a batch may have answers as it does without one; the batch counts its tokens,
    and finds the same in its file."""
    data = jsonl([line(1, {"model": MODEL, **body}, url=endpoint)])
    batch = finished(client, created(client, data, endpoint).id)
    (answer,) = contents(client, batch.output_file_id)
    assert answer["response"]["body"][field]
    usage = answer["response"]["body"]["usage"]
    output = usage.get("output_tokens", usage.get("completion_tokens", 0))
    assert batch.usage.output_tokens == output
    assert batch.usage.total_tokens == usage["total_tokens"] > output
    assert usage_of(answer) == TokenUsage(batch.usage.input_tokens, 0, output, 0)


WRONG: dict[str, tuple[bytes, str, int | None]] = {
    "empty": (b"\n\n", "empty_file", None),
    "binary": (bytes(range(128, 256)) * 9, "invalid_json_line", 1),
    "broken": (jsonl([line(1)]) + b'\n{"custom_id": "x"\n', "invalid_json_line", 3),
    "list": (b"[1]\n", "invalid_json_line", 1),
    "doubled": (jsonl([line(1), line(2), line(1)]), "duplicate_custom_id", 3),
    "no id": (jsonl([{**line(1), "custom_id": None}]), "missing_required_parameter", 1),
    "method": (jsonl([line(1, method="GET")]), "invalid_method", 1),
    "url": (jsonl([line(1, url="/v1/embeddings")]), "invalid_url", 1),
    "model": (jsonl([line(1, {"model": "gpt-9", "messages": []})]), "model_not_found", 1),
    "stream": (jsonl([line(1, {"messages": [], "stream": True})]), "invalid_value", 1),
    "long": (b"x" * 2**20 * 2, "request_too_large", 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_lines_fail_the_batch(gateway: AgentGateway, name: str, tmp_path: Path) -> None:
    """A batch with a wrong line fails before a request runs, and says which line and why."""
    data, code, number = WRONG[name]
    if name == "long":
        with agent_gateway(tmp_path, batch_dir=str(tmp_path / "b"), max_body_mib=1) as small:
            batch = finished(small.client(), created(small.client(), data).id)
    else:
        batch = finished(gateway.client(), created(gateway.client(), data).id)
    assert batch.status == "failed"
    assert [(one.code, one.line) for one in batch.errors.data] == [(code, number)]
    assert not gateway.engine.seen.requests


def test_refused_requests(client: openai.OpenAI) -> None:
    """Wrong requests for batches and files name their parameter."""
    file_id = uploaded(client, jsonl([line(1)]))
    for fields, param in (
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "b" * 600}}, "metadata.a"),
    ):
        asked: Any = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **fields}
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(**asked)
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError) as missing:
        client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    assert missing.value.param == "input_file_id"
    for call in (client.batches.retrieve, client.batches.cancel, client.files.retrieve, client.files.content):
        for name in ("x", "../../x", "batch_" + "0" * 40, "file-" + "0" * 40):
            with pytest.raises(openai.NotFoundError):
                call(name)
    wrong: Any = "vision"
    with pytest.raises(openai.BadRequestError, match="allowed: 'batch'"):
        client.files.create(file=b"x", purpose=wrong)


def test_cancel(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """A cancelled batch keeps what was answered, finishes what runs, and says of the rest that it did not."""
    held = threading.Event()
    batch = created(client, jsonl([line(number) for number in range(300)]))
    while len(gateway.engine.seen.requests) <= GatewayConfig().batch_requests:  # one more: some are answered
        time.sleep(0.001)
    gateway.engine.script = Script(held=held)  # what comes now runs when the batch is cancelled
    assert client.batches.cancel(batch.id).status == "cancelling"
    held.set()
    batch = finished(client, batch.id)
    assert (batch.status, batch.request_counts.total) == ("cancelled", 300)
    done, rest = contents(client, batch.output_file_id), contents(client, batch.error_file_id)
    assert len({one["custom_id"] for one in done + rest}) == 300 == len(done + rest)
    assert done
    assert {one["error"]["code"] for one in rest} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(batch.id)


def test_an_engine_that_is_away_is_waited_for(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """Passing failures of the engine are no results: the requests are sent again."""
    import grpc

    gateway.engine.script = Script(fail_after=0, fail_code=grpc.StatusCode.RESOURCE_EXHAUSTED)
    batch = created(client, jsonl([line(number) for number in range(3)]))
    wait_until(lambda: len(gateway.engine.seen.requests) >= 6)
    gateway.engine.script = Script()
    batch = finished(client, batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 3)


def test_uploads_are_bounded(gateway: AgentGateway, client: openai.OpenAI) -> None:
    """A file above the bound is refused before it is sent where its size is declared, else while it is."""
    with pytest.raises(openai.APIStatusError) as caught:
        uploaded(client, b"x" * 6 * 2**20)
    assert caught.value.status_code == 413
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        yield head
        while sent < 2**30:
            sent += 2**16
            yield b"x" * 2**16

    headers = {"content-type": "multipart/form-data; boundary=b"}
    try:
        answer = httpx.post(f"{gateway.url}/v1/files", content=endless(), headers=headers, timeout=60)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "file_too_large"
    except httpx.WriteError:
        pass  # the server has closed the connection
    assert sent < 2**28
    for body in (b"", b"--b", b"--b\r\n\r\n\r\n--b--", head + b"x", b"--b--"):
        answer = httpx.post(f"{gateway.url}/v1/files", content=body, headers=headers, timeout=60)
        assert answer.status_code == 400, body
    answer = httpx.post(f"{gateway.url}/v1/files", json={"purpose": "batch"}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_content_type")


def test_without_a_directory(tmp_path: Path) -> None:
    """A server without a directory says so."""
    with agent_gateway(tmp_path) as gateway, pytest.raises(openai.NotFoundError, match="batch_dir"):
        uploaded(gateway.client(), b"")


def test_what_is_deleted_frees_the_disk(tmp_path: Path) -> None:
    """A finished batch keeps neither its input nor its results: deleting the files frees all."""
    with agent_gateway(tmp_path, batch_dir=str(tmp_path / "b")) as gateway:
        client = gateway.client()
        batch = finished(client, created(client, jsonl([line(1), line(2, {"messages": []})])).id)
        # It is closed just after its status.
        wait_until(lambda: not any((tmp_path / "b" / "unfinished").iterdir()))
        for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            client.files.delete(file_id)
        left = [path for path in (tmp_path / "b").rglob("*") if path.is_file()]
        assert [path.name for path in left] == ["facts.json"]


def test_a_full_store_refuses_uploads(tmp_path: Path) -> None:
    """The bound of all files holds; deleting makes room."""
    with agent_gateway(tmp_path, batch_dir=str(tmp_path / "b"), batch_dir_gib=2**-10) as gateway:
        client = gateway.client()
        first = uploaded(client, b"x" * 900_000)
        with pytest.raises(openai.BadRequestError, match="batch_dir_gib"):
            uploaded(client, b"x" * 900_000)
        client.files.delete(first)
        uploaded(client, b"x" * 900_000)


def test_a_full_disk(gateway: AgentGateway, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that does not fit on the disk is one clear line; nothing is left of it, and others go on."""

    def full(_upload: Upload, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = client.files.list().data
    with monkeypatch.context() as patched:
        patched.setattr(Upload, "write", full)
        with pytest.raises(openai.InternalServerError, match="disk for files and batches is full") as caught:
            uploaded(client, b"x")
        assert caught.value.status_code == 507
        assert client.completions.create(model=MODEL, prompt="The").choices
    assert client.files.list().data == before


def test_keys_have_their_own_files(tmp_path: Path) -> None:
    """A key sees neither files nor batches of another; its batch runs under its limits and its name."""
    keys = tmp_path / "keys"
    one, two = (add_key(str(keys), name, KeyLimits()) for name in ("one", "two"))
    with agent_gateway(tmp_path, batch_dir=str(tmp_path / "b"), api_key_file=str(keys)) as gateway:
        mine, other = gateway.client(one), gateway.client(two)
        batch = finished(mine, created(mine, jsonl([line(1)])).id)
        assert batch.request_counts.completed == 1
        mine.chat.completions.create(model=MODEL, messages=[MESSAGE])  # type: ignore[list-item]
        ids = {request.fairness_id for request in gateway.engine.seen.requests}
        assert len(ids) == 1
        assert [len(found.data) for found in (other.files.list(), other.batches.list())] == [0, 0]
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(batch.output_file_id)
        with pytest.raises(openai.NotFoundError):
            other.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")


def sample(gateway: AgentGateway, name: str) -> float:
    """The value of one of the gateway's metrics."""
    lines = httpx.get(f"{gateway.url}/metrics", timeout=60).text.splitlines()
    return float(next(one.rpartition(" ")[2] for one in lines if one.rpartition(" ")[0] == name))


def test_metrics(tmp_path: Path) -> None:
    """They show batches and requests that run and wait, then how each ended, and nothing is left running."""
    running, waiting = (f"moebius:gateway_batch_requests_{state}" for state in ("running", "waiting"))
    in_progress = 'moebius:gateway_batches{status="in_progress"}'
    with agent_gateway(tmp_path, batch_dir=str(tmp_path / "b"), batch_requests=2) as gateway:
        client = gateway.client()
        assert sample(gateway, in_progress) == sample(gateway, waiting) == 0
        held = threading.Event()
        gateway.says(GREEDY, held=held)
        wrong = line("wrong", {"model": MODEL, "messages": [MESSAGE], "temperature": 99})
        batch = created(client, jsonl([line(1), line(2), line(3), line(4), wrong]))
        wait_until(lambda: sample(gateway, running) == 2)
        assert (sample(gateway, in_progress), sample(gateway, waiting)) == (1, 3)
        held.set()
        finished(client, batch.id)
        ended = 'moebius:gateway_batch_requests_total{result="%s"}'
        counts = [sample(gateway, ended % name) for name in ("succeeded", "errored", "canceled", "expired")]
        assert counts == [4, 1, 0, 0]
        wait_until(lambda: not any(sample(gateway, one) for one in (in_progress, running, waiting)))


class Counted:
    """How many requests of batches are at the engine at once."""

    def __init__(self, engine: FakeEngine) -> None:
        self._generate = engine.Generate
        self._lock = threading.Lock()
        self.now = self.most = 0
        engine.Generate = self.generate  # type: ignore[method-assign]

    def generate(self, request: Any, context: Any) -> Iterator[Any]:
        """Answers as the engine does, and counts."""
        is_line = request.priority == LAST
        with self._lock:
            self.now += is_line
            self.most = max(self.most, self.now)
        yield from self._generate(request, context)
        with self._lock:
            self.now -= is_line


def test_clients_come_first(tmp_path: Path) -> None:
    """While clients have requests, as many fewer of a batch run, and at least one; then as many as may."""
    with agent_gateway(tmp_path, batch_dir=str(tmp_path / "b"), batch_requests=6) as gateway:
        client, counted = gateway.client(), Counted(gateway.engine)
        for live, most in ((4, 2), (8, 1), (0, 6)):
            gateway.says(GREEDY, delay_s=0.3)
            streams = [
                client.completions.create(
                    model=MODEL, prompt="x", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
                )
                for _ in range(live)
            ]
            gateway.engine.script = Script(delay_s=0.002)
            counted.most = 0
            assert finished(client, created(client, jsonl([line(one) for one in range(24)])).id).status
            assert counted.most == most
            for stream in streams:
                stream.close()


def test_counts_go_on_while_no_request_may_start(tmp_path: Path) -> None:
    """What was answered is counted although the next request waits for a client's to leave room."""
    first, rest = threading.Event(), threading.Event()
    with agent_gateway(tmp_path, batch_dir=str(tmp_path / "b"), batch_requests=2) as gateway:
        client, seen = gateway.client(), gateway.engine.seen
        gateway.engine.script = Script(held=first, held_from=0)
        batch = created(client, jsonl([line(number) for number in range(4)]))
        wait_until(lambda: len(seen.requests) == 2)
        gateway.engine.script = Script(held=rest, held_from=0)
        asked = {"model": MODEL, "messages": [MESSAGE]}
        live = threading.Thread(target=lambda: httpx.post(f"{gateway.url}{CHAT}", json=asked, timeout=120))
        live.start()
        wait_until(lambda: len(seen.requests) == 3)
        first.set()  # the third line takes the one place that is left, and the fourth waits
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 2)
        assert len(seen.requests) == 4
        rest.set()
        live.join()
        assert finished(client, batch.id).request_counts.completed == 4


def test_message_batches(gateway: AgentGateway) -> None:
    """Anthropic's client makes, lists, awaits, reads, cancels and deletes batches of messages."""
    client = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60)
    gateway.says(GREEDY)
    batches = client.messages.batches

    def asked(number: int, **fields: Any) -> Any:
        messages = [{"role": "user", "content": "Hi"}]
        params = {"model": MODEL, "max_tokens": 100, "messages": messages, **fields}
        return {"custom_id": f"m{number}", "params": params}

    wrong = [asked(3, max_tokens=-1), asked(4, model="gpt-9")]
    batch = batches.create(requests=[asked(1), asked(2), *wrong])
    assert (batch.processing_status, batch.request_counts.processing) == ("in_progress", 4)
    wait_until(lambda: batches.retrieve(batch.id).processing_status == "ended")
    batch = batches.retrieve(batch.id)
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (2, 2, 0)
    results = {one.custom_id: one.result for one in batches.results(batch.id)}
    good, bad = results["m1"], results["m3"]
    assert good.type == "succeeded"
    assert good.message.content[0].text == GREEDY  # type: ignore[union-attr]
    assert bad.type == "errored"
    assert bad.error.error.type == "invalid_request_error"
    missing = results["m4"]
    assert missing.type == "errored"
    assert missing.error.error.type == "not_found_error"
    assert batches.list(limit=1).data[0].id == batch.id
    with pytest.raises(anthropic.BadRequestError):
        batches.cancel(batch.id)
    assert batches.delete(batch.id).id == batch.id
    with pytest.raises(anthropic.NotFoundError):
        batches.retrieve(batch.id)
    with pytest.raises(anthropic.BadRequestError, match="more than once"):
        batches.create(requests=[asked(1), asked(1)])
    with pytest.raises(anthropic.BadRequestError, match="stream"):
        batches.create(requests=[asked(1, stream=True)])


def test_message_batches_above_the_size_of_other_bodies(tmp_path: Path) -> None:
    """Anthropic allows a batch more than a request: it arrives in pieces, groups and requests across their
    borders, is checked like a small one with places in the whole, and is bounded like a file."""
    sizes: dict[str, Any] = {
        "max_body_mib": 0.25,
        "batch_file_mib": 4,
        "batch_dir": str(tmp_path / "batches"),
    }
    with agent_gateway(tmp_path, **sizes) as gateway:
        gateway.says(GREEDY)
        client = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60)
        batches = client.messages.batches

        def asked(number: int, text: str = "é" * 20_000, **fields: Any) -> Any:
            params = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": text}]}
            return {"custom_id": f"m{number}", "params": params | fields}

        many = [asked(number) for number in range(60)]
        with pytest.raises(anthropic.BadRequestError, match="'m7' more than once"):
            batches.create(requests=[*many, asked(7)])
        with pytest.raises(anthropic.BadRequestError, match=r"requests\[59\].params.stream"):
            batches.create(requests=[*many[:59], asked(59, stream=True)])
        with pytest.raises(anthropic.APIStatusError, match=r"batch_file_mib") as refused:
            batches.create(requests=[asked(1, "x" * 5 * 2**20)])
        assert refused.value.status_code == 413
        with pytest.raises(
            anthropic.APIStatusError, match=r"larger than 0.25 MiB \(max_body_mib\)"
        ) as refused:
            batches.create(requests=[asked(1, "x" * 2**19)])
        assert refused.value.status_code == 413
        begun = json.dumps({"requests": many[:20]}).encode().removesuffix(b"]}")
        for tail in (b"", b", 1]}", b" {}]}", b"]} {}", b'], "more": 1}'):
            answer = httpx.post(f"{gateway.url}/v1/messages/batches", content=begun + tail, timeout=60)
            assert answer.status_code == 400, tail
            assert "above max_body_mib" in answer.json()["error"]["message"]
        batch = batches.create(
            requests=[asked(number, "Hi" if number % 2 else "é" * 20_000) for number in range(40)]
        )
        assert batch.request_counts.processing == 40
        end = time.monotonic() + 120
        while (batch := batches.retrieve(batch.id)).processing_status != "ended":
            assert time.monotonic() < end
            time.sleep(0.05)
        assert {one.custom_id for one in batches.results(batch.id)} == {f"m{number}" for number in range(40)}
        assert batches.list(limit=5).has_more is False


def test_message_batches_are_cancelled(gateway: AgentGateway) -> None:
    """What a cancelled batch did not run is in its results as canceled."""
    client = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60)
    held = threading.Event()
    gateway.engine.script = Script(held=held)
    params: Any = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}
    requests: Any = [{"custom_id": str(number), "params": params} for number in range(200)]
    batch = client.messages.batches.create(requests=requests)
    assert client.messages.batches.cancel(batch.id).processing_status == "canceling"
    held.set()
    wait_until(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")
    batch = client.messages.batches.retrieve(batch.id)
    types = [one.result.type for one in client.messages.batches.results(batch.id)]
    assert len(types) == 200
    assert batch.request_counts.canceled == types.count("canceled") > 0
