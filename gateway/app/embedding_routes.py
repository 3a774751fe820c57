"""HTTP routes of embeddings, scores and rankings, in the shapes of several APIs."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gateway.apis.registry import Kind
from gateway.app.openapi import refuses, takes
from gateway.app.serving import respond
from gateway.app.state import gateway_of
from gateway.schemas.embeddings import (
    CohereEmbedRequest,
    EmbeddingRequest,
    LlamaEmbeddingRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    RerankRequest,
    ScoreRequest,
    SglangEncodeRequest,
)

router = APIRouter()


async def _pooled(request: Request, kind: Kind) -> Response:
    gateway = gateway_of(request)
    prepared = await gateway.prepare(request, kind)
    if isinstance(prepared, bytes):  # there is no text
        return Response(prepared, media_type="application/json")
    gateway.metrics.ignored(prepared.ignored)
    # It needs numpy, which takes a twelfth of a gateway's imports and starts threads.
    from gateway.apis.pooled import PooledFormat

    return await respond(request, prepared, PooledFormat(prepared.jobs, prepared.reply))


@router.post("/v1/embeddings", **takes(EmbeddingRequest))
async def create_embedding(request: Request) -> Response:
    """Answers OpenAI's embeddings: the pooled hidden states of texts."""
    return await _pooled(request, "embeddings")


@router.post("/score", **takes(ScoreRequest))
@router.post("/v1/score", **takes(ScoreRequest))
async def create_score(request: Request) -> Response:
    """Scores one text with others, or pairs of texts, by the cosine of their embeddings."""
    return await _pooled(request, "score")


@router.post("/rerank", **takes(RerankRequest))
@router.post("/v1/rerank", **takes(RerankRequest))
@router.post("/reranking", **takes(RerankRequest))
@router.post("/v1/reranking", **takes(RerankRequest))
async def rerank(request: Request) -> Response:
    """Orders documents by their score with a query."""
    return await _pooled(request, "rerank")


@router.post("/v2/rerank", **takes(RerankRequest))
async def rerank_v2(request: Request) -> Response:
    """Orders documents by their score with a query, in the shape of Cohere's second version."""
    return await _pooled(request, "rerank_v2")


@router.post("/embedding", **takes(LlamaEmbeddingRequest))
@router.post("/embeddings", **takes(LlamaEmbeddingRequest))
async def llama_embedding(request: Request) -> Response:
    """Answers llama-server's own embeddings: a list with a list of one embedding for each text."""
    return await _pooled(request, "llama_embedding")


@router.post("/encode", **takes(SglangEncodeRequest))
async def sglang_encode(request: Request) -> Response:
    """Answers SGLang's own embeddings: an object for one text, a list for several."""
    return await _pooled(request, "sglang_encode")


@router.post("/v1/embed", **takes(CohereEmbedRequest))
async def cohere_embed(request: Request) -> Response:
    """Answers Cohere's embeddings."""
    return await _pooled(request, "cohere_embed")


@router.post("/v2/embed", **takes(CohereEmbedRequest))
async def cohere_embed_v2(request: Request) -> Response:
    """Answers Cohere's embeddings in the shape of their second version."""
    return await _pooled(request, "cohere_embed_v2")


@router.post("/v1/check-api-key", **refuses(401))
async def check_api_key() -> dict[str, bool]:
    """Tells Cohere's clients that their key is right, since others are refused before."""
    return {"valid": True}


@router.post("/api/embed", **takes(OllamaEmbedRequest))
async def ollama_embed(request: Request) -> Response:
    """Answers Ollama's embeddings."""
    return await _pooled(request, "ollama_embed")


@router.post("/api/embeddings", **takes(OllamaEmbeddingRequest))
async def ollama_embedding(request: Request) -> Response:
    """Answers Ollama's earlier form of embeddings, of one text."""
    return await _pooled(request, "ollama_embedding")
