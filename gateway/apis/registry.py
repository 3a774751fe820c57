"""Maps each kind of request to its body's schema and its translation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel

from gateway.apis import messages, ollama, responses
from gateway.apis.translation import Context, Translation
from gateway.schemas.messages import CountTokensRequest, MessagesRequest
from gateway.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaModelRequest
from gateway.schemas.responses import ResponsesRequest

Kind = Literal[
    "chat",
    "completions",
    "invocations",
    "tokenize",
    "detokenize",
    "messages",
    "count_tokens",
    "responses",
    "ollama_chat",
    "ollama_generate",
    "ollama_show",
    "ollama_pull",
]
Translate = Callable[[Any, Context], Translation]

TRANSLATIONS: Mapping[Kind, tuple[type[BaseModel], Translate]] = {
    "messages": (MessagesRequest, messages.translate),
    "count_tokens": (CountTokensRequest, messages.translate),
    "responses": (ResponsesRequest, responses.translate),
    "ollama_chat": (OllamaChatRequest, ollama.translate_chat),
    "ollama_generate": (OllamaGenerateRequest, ollama.translate_generate),
    "ollama_show": (OllamaModelRequest, ollama.translate_show),
    "ollama_pull": (OllamaModelRequest, ollama.translate_pull),
}
