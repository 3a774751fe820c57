"""Embeddings, scores and rankings: which prompts a body asks for. `pooled.py` has the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.apis.ollama import served_name
from gateway.generation.model import ServedModel
from gateway.schemas.embeddings import (
    CohereEmbedRequest,
    EmbeddingRequest,
    LlamaEmbeddingRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    PooledFields,
    PoolingName,
    RerankRequest,
    ScoreRequest,
    SglangEncodeRequest,
)
from gateway.schemas.errors import bad_request

Shape = Literal[
    "openai",
    "ollama",
    "ollama_prompt",
    "llama",
    "sglang",
    "sglang_one",
    "cohere",
    "cohere_v2",
    "score",
    "rerank",
    "rerank_v2",
]
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
    inputs = _listed(body.input)
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


def llama_embedding(body: LlamaEmbeddingRequest, model: ServedModel) -> PooledPrompts:
    """Returns the prompts of llama-server's own embeddings."""
    reply = PooledReply("llama", model.name, is_normalized=body.embd_normalize != -1)
    return PooledPrompts(_listed(body.input), "content", reply, body.pooling, _fields(body))


def sglang_embedding(body: SglangEncodeRequest, model: ServedModel) -> PooledPrompts:
    """Returns the prompts of SGLang's own embeddings."""
    inputs = _listed(body.text)
    reply = PooledReply("sglang_one" if inputs == [body.text] else "sglang", model.name)
    return PooledPrompts(inputs, "text", reply, body.pooling, _fields(body))


def cohere_embedding(body: CohereEmbedRequest, model: ServedModel, shape: Shape = "cohere") -> PooledPrompts:
    """Returns the prompts of Cohere's embeddings. Raises ApiError 400 for more dimensions than there are."""
    _check_dimensions(body.output_dimension, "output_dimension", model)
    if (body.texts is None) == (body.inputs is None):
        raise bad_request("send exactly one of 'texts' and 'inputs'", "texts")
    texts = body.texts or ["".join(part.text for part in one.content) for one in body.inputs or ()]
    cut = {"truncate_prompt_tokens": -1, "truncation_side": "left" if body.truncate == "START" else "right"}
    encodings: tuple[str, ...] = tuple(body.embedding_types or ("float",))
    reply = PooledReply(shape, model.name, body.output_dimension, True, encodings, tuple(texts))
    fields = _fields(body) | (cut if body.truncate != "NONE" else {})
    return PooledPrompts(texts, "texts", reply, body.pooling, fields)


def _listed(given: Any) -> list[Any]:
    """Returns the inputs of a field that has one text, one list of token ids, or several of either."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


def _fields(body: PooledFields) -> dict[str, Any]:
    return {name: value for name in _COMMON if (value := getattr(body, name)) is not None}


def _check_dimensions(wanted: int | None, param: str, model: ServedModel) -> None:
    if wanted is not None and model.hidden_size and wanted > model.hidden_size:
        raise bad_request(
            f"{param!r} is {wanted}; the model's embeddings have {model.hidden_size} values", param
        )
