"""The answers of embeddings, scores and rankings, made from pooled hidden states.

An embedding is a prompt's pooled hidden state, of length 1 unless asked otherwise; the score of two texts is
the cosine of their embeddings. Prompt processes do without this module and the library that it needs.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.apis.embeddings import PooledReply, Shape
from gateway.apis.formats import Output, ResponseFormat, Usage
from gateway.generation.job import PromptJob
from gateway.parsers.events import ParsedDelta
from gateway.schemas.errors import ApiError

Vectors = npt.NDArray[np.float64]  # [N, D]
_NANOSECONDS = 1_000_000_000


def vectors_of(states: Sequence[Sequence[float]], reply: PooledReply) -> Vectors:
    """Returns embeddings [N, D] from pooled hidden states: their first values, normalised if asked for."""
    vectors: Vectors = np.asarray(states, np.float64)[:, : reply.dimensions]
    if reply.is_normalized:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors


def similarities(vectors: Vectors, num_first: int) -> list[float]:
    """Returns the cosines of the first vectors with all others: of one with each, or of pairs."""
    found: list[float] = (vectors[:num_first] * vectors[num_first:]).sum(1).tolist()
    return found


def encoded_vector(vector: Vectors, encoding: str) -> list[float] | str:
    """Returns an embedding [D] as JSON has it: numbers, or base64 of little-endian float32."""
    single = vector.astype("<f4")
    return base64.b64encode(single.tobytes()).decode() if encoding == "base64" else single.tolist()


def _openai(vectors: Vectors, reply: PooledReply, usage: Usage) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": encoded_vector(vector, reply.encodings[0])}
        for index, vector in enumerate(vectors)
    ]
    return {"object": "list", "data": data, "model": reply.model, "usage": _usage(usage)}


def _ollama(vectors: Vectors, reply: PooledReply, usage: Usage) -> dict[str, Any]:
    return {
        "model": reply.model,
        "embeddings": [encoded_vector(vector, "float") for vector in vectors],
        "total_duration": int(usage.total_s * _NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
    }


def _ollama_prompt(vectors: Vectors, reply: PooledReply, usage: Usage) -> dict[str, Any]:
    return {"embedding": encoded_vector(vectors[0], "float")}


def _llama(vectors: Vectors, reply: PooledReply, usage: Usage) -> list[dict[str, Any]]:
    # A list of vectors for each input, since llama-server may give one for each token.
    return [
        {"index": index, "embedding": [encoded_vector(vector, "float")]}
        for index, vector in enumerate(vectors)
    ]


def _sglang(vectors: Vectors, reply: PooledReply, usage: Usage) -> list[dict[str, Any]]:
    return [
        {"embedding": encoded_vector(vector, "float"), "meta_info": {"id": uuid.uuid4().hex}}
        for vector in vectors
    ]


def _sglang_one(vectors: Vectors, reply: PooledReply, usage: Usage) -> dict[str, Any]:
    only = _sglang(vectors, reply, usage)[0]
    return {**only, "meta_info": {**only["meta_info"], "prompt_tokens": usage.prompt_tokens}}


def _cohere(vectors: Vectors, reply: PooledReply, usage: Usage) -> dict[str, Any]:
    by_type = {kind: [encoded_vector(vector, kind) for vector in vectors] for kind in reply.encodings}
    is_plain = reply.shape == "cohere" and reply.encodings == ("float",)
    return {
        "id": str(uuid.uuid4()),
        "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
        "embeddings": by_type["float"] if is_plain else by_type,
        "texts": list(reply.texts),
        "meta": _meta(reply, usage),
    }


def _score(vectors: Vectors, reply: PooledReply, usage: Usage) -> dict[str, Any]:
    found = similarities(vectors, reply.num_first)
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": reply.model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(found)],
        "usage": _usage(usage),
    }


def _rerank(vectors: Vectors, reply: PooledReply, usage: Usage) -> dict[str, Any]:
    found = similarities(vectors, reply.num_first)
    order = sorted(range(len(found)), key=lambda index: -found[index])[: reply.top_n]
    results = [
        {"index": index, "relevance_score": found[index]}
        | ({"document": {"text": reply.texts[index]}} if reply.texts else {})
        for index in order
    ]
    head = {"id": f"rerank-{uuid.uuid4().hex}", "results": results}
    if reply.shape == "rerank_v2":
        return {**head, "meta": _meta(reply, usage)}
    return {**head, "model": reply.model, "usage": _usage(usage)}


def _usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}


def _meta(reply: PooledReply, usage: Usage) -> dict[str, Any]:
    version = "2" if reply.shape.endswith("_v2") else "1"
    return {"api_version": {"version": version}, "billed_units": {"input_tokens": usage.prompt_tokens}}


_SHAPES: Mapping[Shape, Callable[[Vectors, PooledReply, Usage], dict[str, Any] | list[dict[str, Any]]]] = {
    "openai": _openai,
    "ollama": _ollama,
    "ollama_prompt": _ollama_prompt,
    "llama": _llama,
    "sglang": _sglang,
    "sglang_one": _sglang_one,
    "cohere": _cohere,
    "cohere_v2": _cohere,
    "score": _score,
    "rerank": _rerank,
    "rerank_v2": _rerank,
}


class PooledFormat(ResponseFormat):
    """Builds an answer from the jobs' pooled hidden states; never a stream."""

    operation = "embeddings"

    def __init__(self, jobs: Sequence[PromptJob], reply: PooledReply) -> None:
        """`jobs`: of all prompts, in their order."""
        self.id = f"embd-{uuid.uuid4().hex}"
        self._jobs = jobs
        self._reply = reply

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any] | list[dict[str, Any]]:
        states = [job.pooled_states for job in self._jobs]
        if not all(states):
            raise ApiError(502, "the engine returned no hidden states", code="engine_error")
        return _SHAPES[self._reply.shape](vectors_of(states, self._reply), self._reply, usage)

    def stream_delta(self, delta: ParsedDelta, usage: Callable[[], Usage]) -> bytes:
        raise AssertionError("embeddings are not streamed")

    def stream_end(self, usage: Usage) -> bytes:
        raise AssertionError("embeddings are not streamed")

    def stream_failure(self, error: ApiError) -> bytes:
        raise AssertionError("embeddings are not streamed")
