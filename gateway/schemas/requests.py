"""The bodies of POST /v1/chat/completions, /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from gateway.schemas.common import (
    MAX_LABEL_CHARACTERS,
    GenerationFields,
    JsonError,
    StrictModel,
    TokenId,
    parse_json,
    tolerance_of,
)
from gateway.schemas.errors import param_error, shown
from gateway.schemas.structured import StructuredFields
from gateway.schemas.tools import ToolFields
from moebius.config.request_limits import MAX_LOGPROBS, MAX_OUTPUTS

MAX_MESSAGES = 16_384
MAX_PARTS = 16_384  # of one message
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Roles for templates that use other names: `ipython`, `observation`, `context`; no text like a control token.
_ROLE = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"


class CallArguments(dict[str, Any]):
    """A call's arguments in the history: a mapping for templates that read it, JSON for those that
    concatenate it with text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, before: str) -> str:
        return before + str(self)

    def __add__(self, after: str) -> str:
        return str(self) + after


def _parse_arguments(arguments: Any) -> Any:
    """Returns arguments sent as text as a mapping, which chat templates read.

    Text that is no JSON object, as models write it and clients return it, stays text.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        value = parse_json(arguments or "{}")
    except JsonError:
        return arguments
    return value if isinstance(value, dict) else arguments


class ImageUrl(StrictModel):
    """The URL of an image; `detail` "low" bounds its pixels, others leave them to the checkpoint."""

    place = "messages[].content[].image_url."
    url: str
    detail: Literal["auto", "high", "low"] | None = None


class ContentPart(StrictModel):
    """One part of a message's content: text or an image."""

    place = "messages[].content[]."
    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = [name for name in ("text", "image_url") if getattr(self, name) is not None]
        if given != [self.type]:
            raise param_error(
                "messages", f"a part of type {self.type!r} needs {self.type!r} and nothing else"
            )
        return self

    def for_template(self) -> dict[str, str]:
        """Returns the part as chat templates read it."""
        return {"type": "image"} if self.text is None else {"type": "text", "text": self.text}


Arguments = Annotated[
    dict[str, Any] | str, BeforeValidator(_parse_arguments, json_schema_input_type=str | dict[str, Any])
]


class FunctionCall(StrictModel):
    """A function call of an assistant message in the history; `arguments` is a JSON object as text."""

    place = "messages[].tool_calls[].function."
    name: str
    arguments: Arguments


class ToolCall(StrictModel):
    """A tool call in the history, passed to the chat template."""

    place = "messages[].tool_calls[]."
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


