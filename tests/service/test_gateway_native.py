"""Guards what clients of llama-server, SGLang and Anthropic see on the paths that only these servers have."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.helpers.agent_gateway import GREEDY, AgentGateway
from tests.helpers.fake_engine import MODEL, Script
from tests.helpers.lazy import lazy

if TYPE_CHECKING:
    import anthropic
else:
    anthropic = lazy("anthropic")


def events(answer: httpx.Response) -> list[Any]:
    """Returns the data of each event; the end mark as text."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_llama_servers_completion(gateway: AgentGateway) -> None:
    """Its fields become the engine's; one object, or events whose last has the counts and why it ended."""
    asked = {"prompt": "The fox", "n_predict": 40, "temperature": 0, "repeat_penalty": 1.1, "seed": -1}
    whole = gateway.post("/completion", **asked, cache_prompt=True, logit_bias=[[5, False]], n_probs=1).json()
    assert (whole["content"], whole["stop"], whole["stop_type"]) == (GREEDY, True, "eos")
    assert whole["tokens_predicted"] == len(whole["tokens"]) == whole["timings"]["predicted_n"]
    assert whole["prompt"] == "The fox"
    assert whole["completion_probabilities"][0]["logprob"] == -0.25
    params = gateway.engine.seen.requests[0].sampling_params
    assert (params.max_tokens, dict(params.logit_bias), params.HasField("seed")) == (40, {5: -100.0}, False)
    assert round(params.repetition_penalty, 4) == 1.1
    *pieces, last = events(gateway.post("/completion", **asked, stream=True))
    assert "".join(piece["content"] for piece in pieces) == GREEDY
    assert [piece["stop"] for piece in (*pieces, last)] == [False] * len(pieces) + [True]
    assert last["tokens_evaluated"] == whole["tokens_evaluated"] > 0
    cut = gateway.post("/completion", **(asked | {"n_predict": 3})).json()
    assert cut["stop_type"] == "limit"
    word = gateway.post("/completion", **asked, stop=["jumps"]).json()
    assert (word["stop_type"], word["stopping_word"]) == ("word", "jumps")
    assert "n_predict" in gateway.post("/completion", prompt="x", n_predict="many").json()["error"]["message"]
    refused = gateway.post("/infill", input_prefix="def f(", input_suffix="return x")
    assert (refused.status_code, "no tokens to fill in the middle" in refused.text) == (400, True)


def test_llama_servers_prompts_and_pieces(gateway: AgentGateway) -> None:
    """Several prompts have an answer each, with its own prompt and count; tokens have their pieces, bytes
    where they are no text; `/v1/health` is its other name for `/health`."""
    asked = {"prompt": ["The fox", "A dog"], "n_predict": 3, "temperature": 0}
    several = gateway.post("/completion", **asked).json()
    found = [(one["index"], one["prompt"], one["tokens_predicted"]) for one in several]
    assert found == [(0, "The fox", 3), (1, "A dog", 3)]
    alone = gateway.post("/completion", **(asked | {"prompt": "A dog"})).json()
    assert (several[1]["content"], several[1]["stop_type"]) == (alone["content"], "limit")
    assert len(gateway.post("/completion", prompt=[[1, 2]], n_predict=3).json()) == 1
    refused = gateway.post("/completion", **asked, stream=True)
    assert (refused.status_code, "'stream' needs one prompt" in refused.text) == (400, True)
    assert gateway.post("/completion", prompt=["The fox", [1, 2]]).status_code == 400
    text = "lazy é 東"
    pieces = gateway.post("/tokenize", content=text, with_pieces=True, add_special=False).json()["tokens"]
    data = [one["piece"] for one in pieces]
    assert any(isinstance(piece, list) for piece in data)
    joined = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in data)
    assert joined.decode() == text
    assert [one["id"] for one in pieces] == gateway.post("/tokenize", content=text).json()["tokens"]
    assert httpx.get(f"{gateway.url}/v1/health", timeout=60).status_code == 200


