"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from gateway.schemas.common import GenerationFields
from gateway.validation import param_error
from moebius.request_limits import MAX_LOGPROBS

MAX_PROMPTS = 256
_FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def _is_token_list(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


class CompletionRequest(GenerationFields):
    """Every field here is implemented; the others are in `unsupported.py`."""

    prompt: list[str | list[int]] = Field(description=f"{_FORMS}; normalised to a list of prompts")
    max_tokens: int | None = Field(16, ge=0, le=2**31, description="0 only with `echo`")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Alternatives per token")
    echo: bool | None = Field(None, description="Begin the text with the prompt")
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
        """One prompt or many, text or ids: always a list of prompts afterwards."""
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
        return self

    def token_limit(self) -> tuple[str, int | None]:
        """The parameter that bounds the output and its value; an explicit null means the API's default."""
        return "max_tokens", 16 if self.max_tokens is None else self.max_tokens
