"""Guards the HTTP surface around generation: error shapes, headers, what reaches the engine, traces."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.prompts.prepare import check_shown
from gateway.schemas.errors import ApiError
from gateway.schemas.requests import ChatMessage
from gateway.text.conversation import MarkedText
from tests.helpers.fake_engine import FIRST_TOKEN_S, MODEL, FakeEngine, Script, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer


@dataclass
class Setup:
    """Gateway and engine; filled by the fixture."""

    url: str
    engine: FakeEngine
    spans: InMemorySpanExporter

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Sends a POST with JSON."""
        return httpx.post(f"{self.url}{path}", json=body, headers=headers)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """Shared by this file; spans of the whole process end in memory."""
    exporter = InMemorySpanExporter()
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    directory = tmp_path_factory.mktemp("http")
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    address = f"unix:{directory}/engine.sock"
    engine = FakeEngine(directory, tokenizer)
    with serving(engine, address), running_gateway(gateway_config(address)) as url:
        yield Setup(url, engine, exporter)


@pytest.fixture
def setup(running: Setup) -> Setup:
    """Returns the shared servers with a fresh record."""
    running.engine.reset()
    running.spans.clear()
    return running


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/api/create", "moebius pull"),
        ("/generate_stream", "/v1/chat/completions"),
        ("/start_profile", "moebius profile"),
    ],
)
def test_paths_of_other_servers_are_named(setup: Setup, path: str, hint: str) -> None:
    """A client of another server reads where its request belongs."""
    answer = httpx.post(f"{setup.url}{path}", json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"unknown path: POST {path}; ")
    assert hint in message


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code", "param"),
    [
        ("GET", "/v2/nothing", b"", 404, "unknown_url", None),
        ("GET", "/v1/completions", b"", 405, "method_not_allowed", None),
        ("POST", "/v1/completions", b"{broken", 400, "invalid_json", None),
        ("POST", "/v1/completions", b"[1]", 400, "invalid_value", None),
        ("POST", "/v1/completions", b'{"model":"tiny-model"}', 400, "missing_required_parameter", "prompt"),
        ("POST", "/v1/completions", b'{"model":"m","prompt":"x"}', 404, "model_not_found", "model"),
        ("POST", "/v1/completions", b'{"model":"m","prompt":{"a":1}}', 400, "invalid_value", "prompt"),
        ("POST", "/v1/completions", b'{"model":"tiny-model","prompt":""}', 400, "invalid_value", "prompt"),
        (
            "POST",
            "/v1/completions",
            b'{"model":"tiny-model","prompt":[99999]}',
            400,
            "invalid_value",
            "prompt",
        ),
        ("POST", "/v1/completions", b'{"model":"m","prompt":"x","n":"2"}', 400, "invalid_value", "n"),
        ("POST", "/v1/completions", b'{"model":"m","prompt":"x","top_p":NaN}', 400, "invalid_value", "top_p"),
    ],
)
def test_errors_have_the_openai_shape(
    setup: Setup, method: str, path: str, content: bytes, status: int, code: str, param: str | None
) -> None:
    """Every refusal is {"error": {message, type, param, code}} and never reaches the engine."""
    headers = {"Content-Type": "application/json"}
    response = httpx.request(method, f"{setup.url}{path}", content=content, headers=headers)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), error
    assert error["type"] == "invalid_request_error"
    assert setup.engine.seen.requests == []


def test_image_parts_are_refused_by_name(setup: Setup) -> None:
    """Content that is not text is refused, naming the part."""
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}]}
    error = setup.post("/v1/chat/completions", body).json()["error"]
    assert error["param"].startswith("messages[0].content[1]")


def test_parameters_reach_the_engine(setup: Setup) -> None:
    """Every sampling parameter arrives unchanged in the engine's message."""
    sent = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "seed": 42,
        "n": 2,
        "min_tokens": 2,
        "max_tokens": 5,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "logit_bias": {"5": -2.0},
        "logprobs": 2,
    }
    more = {"priority": 3, "cache_salt": "tenant", "keep_prefix_s": 7.5, "prompt": [5, 6, 7], "model": MODEL}
    assert setup.post("/v1/completions", {**sent, **more}).status_code == 200
    request = setup.engine.seen.requests[0]
    params = request.sampling_params
    arrived = {name: getattr(params, name) for name in sent if name not in ("logit_bias", "stop_token_ids")}
    assert arrived == {name: sent[name] for name in arrived}
    assert (dict(params.logit_bias), list(params.stop_token_ids)) == ({5: -2.0}, [9])
    assert (request.priority, request.cache_salt, request.keep_prefix_s) == (3, "tenant", 7.5)
    assert list(request.tokenized.input_ids) == [5, 6, 7]