Parts = Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class ChatMessage(StrictModel):
    """One message of the conversation."""

    place = "messages[]."
    role: str = Field(
        pattern=_ROLE,
        description="system, user, assistant, tool, function, or another that the chat template knows",
    )
    content: str | Parts | None = None
    name: str | None = None
    reasoning_content: str | None = Field(None, description="Also as `reasoning`: two servers' names")
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_PARTS, fail_fast=True)
    tool_call_id: str | None = None
    function_call: FunctionCall | None = Field(None, description="As tool_calls, before there were any")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        """Drops nulls: clients return answers as history with unused fields (`refusal`, `audio`) null."""
        if not isinstance(data, dict):
            return data
        kept = {key: value for key, value in data.items() if value is not None or key in cls.model_fields}
        if "reasoning" in kept:  # two servers' names of one field; answers here have both
            reasoning = kept.pop("reasoning")
            if kept.get("reasoning_content") is None:
                kept["reasoning_content"] = reasoning
        return kept

    @field_validator("role", mode="after")
    @classmethod
    def _check_role(cls, role: str, info: ValidationInfo) -> str:
        if role not in ROLES and tolerance_of(info).strict:
            raise param_error("messages", f"{shown(role)} is no role: {', '.join(sorted(ROLES))} are")
        return role

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        says = self.tool_calls or self.function_call or self.reasoning_content
        if self.content is None and not (self.role == "assistant" and says):
            if self.role != "assistant" or "content" not in self.model_fields_set:
                raise param_error("messages", f"a message of role {self.role!r} needs 'content'")
            self.content = ""  # an empty answer, returned as some servers send it
        return self

    def texts(self) -> list[str]:
        """Returns the texts of the content."""
        parts = self.content if isinstance(self.content, list) else []
        return [self.content] if isinstance(self.content, str) else [part.text or "" for part in parts]

    def image_urls(self) -> list[tuple[int, ImageUrl]]:
        """Returns the index and the URL of each image part of the content."""
        parts = self.content if isinstance(self.content, list) else []
        return [(i, part.image_url) for i, part in enumerate(parts) if part.image_url is not None]

    def for_template(self) -> dict[str, Any]:
        """Returns the message as chat templates read it, unset fields left out.

        Text parts are joined by newlines; with images among them, templates get the parts.
        """
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list) and self.image_urls():
            message["content"] = [part.for_template() for part in self.content]
        elif isinstance(self.content, list):
            message["content"] = "\n".join(part.text or "" for part in self.content)
        message.setdefault("content", "")
        if self.role == "function":  # the predecessor of tools
            message["role"] = "tool"
            message.setdefault("tool_call_id", f"call_{self.name}")
        if self.function_call is not None:
            call = {"type": "function", "function": message.pop("function_call")}
            message["tool_calls"] = [{"id": f"call_{self.function_call.name}", **call}]
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if isinstance(arguments, dict):
                call["function"]["arguments"] = CallArguments(arguments)
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatCompletionRequest(ToolFields, StructuredFields, GenerationFields):
    """A conversation to answer."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = Field(
        False, description="Begin the text with the final message, if it is the assistant's or is continued"
    )
    add_special_tokens: bool = Field(
        False, description="Begin the prompt with the model's BOS, if the chat template does not"
    )
    documents: list[dict[str, Any]] | None = Field(
        None, max_length=MAX_PARTS, description="Passed to the chat template"
    )
    add_generation_prompt: bool | None = Field(None, description="Unset: true unless a message is continued")
    continue_final_message: bool = False
    parse_special: bool = Field(
        False, description="Control tokens spelled in messages are control tokens; false: they are text"
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise param_error("top_logprobs", "'top_logprobs' needs 'logprobs' to be true")
        if self.logprob_token_ids and not self.logprobs:
            raise param_error("logprob_token_ids", "'logprob_token_ids' needs 'logprobs' to be true")
        if self.continue_final_message and self.add_generation_prompt:
            raise param_error(
                "continue_final_message", "'continue_final_message' excludes 'add_generation_prompt'"
            )
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise param_error("max_tokens", "'max_tokens' and 'max_completion_tokens' disagree: send one")
        return self

    def echoed(self) -> str | None:
        """Returns the text that outputs begin with, or None if nothing is echoed."""
        last = self.messages[-1]
        if not self.echo or (last.role != "assistant" and self.opens_turn()):
            return None
        return str(last.for_template()["content"]) if not last.image_urls() else None

    def opens_turn(self) -> bool:
        """Returns whether the prompt ends with the opening of an assistant turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def token_limit(self) -> tuple[str, int | None]:
        """Returns the parameter that bounds the output, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


MAX_PROMPTS = 256
_FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def _is_token_list(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


class CompletionRequest(StructuredFields, GenerationFields):
    """One or more prompts to continue."""

    prompt: list[str | list[int]] = Field(description=f"{_FORMS}; normalised to a list of prompts")
    max_tokens: int | None = Field(16, ge=0, le=2**31, description="0 only with `echo`")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Alternatives per token")
    echo: bool | None = Field(None, description="Begin the text with the prompt")
    suffix: str | None = Field(
        None, description="Text after the output; for models with tokens to fill in the middle"
    )
    best_of: int | None = Field(
        None, ge=1, le=MAX_OUTPUTS, description="Outputs, of which the 'n' likeliest per token are returned"
    )
    add_special_tokens: bool = Field(
        True, description="Begin text prompts with the model's BOS, if it has one"
    )
    parse_special: bool = Field(
        True, description="Control tokens spelled in text prompts are control tokens; false: they are text"
    )

    @field_validator(
        "prompt", mode="before", json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    )
    @classmethod
    def _normalise_prompt(cls, prompt: Any) -> Any:
        """Returns a list of prompts for one prompt or many, as text or ids."""
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise param_error("prompt", f"'prompt' must be {_FORMS}, and not empty")
        prompts = [prompt] if _is_token_list(prompt) else prompt
        if not (all(isinstance(item, str) for item in prompts) or all(map(_is_token_list, prompts))):
            raise param_error("prompt", f"'prompt' must be {_FORMS}")
        if len(prompts) > MAX_PROMPTS:
            raise param_error("prompt", f"at most {MAX_PROMPTS} prompts per request, got {len(prompts)}")
        return prompts

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise param_error("max_tokens", "'max_tokens' may be 0 only together with 'echo'")
        if self.logprob_token_ids and (self.logprobs is None or self.echo):
            raise param_error(
                "logprob_token_ids", "'logprob_token_ids' needs 'logprobs' to be set, and excludes 'echo'"
            )
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise param_error("best_of", f"'best_of' must be at least 'n' ({self.n or 1})")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise param_error("best_of", "'best_of' above 'n' is not available when 'stream' is true")
        return self

    def token_limit(self) -> tuple[str, int | None]:
        """Returns the parameter that bounds the output, and its value; null means the API's default."""
        return "max_tokens", 16 if self.max_tokens is None else self.max_tokens


