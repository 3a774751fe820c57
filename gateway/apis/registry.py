"""Maps each kind of request to its body's schema and its translation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from gateway.apis import messages, ollama, responses
from gateway.apis.messages_schema import CountTokensRequest, MessagesRequest
from gateway.apis.ollama_schema import OllamaChatRequest, OllamaGenerateRequest, OllamaModelRequest
from gateway.apis.responses_schema import ResponsesRequest
from gateway.apis.translation import Context, Translation
from gateway.prompts.contract import Kind

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
