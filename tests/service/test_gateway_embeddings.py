"""Guards what clients of embeddings, scores and rankings see, in the shapes of five APIs."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from protos import engine_pb2 as pb
from tests.helpers.agent_gateway import AgentGateway
from tests.helpers.fake_engine import HIDDEN, MODEL, pooled_states

TEXTS = ["The lazy dog", "runs over the hill", "東京"]


def unit(values: Any) -> np.ndarray:
    """Returns vectors of length 1."""
    vectors = np.atleast_2d(np.asarray(values, np.float64))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def expected(gateway: AgentGateway, pooling: int = pb.POOLING_LAST, dimensions: int = HIDDEN) -> np.ndarray:
    """Returns the embeddings of the prompts that have reached the engine, in the order of their ids."""
    prompts = sorted(tuple(sent.tokenized.input_ids) for sent in gateway.engine.seen.requests)
    assert {sent.sampling_params.pooling for sent in gateway.engine.seen.requests} == {pooling}
    return unit([pooled_states(prompt, pooling)[:dimensions] for prompt in prompts])


def rows(vectors: np.ndarray) -> list[tuple[float, ...]]:
    """Returns rows that can be compared whatever their order."""
    return sorted(tuple(round(float(value), 5) for value in row) for row in vectors)


def test_openais_client_gets_embeddings(gateway: AgentGateway) -> None:
    """One text, several, or ids; as numbers or base64, which the client decodes itself; in their order."""
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none")
    found = client.embeddings.create(model=MODEL, input=TEXTS)
    assert [item.index for item in found.data] == [0, 1, 2]
    assert rows(np.array([item.embedding for item in found.data])) == rows(expected(gateway))
    assert found.usage.prompt_tokens == found.usage.total_tokens > 0
    single = client.embeddings.create(model=MODEL, input=TEXTS[1], encoding_format="float")
    assert np.allclose(single.data[0].embedding, found.data[1].embedding, atol=1e-6)
    ids = client.embeddings.create(model=MODEL, input=[[5, 6, 7], [9]], encoding_format="float")
    wanted = unit([pooled_states([5, 6, 7], pb.POOLING_LAST), pooled_states([9], pb.POOLING_LAST)])
    assert np.allclose([item.embedding for item in ids.data], wanted, atol=1e-6)
    nulls = dict.fromkeys(("encoding_format", "dimensions", "pooling", "normalize", "priority"))
    unset = gateway.post("/v1/embeddings", input=[5, 6, 7], **nulls).json()
    assert np.allclose(unset["data"][0]["embedding"], wanted[0], atol=1e-6)
    assert "'input'" in gateway.post("/v1/embeddings", input=None).json()["error"]["message"]
    raw = gateway.post("/v1/embeddings", input=[5, 6, 7], encoding_format="base64").json()
    decoded = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    assert np.allclose(decoded, wanted[0], atol=1e-6)


def test_pooling_dimensions_and_norm_are_chosen(gateway: AgentGateway) -> None:
    """The mean of all tokens; the first values, normalised again; or values as the model has them."""
    mean = gateway.post("/v1/embeddings", input=[5, 6, 7], pooling="mean", dimensions=3).json()
    wanted = pooled_states([5, 6, 7], pb.POOLING_MEAN)
    assert np.allclose(mean["data"][0]["embedding"], unit(wanted[:3])[0], atol=1e-6)
    plain = gateway.post("/v1/embeddings", input=[5, 6, 7], pooling="mean", normalize=False).json()
    assert np.allclose(plain["data"][0]["embedding"], wanted, atol=1e-6)
    many = gateway.post("/v1/embeddings", input=[[number] for number in range(1, 301)]).json()
    assert [item["index"] for item in many["data"]] == list(range(300))
    last = pooled_states([300], pb.POOLING_LAST)
    assert np.allclose(many["data"][299]["embedding"], unit(last)[0], atol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "'input' gives no tokens"),
        (
            "/v1/embeddings",
            {"input": "x", "dimensions": 9},
            "'dimensions' is 9; the model's embeddings have 8",
        ),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "pooling": "cls"}, "pooling"),
        ("/v1/embeddings", {"input": [7] * 9000}, "maximum context length"),
        ("/v1/embeddings", {"input": [99999]}, "out of vocabulary"),
        ("/v1/embeddings", {"model": "other", "input": "x"}, "does not exist"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "'text_1' has 2 texts and 'text_2' 1"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
    ],
)
def test_what_cannot_be_embedded_is_named(
    gateway: AgentGateway, path: str, body: dict[str, Any], said: str
) -> None:
    """One line with the parameter, and nothing reaches the engine."""
    answer = gateway.post(path, **body)
    assert answer.status_code in (400, 404), answer.text
    assert said in answer.json()["error"]["message"]
    assert not gateway.engine.seen.requests


def test_scores_and_rankings_are_cosines(gateway: AgentGateway) -> None:
    """One text with others or pairs; documents in the order of their scores, as many as are asked for."""
    query, *documents = vectors = unit([item["embedding"] for item in embeddings(gateway, TEXTS)])
    cosines = [float(query @ document) for document in documents]
    scored = gateway.post("/v1/score", text_1=TEXTS[0], text_2=TEXTS[1:]).json()
    assert np.allclose([item["score"] for item in scored["data"]], cosines, atol=1e-5)
    pairs = gateway.post("/score", queries=TEXTS, documents=TEXTS).json()
    assert np.allclose([item["score"] for item in pairs["data"]], 1, atol=1e-5)
    order = sorted(range(2), key=lambda index: -cosines[index])
    ranked = gateway.post("/v1/rerank", query=TEXTS[0], documents=[TEXTS[1], {"text": TEXTS[2]}]).json()
    assert [item["index"] for item in ranked["results"]] == order
    assert [item["document"]["text"] for item in ranked["results"]] == [TEXTS[1 + at] for at in order]
    assert np.allclose(
        [item["relevance_score"] for item in ranked["results"]], sorted(cosines)[::-1], atol=1e-5
    )
    cohere = gateway.post("/v2/rerank", query=TEXTS[0], documents=TEXTS[1:], top_n=1).json()
    assert [(item["index"], "document" in item) for item in cohere["results"]] == [(order[0], False)]
    assert cohere["meta"]["billed_units"]["input_tokens"] > 0
    assert len(vectors) == 3


def embeddings(gateway: AgentGateway, texts: list[str]) -> list[dict[str, Any]]:
    """Returns OpenAI's embeddings of texts."""
    data: list[dict[str, Any]] = gateway.post("/v1/embeddings", input=texts).json()["data"]
    return data


