"""Embeddings, scores and rankings: which prompts a body asks for, and the answer from their hidden states.

An embedding is a prompt's pooled hidden state, of length 1 unless asked otherwise; the score of two texts is
the cosine of their embeddings.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gateway.apis.formats import Output, ResponseFormat, Usage
from gateway.apis.ollama import served_name
from gateway.generation.job import PromptJob
from gateway.generation.model import ServedModel
from gateway.parsers.events import ParsedDelta
from gateway.schemas.embeddings import (
    CohereEmbedRequest,
    EmbeddingRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    PooledFields,
    PoolingName,
    RerankRequest,
    ScoreRequest,
)
from gateway.schemas.errors import ApiError, bad_request

Vectors = npt.NDArray[np.float64]  # [N, D]
Shape = Literal["openai", "ollama", "ollama_prompt", "cohere", "cohere_v2", "score", "rerank", "rerank_v2"]
_NANOSECONDS = 1_000_000_000
_COMMON = ("model", "truncate_prompt_tokens", "add_special_tokens", "priority", "cache_salt", "user")


@dataclass(frozen=True)
class PooledReply:
    """What an answer is made from besides hidden states; filled by the functions below."""

    shape: Shape
    model: str  # as the answer has it
    dimensions: int | None = None  # values that are kept; None: all
    is_normalized: bool = True
    encodings: tuple[str, ...] = ("float",)
    texts: tuple[str, ...] = ()  # that the answer repeats
    num_first: int = 0  # of scores and rankings: inputs that all others are compared with
    top_n: int | None = None


@dataclass(frozen=True)
class PooledPrompts:
    """The prompts that a body asks for; filled by the functions below."""

    inputs: Sequence[str | list[int]]
    param: str  # the body's name for them
    reply: PooledReply
    pooling: PoolingName = "last"
    fields: Mapping[str, Any] = field(default_factory=dict)  # of a text completion


def embedding(body: EmbeddingRequest, model: ServedModel) -> PooledPrompts:
    """Returns the prompts of OpenAI's embeddings. Raises ApiError 400 for more dimensions than there are."""
    given = body.input
    inputs: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
    _check_dimensions(body.dimensions, "dimensions", model)
    encodings = (body.encoding_format,)
    reply = PooledReply("openai", model.name, body.dimensions, body.normalize, encodings)
    return PooledPrompts(inputs, "input", reply, body.pooling, _fields(body))


def scores(body: ScoreRequest, model: ServedModel) -> PooledPrompts:
    """Returns the prompts of scores. Raises ApiError 400 for lists that make no pairs."""
    first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        raise bad_request(
            f"'text_1' has {len(first)} texts and 'text_2' {len(second)}; allowed: one, or as many", "text_1"
        )
    reply = PooledReply("score", model.name, num_first=len(first))
    return PooledPrompts([*first, *second], "text_2", reply, body.pooling, _fields(body))


def ranking(body: RerankRequest, model: ServedModel, shape: Shape = "rerank") -> PooledPrompts:
    """Returns the prompts of a ranking: the query, then the documents."""
    documents = tuple(item if isinstance(item, str) else item.text for item in body.documents)
    shown = body.return_documents if body.return_documents is not None else shape == "rerank"
    reply = PooledReply(shape, model.name, texts=documents if shown else (), num_first=1, top_n=body.top_n)
    fields = _fields(body)
    if body.max_tokens_per_doc is not None:
        fields |= {"truncate_prompt_tokens": body.max_tokens_per_doc, "truncation_side": "right"}
    return PooledPrompts([body.query, *documents], "documents", reply, body.pooling, fields)


def ollama_embedding(body: OllamaEmbedRequest, model: ServedModel) -> PooledPrompts:
    """Returns the prompts of Ollama's embeddings. Raises ApiError 400 for more dimensions than there are."""
    _check_dimensions(body.dimensions, "dimensions", model)
    inputs = [body.input] if isinstance(body.input, str) else body.input
    cut = {} if body.truncate is False else {"truncate_prompt_tokens": -1, "truncation_side": "right"}
    reply = PooledReply("ollama", body.model, body.dimensions)
    return PooledPrompts(inputs, "input", reply, fields={"model": served_name(body.model), **cut})


def ollama_prompt(body: OllamaEmbeddingRequest, model: ServedModel) -> PooledPrompts:
    """Returns the one prompt of Ollama's earlier embeddings."""
    reply = PooledReply("ollama_prompt", body.model, is_normalized=False)
    fields = {"model": served_name(body.model), "truncate_prompt_tokens": -1, "truncation_side": "right"}
    return PooledPrompts([body.prompt], "prompt", reply, fields=fields)


def cohere_embedding(body: CohereEmbedRequest, model: ServedModel, shape: Shape = "cohere") -> PooledPrompts:
    """Returns the prompts of Cohere's embeddings. Raises ApiError 400 for more dimensions than there are."""
    _check_dimensions(body.output_dimension, "output_dimension", model)
    cut = {"truncate_prompt_tokens": -1, "truncation_side": "left" if body.truncate == "START" else "right"}
    encodings: tuple[str, ...] = tuple(body.embedding_types or ("float",))
    reply = PooledReply(shape, model.name, body.output_dimension, True, encodings, tuple(body.texts))
    fields = _fields(body) | (cut if body.truncate != "NONE" else {})
    return PooledPrompts(body.texts, "texts", reply, body.pooling, fields)


def _fields(body: PooledFields) -> dict[str, Any]:
    return {name: value for name in _COMMON if (value := getattr(body, name)) is not None}


def _check_dimensions(wanted: int | None, param: str, model: ServedModel) -> None:
    if wanted is not None and model.hidden_size and wanted > model.hidden_size:
        raise bad_request(
            f"{param!r} is {wanted}; the model's embeddings have {model.hidden_size} values", param
        )


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


_SHAPES: Mapping[Shape, Callable[[Vectors, PooledReply, Usage], dict[str, Any]]] = {
    "openai": _openai,
    "ollama": _ollama,
    "ollama_prompt": _ollama_prompt,
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

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
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
