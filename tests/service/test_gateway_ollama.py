"""Guards what Ollama's clients see: lines of JSON, options, tools, thoughts, the model's card, errors."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from tests.helpers.agent_gateway import GREEDY, THOUGHT, AgentGateway
from tests.helpers.fake_engine import MODEL, Script

HELLO = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = (
    f"{THOUGHT}Let me look.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
COUNTS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count"}


@pytest.fixture(scope="module")
def gateway_settings() -> dict[str, Any]:
    """Returns the time to lines that fill silence: later than any answer of a busy machine."""
    return {"sse_keepalive_s": 4.0}


def post(gateway: AgentGateway, path: str, **body: Any) -> httpx.Response:
    """Sends a request; the model's name has the tag that Ollama's clients write."""
    return httpx.post(f"{gateway.url}{path}", json={"model": f"{MODEL}:latest", **body}, timeout=60)


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    """Returns the objects of a stream, each with a line of its own."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_chat_streams_by_default(gateway: AgentGateway) -> None:
    """Lines whose texts join to the whole answer; the last has the reason, counts and times."""
    options = {"temperature": 0}
    found = lines(post(gateway, "/api/chat", messages=HELLO, options=options))
    whole = post(gateway, "/api/chat", messages=HELLO, options=options, stream=False).json()
    assert "".join(line["message"]["content"] for line in found) == GREEDY == whole["message"]["content"]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    assert {line["model"] for line in [*found, whole]} == {f"{MODEL}:latest"}
    for last in (found[-1], whole):
        assert (last["done"], last["done_reason"]) == (True, "stop")
        assert last.keys() >= COUNTS
        assert last["total_duration"] >= last["eval_duration"] >= 0
        assert last["created_at"].endswith("Z")
    sent = gateway.engine.seen.requests[0]
    assert whole["prompt_eval_count"] == len(sent.tokenized.input_ids)
    assert found[-1]["eval_count"] == whole["eval_count"] > 5


def test_options_reach_the_engine(gateway: AgentGateway) -> None:
    """Each option is the parameter of another name; the rest has no effect."""
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.8,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "seed": 9,
        "stop": ["fox"],
        "num_ctx": 2048,
        "num_gpu": 1,
        "mirostat": 0,
    }
    answer = post(gateway, "/api/chat", messages=HELLO, options=options, keep_alive="5m", stream=False)
    assert answer.status_code == 200, answer.text
    params = gateway.engine.seen.requests[0].sampling_params
    assert (params.max_tokens, params.top_k, params.seed) == (7, 3, 9)
    assert params.temperature == pytest.approx(0.5)
    assert params.top_p == pytest.approx(0.8)
    assert params.min_p == pytest.approx(0.1)
    assert params.repetition_penalty == pytest.approx(1.1)
    assert "num_gpu" in httpx.get(f"{gateway.url}/metrics").text
    for unlimited in (-1, -2, 10**6):
        answer = post(gateway, "/api/chat", messages=HELLO, options={"num_predict": unlimited}, stream=False)
        assert answer.status_code == 200, answer.text


def test_thought_and_calls(gateway: AgentGateway) -> None:
    """Thoughts have their own field, calls come whole with their arguments as objects."""
    gateway.says(CALLS)
    found = lines(post(gateway, "/api/chat", messages=HELLO, tools=[TOOL]))
    whole = post(gateway, "/api/chat", messages=HELLO, tools=[TOOL], stream=False).json()["message"]
    thinking = "".join(line["message"].get("thinking", "") for line in found)
    assert thinking.strip() == whole["thinking"].strip() == "The fox wants\n the weather."
    streamed = [call for line in found for call in line["message"].get("tool_calls", ())]
    functions = [call["function"] for call in streamed]
    assert functions == [
        {"index": 0, "name": "get_weather", "arguments": {"city": "Zürich"}},
        {"index": 1, "name": "get_weather", "arguments": {"city": "Rome"}},
    ]
    assert [call["function"] for call in whole["tool_calls"]] == functions
    assert whole["content"].strip() == "Let me look."


def test_tools_and_their_results_in_history(gateway: AgentGateway) -> None:
    """Calls without ids, and results in their order or by the tool's name, as Ollama's clients send them."""
    calls = [{"function": {"name": name, "arguments": {"n": 1}}} for name in ("one", "two")]
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_name": "two", "content": "second"},
        {"role": "tool", "content": "first"},
    ]
    answer = post(gateway, "/api/chat", messages=messages, stream=False)
    assert answer.status_code == 200, answer.text
    prompt = gateway.prompt()
    assert prompt.index("Hm.") < prompt.index('"two"') < prompt.index("tool\nsecond") < prompt.index("first")


def test_thinking_is_switched(gateway: AgentGateway) -> None:
    """`think` reaches the template; unset, the model does as it does."""
    for think, closed in ((None, False), (True, False), (False, True)):
        post(gateway, "/api/chat", messages=HELLO, think=think, stream=False)
        assert gateway.prompt().endswith("</think>\n\n") == closed
    assert post(gateway, "/api/chat", messages=HELLO, think="high", stream=False).status_code == 200
    refused = post(gateway, "/api/chat", messages=HELLO, think="much")
    assert (refused.status_code, "think" in refused.json()["error"]) == (400, True)


def test_formats(gateway: AgentGateway) -> None:
    """json and schemas are constraints of the engine's."""
    post(gateway, "/api/chat", messages=HELLO, format="json", stream=False)
    assert gateway.engine.seen.requests[-1].constraint.json_object
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    post(gateway, "/api/generate", prompt="x", format=schema, stream=False)
    assert json.loads(gateway.engine.seen.requests[-1].constraint.json_schema)["properties"]
    assert post(gateway, "/api/chat", messages=HELLO, format="xml").status_code == 400