def test_ollama_and_cohere_have_their_shapes(gateway: AgentGateway) -> None:
    """The same vectors as OpenAI's, where their clients look for them."""
    wanted = [item["embedding"] for item in embeddings(gateway, TEXTS)]
    ollama = gateway.post("/api/embed", model=f"{MODEL}:latest", input=TEXTS).json()
    assert np.allclose(ollama["embeddings"], wanted, atol=1e-6)
    assert ollama["prompt_eval_count"] > 0
    assert gateway.post("/api/embed", model=MODEL).json()["embeddings"] == []
    earlier = gateway.post("/api/embeddings", model=MODEL, prompt=TEXTS[0]).json()["embedding"]
    assert np.allclose(unit(earlier)[0], wanted[0], atol=1e-6)
    assert abs(np.linalg.norm(earlier) - 1) > 1e-3
    cohere = gateway.post("/v2/embed", texts=TEXTS, input_type="search_document", embedding_types=["float"])
    assert np.allclose(cohere.json()["embeddings"]["float"], wanted, atol=1e-6)
    assert np.allclose(gateway.post("/v1/embed", texts=TEXTS).json()["embeddings"], wanted, atol=1e-6)
    long = gateway.post("/api/embed", model=MODEL, input="over the hill " * 9000)
    assert long.json()["prompt_eval_count"] < 9000
    assert (
        "maximum context"
        in gateway.post("/api/embed", model=MODEL, input="over the hill " * 9000, truncate=False).json()[
            "error"
        ]
    )


def test_coheres_inputs_tokens_and_key(gateway: AgentGateway) -> None:
    """Inputs of parts are their texts; tokens have their strings; a key that is let in is right."""
    parts = [{"content": [{"type": "text", "text": "The lazy"}, {"type": "text", "text": " dog"}]}]
    found = gateway.post("/v2/embed", model=MODEL, inputs=parts, input_type="search_query").json()
    plain = gateway.post("/v2/embed", model=MODEL, texts=["The lazy dog"]).json()
    assert (found["embeddings"], found["texts"]) == (plain["embeddings"], ["The lazy dog"])
    both = gateway.post("/v2/embed", model=MODEL, texts=["x"], inputs=parts)
    assert (both.status_code, "exactly one of 'texts' and 'inputs'" in both.text) == (400, True)
    picture = [{"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    assert gateway.post("/v2/embed", model=MODEL, inputs=picture).status_code == 400
    tokens = gateway.post("/v1/tokenize", model=MODEL, text="lazy dog").json()
    assert len(tokens["tokens"]) == len(tokens["token_strings"])
    assert "".join(tokens["token_strings"]) == "lazy dog"
    assert gateway.post("/v1/check-api-key").json() == {"valid": True}


def test_heads_are_answered_like_gets(gateway: AgentGateway) -> None:
    """Status and headers without a body, on every path that has GET."""
    for path, status in (("/v1/models", 200), ("/health", 200), ("/nowhere", 404), ("/v1/embeddings", 405)):
        answer = httpx.head(f"{gateway.url}{path}")
        assert (answer.status_code, answer.content) == (status, b""), path
    length = httpx.get(f"{gateway.url}/v1/models").headers["content-length"]
    assert httpx.head(f"{gateway.url}/v1/models").headers["content-length"] == length