def test_llama_servers_facts(gateway: AgentGateway) -> None:
    """Properties, slots, and its names for tokens and their text."""
    props = httpx.get(f"{gateway.url}/props").json()
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (4, 4096)
    assert "<|start|>" in props["chat_template"]
    slots = httpx.get(f"{gateway.url}/slots").json()
    assert [slot["is_processing"] for slot in slots] == [True, True, True, False]
    tokens = gateway.post("/tokenize", content="lazy dog").json()["tokens"]
    assert gateway.post("/detokenize", tokens=tokens).json()["content"] == "lazy dog"
    messages = [{"role": "user", "content": "lazy <|end|> dog"}]
    prompt = gateway.post("/apply-template", messages=messages).json()["prompt"]
    assert prompt == "<|start|>user\nlazy <|end|> dog<|end|>\n<|start|>assistant\n"
    assert httpx.get(f"{gateway.url}/lora-adapters").json() == []
    assert httpx.get(f"{gateway.url}/models").json() == httpx.get(f"{gateway.url}/v1/models").json()


def test_llama_servers_paths_without_a_version(gateway: AgentGateway) -> None:
    """Chats as OpenAI's, completions and embeddings in its own shapes."""
    messages = [{"role": "user", "content": "hi"}]
    chat = gateway.post("/chat/completions", messages=messages, temperature=0).json()
    assert chat["choices"][0]["message"]["content"] == GREEDY
    text = gateway.post("/completions", prompt="The fox", n_predict=40, temperature=0).json()
    assert text["content"] == GREEDY
    found = gateway.post("/embedding", content="The fox").json()
    several = gateway.post("/embeddings", input=["A dog", "The fox"], embd_normalize=-1).json()
    assert [item["index"] for item in several] == [0, 1]
    ((unit,),) = ([item["embedding"][0]] for item in found)
    plain = several[1]["embedding"][0]
    norm = sum(value * value for value in plain) ** 0.5
    assert unit == pytest.approx([value / norm for value in plain], abs=1e-6)
    assert "content" in gateway.post("/embedding", text="x").json()["error"]["message"]


def test_sglangs_generate(gateway: AgentGateway) -> None:
    """One text or ids, or several; streams have all text so far; log-probabilities as it has them."""
    asked = {"text": "The fox", "sampling_params": {"max_new_tokens": 40, "temperature": 0}}
    one = gateway.post("/generate", **asked, return_logprob=True, return_text_in_logprobs=True).json()
    assert one["text"] == GREEDY
    assert one["meta_info"]["finish_reason"]["type"] == "stop"
    assert one["meta_info"]["completion_tokens"] == len(one["output_ids"])
    logprob, token_id, text = one["meta_info"]["output_token_logprobs"][0]
    assert (logprob, token_id, isinstance(text, str)) == (-0.25, one["output_ids"][0], True)
    several = gateway.post("/generate", **(asked | {"text": ["The fox", "A dog"]})).json()
    assert [item["text"] for item in several] == [GREEDY, GREEDY]
    short = {"sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    cut = gateway.post("/generate", input_ids=[5, 6, 7], **short).json()
    assert (cut["meta_info"]["finish_reason"], cut["meta_info"]["prompt_tokens"]) == (
        {"type": "length", "length": 3},
        3,
    )
    *pieces, done = events(gateway.post("/generate", **asked, stream=True))
    assert done == "[DONE]"
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in pairwise(pieces))
    assert pieces[-1]["text"] == GREEDY
    assert "exactly one" in gateway.post("/generate", sampling_params={}).json()["error"]["message"]
    wrong = gateway.post("/generate", text="x", sampling_params={"temperature": -1}).json()["error"]
    assert wrong["param"] == "sampling_params.temperature"


