"""Maps each kind of request to its body's schema and its translation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel

from gateway.apis import batch_lines, cohere, compaction, embeddings, messages, native, ollama, responses
from gateway.apis.translation import Context, Translation
from gateway.generation.model import ServedModel
from gateway.schemas.batches import BatchRequest
from gateway.schemas.cohere import CohereChatRequest
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
from gateway.schemas.messages import CountTokensRequest, MessagesRequest
from gateway.schemas.native import InfillRequest, LlamaCompletionRequest, SglangGenerateRequest
from gateway.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaModelRequest
from gateway.schemas.responses import (
    CompactRequest,
    ConversationRequest,
    InputTokensRequest,
    ResponsesRequest,
)

Kind = Literal[
    "chat",
    "completions",
    "invocations",
    "tokenize",
    "detokenize",
    "apply_template",
    "messages",
    "count_tokens",
    "responses",
    "input_tokens",
    "cohere_chat",
    "ollama_chat",
    "ollama_generate",
    "ollama_show",
    "ollama_pull",
    "llama_completion",
    "llama_infill",
    "sglang_generate",
    "embeddings",
    "score",
    "rerank",
    "rerank_v2",
    "ollama_embed",
    "ollama_embedding",
    "llama_embedding",
    "sglang_encode",
    "cohere_embed",
    "cohere_embed_v2",
    "batch",
    "batch_lines",
    "message_batch",
    "compact",
    "conversation",
]
Translate = Callable[[Any, Context], Translation]

TRANSLATIONS: Mapping[Kind, tuple[type[BaseModel], Translate]] = {
    "messages": (MessagesRequest, messages.translate),
    "count_tokens": (CountTokensRequest, messages.translate),
    "responses": (ResponsesRequest, responses.translate),
    "input_tokens": (InputTokensRequest, responses.translate),
    "cohere_chat": (CohereChatRequest, cohere.translate),
    "ollama_chat": (OllamaChatRequest, ollama.translate_chat),
    "ollama_generate": (OllamaGenerateRequest, ollama.translate_generate),
    "ollama_show": (OllamaModelRequest, ollama.translate_show),
    "ollama_pull": (OllamaModelRequest, ollama.translate_pull),
    "llama_completion": (LlamaCompletionRequest, native.translate_completion),
    "llama_infill": (InfillRequest, native.translate_infill),
    "sglang_generate": (SglangGenerateRequest, native.translate_generate),
    "batch": (BatchRequest, batch_lines.translate_batch),
    "compact": (CompactRequest, compaction.translate),
    "conversation": (ConversationRequest, responses.translate_items),
}

# Kinds that want the hidden states of prompts, not text.
POOLED: Mapping[Kind, tuple[type[BaseModel], Callable[[Any, ServedModel], embeddings.PooledPrompts]]] = {
    "embeddings": (EmbeddingRequest, embeddings.embedding),
    "score": (ScoreRequest, embeddings.scores),
    "rerank": (RerankRequest, embeddings.ranking),
    "rerank_v2": (RerankRequest, partial(embeddings.ranking, shape="rerank_v2")),
    "ollama_embed": (OllamaEmbedRequest, embeddings.ollama_embedding),
    "ollama_embedding": (OllamaEmbeddingRequest, embeddings.ollama_prompt),
    "llama_embedding": (LlamaEmbeddingRequest, embeddings.llama_embedding),
    "sglang_encode": (SglangEncodeRequest, embeddings.sglang_embedding),
    "cohere_embed": (CohereEmbedRequest, embeddings.cohere_embedding),
    "cohere_embed_v2": (CohereEmbedRequest, partial(embeddings.cohere_embedding, shape="cohere_v2")),
}