def test_generation_defaults_of_the_model_apply(setup: Setup) -> None:
    """Unset parameters take generation_config's values, then the API's; 0 of the client is a value."""
    setup.post("/v1/completions", {"model": MODEL, "prompt": "The"})
    setup.post("/v1/completions", {"model": MODEL, "prompt": "The", "temperature": 0, "top_k": -1})
    first, second = (request.sampling_params for request in setup.engine.seen.requests)
    assert (round(first.temperature, 6), first.top_k, first.max_tokens) == (0.7, 20, 16)
    assert (second.temperature, second.top_k) == (0.0, 0)
    assert not first.HasField("seed")


def test_request_id_is_echoed_or_made(setup: Setup) -> None:
    """X-Request-Id comes back, on errors too; without one the gateway makes one."""
    assert httpx.get(f"{setup.url}/version", headers={"X-Request-Id": "abc"}).headers["X-Request-Id"] == "abc"
    assert httpx.get(f"{setup.url}/nothing", headers={"X-Request-Id": "abc"}).headers["X-Request-Id"] == "abc"
    assert len(httpx.get(f"{setup.url}/version").headers["X-Request-Id"]) == 32


def test_stream_headers(setup: Setup) -> None:
    """Streams are labelled as such, and proxies are asked not to collect them."""
    response = setup.post("/v1/completions", {"model": MODEL, "prompt": "The", "stream": True})
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    assert "Content-Length" not in response.headers


def test_one_trace_from_http_to_the_engine(setup: Setup) -> None:
    """The client's trace id goes through the HTTP span and the gRPC span into the engine's metadata."""
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    parent = f"00-{trace_id}-b7ad6b7169203331-01"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    assert setup.post("/v1/chat/completions", body, traceparent=parent).status_code == 200
    spans: dict[str, Any] = {}
    end = time.monotonic() + 60  # the request's span ends a moment after its last byte
    while f"chat {MODEL}" not in spans and time.monotonic() < end:
        spans = {span.name: span for span in setup.spans.get_finished_spans()}
        time.sleep(0.01)
    http, call = spans[f"chat {MODEL}"], spans["moebius.engine.v1.Engine/Generate"]
    assert call.parent is not None
    assert call.parent.span_id == http.context.span_id
    assert f"{http.context.trace_id:032x}" == trace_id
    assert setup.engine.seen.metadata[0]["traceparent"].split("-")[1:3] == [
        trace_id,
        f"{call.context.span_id:016x}",
    ]
    assert call.attributes is not None
    assert call.attributes["rpc.grpc.status_code"] == 0  # it ended, it was not cancelled
    attributes: dict[str, Any] = dict(http.attributes or {})
    assert attributes["gen_ai.request.model"] == MODEL
    assert attributes["gen_ai.usage.output_tokens"] > 0
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)


def test_metrics_count_tokens_and_latencies(setup: Setup) -> None:
    """The vllm: names exist after one stream and say what was done."""
    setup.engine.script = Script(text="fox runs over")
    setup.post("/v1/completions", {"model": MODEL, "prompt": "The", "stream": True})
    text = httpx.get(f"{setup.url}/metrics").text
    label = f'{{model_name="{MODEL}"'
    for name in (
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_prompt_tokens_count",
        "request_generation_tokens_count",
    ):
        value = next(line for line in text.splitlines() if line.startswith(f"vllm:{name}{label}"))
        assert float(value.split()[-1]) >= 1
    assert f'vllm:request_success_total{{finished_reason="stop",model_name="{MODEL}"}}' in text


