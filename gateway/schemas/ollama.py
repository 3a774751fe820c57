"""The bodies of Ollama's API: /api/chat, /api/generate, /api/show and /api/pull."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from gateway.schemas.common import MAX_LABEL_CHARACTERS, StrictModel
from gateway.schemas.native import LlamaSampling
from gateway.schemas.requests import MAX_MESSAGES, MAX_PARTS

Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)]
Images = Annotated[list[str], Field(max_length=MAX_PARTS, fail_fast=True)]
MAX_TOOLS = 1024


class CalledFunction(StrictModel):
    """A function that the model called."""

    place = "messages[].tool_calls[].function."
    name: Label
    arguments: dict[str, Any] | str = Field(default_factory=dict)
    index: int | None = None


class OllamaCall(StrictModel):
    """A tool call of an earlier answer."""

    place = "messages[].tool_calls[]."
    id: Label | None = None
    type: Any = None
    function: CalledFunction


class OllamaMessage(StrictModel):
    """One message of the conversation; `images` are base64."""

    place = "messages[]."
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: list[OllamaCall] | None = Field(None, max_length=MAX_PARTS, fail_fast=True)
    tool_name: Label | None = None
    tool_call_id: Label | None = None


class Options(LlamaSampling):
    """Sampling options; those about memory and threads have no effect."""

    place = "options."
    num_predict: int | None = Field(
        None, ge=-2, le=2**31, description="Most output tokens; below 1: no limit"
    )
    num_ctx: Any = Field(None, description="No effect: the context is the model's")


class OllamaRequest(StrictModel):
    """The fields that both ways to generate share."""

    model: Label = Field(description="Name as in /api/tags; :latest may follow it")
    format: str | dict[str, Any] | None = Field(None, description="json, or a JSON schema")
    options: Options | None = None
    stream: bool | None = Field(None, description="Unset: true")
    think: bool | str | None = Field(None, description="Whether the model thinks, or how much")
    keep_alive: float | str | None = Field(
        None, description="How long the model stays loaded, where sleep_after_s is set; negative: for ever"
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncate: Any = Field(None, description="No effect: too long prompts are refused")
    shift: Any = Field(None, description="No effect")


class OllamaChatRequest(OllamaRequest):
    """A request for the next message; without messages it only checks that the model is there."""

    messages: list[OllamaMessage] = Field(default_factory=list, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)


class OllamaGenerateRequest(OllamaRequest):
    """A request that continues a prompt, with the chat template unless it is raw or has a suffix."""

    prompt: str = ""
    suffix: str | None = None
    images: Images | None = None
    system: str | None = None
    template: str | None = Field(None, description="Only unset: the template is the model's")
    context: Any = Field(None, description="No effect: send the conversation to /api/chat")
    raw: bool | None = None


class OllamaModelRequest(StrictModel):
    """A request that names the model."""

    model: Label = Field(validation_alias=AliasChoices("model", "name"))
    verbose: Any = None
    insecure: Any = None
    stream: bool | None = None