MAX_TOKENS = 2**20  # in one request to turn into text


class TokenizeRequest(StrictModel):
    """Text or a conversation to count or tokenise; exactly one of `prompt` and `messages`.

    With `messages`, `tools` and the other fields of chat requests that are part of the prompt count.
    """

    # The fields shared with chat requests.
    CONVERSATION: ClassVar[tuple[str, ...]] = (
        *("messages", "tools", "tool_choice", "documents", "chat_template_kwargs", "reasoning_effort"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "parse_special"),
    )

    model: str | None = Field(None, max_length=MAX_LABEL_CHARACTERS)
    prompt: str | None = None
    content: str | None = Field(None, description="As `prompt`, in llama-server's API")
    text: str | None = Field(None, description="As `content`, in Cohere's API")
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None,
        validation_alias=AliasChoices("add_special_tokens", "add_special"),
        description="Unset: true for `prompt`, false for `content`, `text` and `messages`",
    )
    tools: list[dict[str, Any]] | None = Field(None, description="As in chat requests")
    tool_choice: str | dict[str, Any] | None = Field(None, description="As in chat requests")
    documents: list[dict[str, Any]] | None = Field(None, description="As in chat requests")
    reasoning_effort: str | None = Field(None, description="As in chat requests")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="As in chat requests")
    add_generation_prompt: bool | None = Field(None, description="Unset: true unless a message is continued")
    continue_final_message: bool | None = None
    parse_special: bool | None = Field(
        None,
        description="Whether control tokens spelled in the text are control tokens; unset: true for "
        "`prompt`, false for `messages`",
    )
    return_token_strs: bool = False
    with_pieces: bool = Field(
        False, description="Tokens are objects of id and piece, whose bytes are listed where they are no text"
    )

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = (self.prompt, self.content, self.text, self.messages)
        if sum(one is not None for one in given) != 1:
            raise param_error("prompt", "send exactly one of 'prompt' and 'messages'")
        return self


class DetokenizeRequest(StrictModel):
    """Token ids to turn into text."""

    model: str | None = Field(None, max_length=MAX_LABEL_CHARACTERS)
    tokens: list[TokenId] = Field(max_length=MAX_TOKENS, fail_fast=True)