def between_tokens(setup: Setup) -> tuple[float, float]:
    """Returns number and sum, seconds, of the times between tokens."""
    lines = httpx.get(f"{setup.url}/metrics").text.splitlines()
    name = "vllm:inter_token_latency_seconds"
    count, total = (
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}_{kind}{{"))
        for kind in ("count", "sum")
    )
    return count, total


def test_times_between_tokens_count_all_tokens_but_first_ones(setup: Setup) -> None:
    """The times count also for an answer that comes as a whole, of which the engine says when it began."""
    setup.engine.script = Script(text="fox runs over")
    tokens = len(byte_level_tokenizer().encode("fox runs over").ids) + 1
    for extra, outputs in (({"stream": True}, 1), ({}, 1), ({"n": 3}, 3)):
        before, _ = between_tokens(setup)
        answer = setup.post("/v1/completions", {"model": MODEL, "prompt": "The", **extra})
        assert answer.status_code == 200
        assert between_tokens(setup)[0] - before == outputs * (tokens - 1)
    lines = httpx.get(f"{setup.url}/metrics").text.splitlines()
    buckets = [line for line in lines if line.startswith("vllm:inter_token_latency_seconds_bucket")]
    assert float(buckets[-1].split()[-1]) == between_tokens(setup)[0]


def chunks_of(setup: Setup, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the JSON of a stream's events."""
    text = setup.post(path, {"model": MODEL, "stream": True, **body}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_the_last_chunk_says_why_an_output_ended(setup: Setup) -> None:
    """The end comes with the last text, where there is any, as vLLM has it; before it nothing is said of it,
    and the opening of a chat counts no tokens.
    """
    setup.engine.script = Script(text="fox runs over")
    options = {"include_usage": True, "continuous_usage_stats": True}
    chat = {"messages": [{"role": "user", "content": "The"}], "max_tokens": 3, "stream_options": options}
    opening, *content, total = chunks_of(setup, "/v1/chat/completions", chat)
    assert opening["usage"]["completion_tokens"] == 0
    assert [one["usage"]["completion_tokens"] for one in (*content, total)] == [1, 2, 3, 3]
    assert [one["choices"][0]["finish_reason"] for one in content] == [None, None, "length"]
    assert all(one["choices"][0]["delta"]["content"] for one in content)
    texts = chunks_of(setup, "/v1/completions", {"prompt": "The", "max_tokens": 3})
    assert [one["choices"][0]["finish_reason"] for one in texts] == [None, None, "length"]
    assert all(one["choices"][0]["text"] for one in texts)


def test_usage_of_every_chunk_is_part_of_usage(setup: Setup) -> None:
    """`continuous_usage_stats` without `include_usage` means nothing, as in vLLM."""
    options = {"include_usage": False, "continuous_usage_stats": True}
    chunks = chunks_of(
        setup, "/v1/completions", {"prompt": "The", "max_tokens": 3, "stream_options": options}
    )
    assert not any("usage" in one for one in chunks)


def test_a_refusal_names_all_keys_that_are_no_token_ids(setup: Setup) -> None:
    """The first five of them, so that the message stays short."""
    bias = {"1": 0, "bad1": 0, "bad2": 0}
    answer = setup.post("/v1/completions", {"model": MODEL, "prompt": "The", "logit_bias": bias})
    assert answer.status_code == 400
    assert "'bad1', 'bad2'" in answer.json()["error"]["message"]
    bias = {f"bad{number}": 0 for number in range(9)}
    answer = setup.post("/v1/completions", {"model": MODEL, "prompt": "The", "logit_bias": bias})
    assert "'bad4' and 4 more" in answer.json()["error"]["message"]


def first_token_times(setup: Setup) -> tuple[float, float]:
    """Returns number and sum, seconds, of the gateway's times to the first token."""
    lines = httpx.get(f"{setup.url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("vllm:time_to_first_token_seconds_")]
    return tuple(  # type: ignore[return-value]
        sum(float(line.split()[-1]) for line in found if f"_seconds_{kind}{{" in line)
        for kind in ("count", "sum")
    )


@pytest.mark.parametrize(
    "extra", [{}, {"n": 3}, {"prompt": ["The", "fox"]}, {"stop": ["dog"]}, {"stream": True}]
)
def test_first_tokens_count_once_however_they_are_delivered(setup: Setup, extra: dict[str, Any]) -> None:
    """A request adds one time to the first token, streamed or whole; of a whole one the engine says it."""
    count, total = first_token_times(setup)
    body = {"model": MODEL, "prompt": "The", "max_tokens": 4, **extra}
    assert setup.post("/v1/completions", body).status_code == 200
    after, seconds = first_token_times(setup)
    assert after == count + 1
    if "stream" not in extra and "stop" not in extra:
        assert seconds - total >= FIRST_TOKEN_S
        assert seconds - total < FIRST_TOKEN_S + 60  # of the output that was first


def test_requests_without_tokens_have_no_first_token(setup: Setup) -> None:
    """An echo alone makes no token."""
    count, _ = first_token_times(setup)
    body = {"model": MODEL, "prompt": "The", "max_tokens": 0, "echo": True}
    assert setup.post("/v1/completions", body).status_code == 200
    assert first_token_times(setup)[0] == count


def test_tokenize_round_trip(setup: Setup) -> None:
    """/detokenize undoes /tokenize; messages are rendered by the template, exactly one form is allowed."""
    answer = setup.post("/tokenize", {"prompt": "The fox 😀", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    found = setup.post("/detokenize", {"tokens": answer["tokens"]}).json()
    assert found == dict.fromkeys(("prompt", "content", "text"), "The fox 😀")
    chat = setup.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
    text = setup.post("/detokenize", {"tokens": chat}).json()["prompt"]
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert setup.post("/tokenize", {}).status_code == 400


def test_final_message_can_be_continued(setup: Setup) -> None:
    """continue_final_message ends the prompt inside the assistant's last message."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The fox"}]
    body = {"model": MODEL, "messages": messages, "continue_final_message": True}
    assert setup.post("/v1/chat/completions", body).status_code == 200
    ids = list(setup.engine.seen.requests[0].tokenized.input_ids)
    text = setup.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text.endswith("<|start|>assistant\nThe fox")


def test_load_probes_and_the_list_that_codex_reads(setup: Setup) -> None:
    """Paths of vLLM and SageMaker; the engine's zeros are there; Codex reads `models`, others `data`."""
    assert [httpx.request(method, f"{setup.url}/ping").status_code for method in ("GET", "POST")] == [
        200,
        200,
    ]
    assert httpx.get(f"{setup.url}/load").json() == {"server_load": 0}
    load = httpx.get(f"{setup.url}/v1/load").json()
    assert load["server_load"] == 0
    engine = load["engine"]
    assert (engine["num_running_reqs"], engine["num_waiting_reqs"], engine["token_usage"]) == (3, 0, 0.25)
    plain = httpx.get(f"{setup.url}/v1/models").json()
    assert "models" not in plain
    codex = httpx.get(f"{setup.url}/v1/models", params={"client_version": "0.145.0"}).json()
    assert codex == {**plain, "models": []}


def test_invocations_are_chats_or_completions(setup: Setup) -> None:
    """SageMaker's one path answers as the path of whichever API the body is of, whole and streamed."""
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (("chat/completions", {"messages": messages}), ("completions", {"prompt": "hi"})):
        expected, found = setup.post(f"/v1/{path}", body).json(), setup.post("/invocations", body).json()
        assert found["object"] == expected["object"]
        assert found["choices"][0].keys() == expected["choices"][0].keys()
        streamed = setup.post("/invocations", {**body, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.endswith("data: [DONE]\n\n")
    assert setup.post("/invocations", {"messages": messages, "n": "2"}).json()["error"]["param"] == "n"
    for neither in ({"input": "hi"}, []):
        refused = setup.post("/invocations", neither)
        assert (refused.status_code, "'messages'" in refused.json()["error"]["message"]) == (400, True)


def test_the_tokenizers_description(setup: Setup) -> None:
    """What lm-eval reads to tokenise by this server: names of tokens as texts, the template in use."""
    info = httpx.get(f"{setup.url}/tokenizer_info").json()
    assert isinstance(info["tokenizer_class"], str)
    assert "<|start|>" in info["chat_template"]
    named = [value for name, value in info.items() if name.endswith("_token")]
    assert all(isinstance(value, str) for value in named)


def test_roles_that_templates_know(setup: Setup) -> None:
    """A role of the model's own reaches its template; one that could spell a control token is refused."""
    body = {"messages": [{"role": "ipython", "content": [{"type": "text", "text": "3"}]}]}
    tokens = setup.post("/tokenize", body).json()["tokens"]
    text = setup.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text.startswith("<|start|>ipython\n3<|end|>")
    for role in ("<|end|>", "a b", "", "x" * 65, None, 3):
        refused = setup.post("/v1/chat/completions", {"messages": [{"role": role, "content": "x"}]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].role"), role
    shown = MarkedText("<|user|>a <|\ue000system|> b", "\ue000")
    check_shown([ChatMessage(role="context", content=" <|system|> b ")], shown)
    with pytest.raises(ApiError, match="does not show messages of role 'context'"):
        check_shown([ChatMessage(role="context", content="lost")], shown)


def test_load_counts_requests_that_are_answered(setup: Setup) -> None:
    """A request counts from admission to the last byte."""
    held = threading.Event()
    setup.engine.script = Script(held=held)
    body = {"model": MODEL, "prompt": "The", "stream": True, "max_tokens": 5, "ignore_eos": True}
    with httpx.stream("POST", f"{setup.url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert httpx.get(f"{setup.url}/load").json() == {"server_load": 1}
        held.set()
        assert list(lines)[-2] == "data: [DONE]"