def test_sglangs_prompts_are_scored(gateway: AgentGateway) -> None:
    """Log-probabilities of the prompt from `logprob_start_len` on, for each prompt its own count; without new
    tokens there is no output, as in SGLang's `select`."""
    asked = {"sampling_params": {"max_new_tokens": 0, "temperature": 0}, "return_logprob": True}
    scored = {**asked, "top_logprobs_num": 2, "return_text_in_logprobs": True, "logprob_start_len": 1}
    one = gateway.post("/generate", input_ids=[5, 6, 7], **scored).json()
    meta = one["meta_info"]
    assert (one["text"], one["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
    assert [(value, token) for value, token, _ in meta["input_token_logprobs"]] == [(-0.5, 6), (-0.5, 7)]
    assert [len(top) for top in meta["input_top_logprobs"]] == [2, 2]
    assert isinstance(meta["input_token_logprobs"][0][2], str)
    whole = gateway.post("/generate", input_ids=[5, 6, 7], **asked, logprob_start_len=0).json()
    assert whole["meta_info"]["input_token_logprobs"][0] == [None, 5, None]
    unscored = gateway.post("/generate", input_ids=[5, 6, 7], **asked, logprob_start_len=-1).json()
    assert unscored["meta_info"]["input_token_logprobs"] == []
    several = gateway.post("/generate", input_ids=[[5, 6], [5, 6, 7, 8]], **scored).json()
    counts = [
        (item["meta_info"]["prompt_tokens"], len(item["meta_info"]["input_token_logprobs"]))
        for item in several
    ]
    assert counts == [(2, 1), (4, 3)]
    with_output = asked | {"sampling_params": {"max_new_tokens": 3, "temperature": 0, "n": 2}}
    both = gateway.post("/generate", input_ids=[5, 6, 7], **with_output, logprob_start_len=0).json()
    lengths = [
        (len(item["meta_info"]["input_token_logprobs"]), len(item["meta_info"]["output_token_logprobs"]))
        for item in both
    ]
    assert lengths == [(3, 3), (3, 3)]
    streamed = {"input_ids": [5, 6, 7], "stream": True, "return_logprob": True, "logprob_start_len": 1}
    *_, last, _ = events(gateway.post("/generate", **streamed))
    assert len(last["meta_info"]["input_token_logprobs"]) == 2
    refused = gateway.post("/generate", **streamed, top_logprobs_num=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_start_len")
    bench = gateway.post("/generate", text="x", stream=True, return_logprob=False, logprob_start_len=-1)
    assert events(bench)[-1] == "[DONE]"


def test_sglangs_facts(gateway: AgentGateway) -> None:
    """Model, server and load, each under its older and newer path; embeddings of one text and of several."""
    found = {}
    for path in ("get_model_info", "model_info", "get_server_info", "server_info", "get_load"):
        found[path] = httpx.get(f"{gateway.url}/{path}", timeout=60).json()
    assert found["model_info"] == found["get_model_info"]
    assert (found["model_info"]["is_generation"], found["model_info"]["model_type"]) == (True, "qwen3_moe")
    server = found["server_info"]
    assert (server["served_model_name"], server["context_length"], server["status"]) == (MODEL, 4096, "ready")
    assert server["internal_states"][0]["effective_max_running_requests_per_dp"] == 4
    assert found["get_load"][0]["num_reqs"] >= found["get_load"][0]["num_waiting_reqs"]
    one = gateway.post("/encode", text="The fox").json()
    several = gateway.post("/encode", text=["The fox", "A dog"]).json()
    assert (one["embedding"], one["meta_info"]["prompt_tokens"] > 0) == (several[0]["embedding"], True)
    assert len(several) == 2


def test_sglangs_calls_about_the_server(gateway: AgentGateway) -> None:
    """A request is aborted by its client's id for it; the cache is dropped; a probe makes one token."""
    gateway.post("/generate", text="x", rid="mine", sampling_params={"max_new_tokens": 1})
    sent = gateway.engine.seen.requests[0].request_id
    assert (sent.endswith(":mine"), sent != "mine") == (True, True)
    assert gateway.post("/abort_request", rid="mine").status_code == 200
    assert gateway.engine.seen.aborted == [sent]
    assert gateway.post("/abort_request", abort_all=True).status_code == 400
    assert gateway.post("/flush_cache").json() == {"success": True, "freed_tokens": 16}
    assert httpx.get(f"{gateway.url}/flush_cache", timeout=60).json()["success"] is True
    assert httpx.post(f"{gateway.url}/reset_prefix_cache", timeout=60).status_code == 200  # vLLM's
    assert httpx.get(f"{gateway.url}/health_generate").status_code == 200
    assert gateway.engine.seen.requests[-1].sampling_params.max_tokens == 1
    gateway.engine.script = Script(error_message="broken")
    assert httpx.get(f"{gateway.url}/health_generate").status_code == 503


def test_anthropics_client_lists_models(gateway: AgentGateway) -> None:
    """Its own shapes on the path that OpenAI's API has, too: models, and errors."""
    client = anthropic.Anthropic(base_url=gateway.url, api_key="none")
    assert [(model.id, model.type) for model in client.models.list()] == [(MODEL, "model")]
    assert client.models.retrieve(MODEL).display_name == MODEL
    with pytest.raises(anthropic.NotFoundError) as raised:
        client.models.retrieve("other")
    assert raised.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": raised.value.body["error"]["message"]},  # type: ignore[index]
        "request_id": raised.value.body["request_id"],  # type: ignore[index]
    }
    assert httpx.get(f"{gateway.url}/v1/models").json()["object"] == "list"