def test_generate(gateway: AgentGateway) -> None:
    """A prompt with a system message goes through the template; a raw one does not."""
    options = {"temperature": 0}
    found = lines(post(gateway, "/api/generate", prompt="Hi", system="Brief.", options=options))
    assert "".join(line["response"] for line in found) == GREEDY
    assert (
        gateway.prompt() == "<|start|>system\nBrief.<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    )
    whole = post(gateway, "/api/generate", prompt="Once", raw=True, stream=False, options=options).json()
    assert (whole["response"], whole["done"]) == (GREEDY, True)
    assert gateway.prompt() == "Once"
    assert gateway.engine.seen.requests[-1].sampling_params.max_tokens > 1000
    assert post(gateway, "/api/generate", prompt="x", template="{{ . }}").status_code == 400


def test_loading(gateway: AgentGateway) -> None:
    """Without anything to answer the model is reported as loaded, and the engine is not asked."""
    bodies: dict[str, Any] = {"/api/chat": {"messages": []}, "/api/generate": {}}
    for path, body in bodies.items():
        answer = post(gateway, path, **body).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        assert post(gateway, path, **body, keep_alive=0).json()["done_reason"] == "unload"
    assert gateway.engine.seen.requests == []


def test_prefill_is_continued(gateway: AgentGateway) -> None:
    """A last message of the assistant is continued."""
    messages = [*HELLO, {"role": "assistant", "content": "The fox"}]
    post(gateway, "/api/chat", messages=messages, stream=False)
    assert gateway.prompt().endswith("assistant\nThe fox")


def test_logprobs(gateway: AgentGateway) -> None:
    """There is one entry per token of content, with its alternatives."""
    answer = post(gateway, "/api/chat", messages=HELLO, logprobs=True, top_logprobs=2, stream=False).json()
    assert len(answer["logprobs"]) >= answer["eval_count"] - 1
    assert len(answer["logprobs"][0]["top_logprobs"]) == 2


def test_images_of_a_text_model_are_refused(gateway: AgentGateway) -> None:
    """They are read as images, which this model cannot take."""
    answer = post(gateway, "/api/chat", messages=[{"role": "user", "content": "x", "images": ["AAAA"]}])
    assert answer.status_code == 400
    assert "text only" in answer.json()["error"]


def test_the_models_card(gateway: AgentGateway) -> None:
    """The list, what runs, and what the model can do; with and without the tag; HEAD as clients probe."""
    tags = httpx.get(f"{gateway.url}/api/tags").json()["models"]
    assert [card["name"] for card in tags] == [f"{MODEL}:latest"]
    assert len(tags[0]["digest"]) == 64
    (running,) = httpx.get(f"{gateway.url}/api/ps").json()["models"]
    assert running["context_length"] == 4096
    for name in (MODEL, f"{MODEL}:latest"):
        for field in ("model", "name"):
            show = httpx.post(f"{gateway.url}/api/show", json={field: name}).json()
            assert show["capabilities"] == ["completion", "tools", "thinking"]
            assert show["model_info"]["qwen3_moe.context_length"] == 4096
            assert show["model_info"]["general.architecture"] == "qwen3_moe"
    version = httpx.get(f"{gateway.url}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) > (0, 6, 4)  # the least that clients take
    for path in ("/", "/api/version", "/api/tags"):
        assert httpx.head(f"{gateway.url}{path}").status_code == 200
    assert post(gateway, "/api/pull").json() == {"status": "success"}


def test_refusals_are_ollamas(gateway: AgentGateway) -> None:
    """One string each: unknown models, wrong bodies, what cannot be had, unknown paths."""
    for path in ("/api/show", "/api/chat", "/api/generate", "/api/pull"):
        answer = httpx.post(
            f"{gateway.url}{path}", json={"model": "other:7b", "messages": HELLO, "prompt": "x"}
        )
        assert answer.status_code == 404, answer.text
        assert "does not exist" in answer.json()["error"]
    assert "prompt" in post(gateway, "/api/embeddings", input="x").json()["error"]
    assert httpx.post(f"{gateway.url}/api/chat", content=b"{").json().keys() == {"error"}
    assert httpx.get(f"{gateway.url}/api/blobs").json().keys() == {"error"}
    answer = post(gateway, "/api/chat", messages=HELLO, options={"top_p": 2})
    assert (answer.status_code, "options.top_p" in answer.json()["error"]) == (400, True)


def test_failure_and_silence_in_a_stream(gateway: AgentGateway) -> None:
    """A failure is the last line; silence is filled with lines without content, as all have to be JSON."""
    gateway.engine.script = Script(fail_after=3)
    found = lines(post(gateway, "/api/chat", messages=HELLO))
    assert found[-1].keys() == {"error"}
    held = threading.Event()
    gateway.engine.script = Script(held=held, held_from=0, token_ids=[60, 61])
    body, found = {"model": MODEL, "messages": HELLO}, []
    with httpx.stream("POST", f"{gateway.url}/api/chat", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            found.append(json.loads(line))
            held.set()
    assert found[0]["message"] == {"role": "assistant", "content": ""}
    assert found[-1]["done"]


def test_leaving_cancels(gateway: AgentGateway) -> None:
    """A client that leaves a stream ends the engine's work."""
    gateway.engine.script = Script(held=threading.Event())
    body = {"model": MODEL, "messages": HELLO}
    with httpx.stream("POST", f"{gateway.url}/api/chat", json=body) as answer:
        next(answer.iter_lines())
    assert gateway.engine.seen.cancelled.wait(60)
