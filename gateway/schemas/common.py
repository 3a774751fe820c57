"""Fields that chat and text completions share, and limits of JSON.

Also which unsupported fields are refused, and which are ignored and reported.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gateway.schemas.errors import param_error, shown
from moebius.config.request_limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_KEEP_PREFIX_S,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_OUTPUTS,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)


@dataclass
class Tolerance:
    """The handling of unknown fields, and those that were found; the context of a validation."""

    strict: bool = False  # as in `strict_parameters`
    ignored: set[str] = field(default_factory=set)  # names of fields left out, filled by validators


def tolerance_of(info: ValidationInfo) -> Tolerance:
    """Returns the validation's own, or a new lenient one if it has none."""
    return info.context if isinstance(info.context, Tolerance) else Tolerance()


# Fields that change the answer and are not implemented, with their neutral values; null always is neutral.
# OpenAI's first, then those of other servers.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "web_search_options": (),
    "best_of": (1,),
    "suffix": ("",),
    "chat_template": (),
    "custom_logit_processor": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "lora_path": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "stop_regex": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
}

# Fields that do not affect the answer, with any value; `--strict-parameters` accepts only these values.
HINTS: dict[str, tuple[Any, ...]] = {
    "metadata": ({},),
    "moderation": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": (),
}


def refuse_unsupported(
    data: dict[str, Any], implemented: Container[str], tolerance: Tolerance
) -> dict[str, Any]:
    """Returns `data` without unsupported fields at neutral values, and without hints.

    Raises:
        PydanticCustomError: such a field has another value; the error names it and what is allowed.
    """
    kept: dict[str, Any] = {}
    for name, value in data.items():
        if name in implemented:
            kept[name] = value
        elif name in HINTS and not tolerance.strict:
            if value is not None:
                tolerance.ignored.add(name)
        elif name in NEUTRAL_VALUES or name in HINTS:
            _check_neutral(name, value, NEUTRAL_VALUES.get(name, HINTS.get(name, ())))
        else:
            kept[name] = value  # the schema handles unknown names
    return kept


def _check_neutral(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value is not None and not any(type(value) is type(item) and value == item for item in allowed):
        choices = " or ".join(["unset", *(repr(item) for item in allowed)])
        raise param_error(name, f"{name!r} is not supported yet: leave it {choices}", "unsupported_parameter")


MAX_DEPTH = 64
MAX_KEYS = 10_000  # of one object
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """The text is no JSON, or exceeds a limit; the message says what is wrong, `param` where."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def parse_json(data: bytes | bytearray | str) -> Any:
    """Returns the value of the JSON in `data` (UTF-8).

    Raises:
        JsonError: no JSON; deeper than `MAX_DEPTH`; an object of more than `MAX_KEYS` keys; half of a
            surrogate pair, which no text can hold.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8 at byte {error.start}", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise JsonError(f"not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise JsonError(_too_deep(), code="invalid_json") from None
    except ValueError:  # Python reads no integers of more than 4300 digits
        raise JsonError("not valid JSON: a number has too many digits", code="invalid_json") from None
    _check(value, _ESCAPED_SURROGATE.search(text) is not None)
    return value


def _too_deep() -> str:
    return f"nested deeper than {MAX_DEPTH} levels"


def _check(value: Any, surrogates: bool) -> None:
    """Checks every value once, without recursion; `surrogates`: whether to check texts for surrogates."""
    waiting: list[tuple[Any, str, int]] = [(value, "", 1)]
    while waiting:
        item, place, depth = waiting.pop()
        if isinstance(item, str):
            if surrogates:
                _check_text(item, place)
            continue
        if depth > MAX_DEPTH:
            raise JsonError(_too_deep(), place or None)
        if isinstance(item, dict):
            if len(item) > MAX_KEYS:
                raise JsonError(f"an object has more than {MAX_KEYS} keys", place or None)
            for key in item if surrogates else ():
                _check_text(key, place)
            dot = "." if place else ""
            waiting += [
                (part, f"{place}{dot}{key}"[:200], depth + 1)
                for key, part in item.items()
                if isinstance(part, str | list | dict)
            ]
        elif isinstance(item, list):
            waiting += [
                (part, f"{place}[{index}]", depth + 1)
                for index, part in enumerate(item)
                if isinstance(part, list | dict) or (surrogates and isinstance(part, str))
            ]


def _check_text(text: str, place: str) -> None:
    half = None if text.isascii() else _SURROGATE.search(text)
    if half is not None:
        raise JsonError(f"half of a surrogate pair (\\u{ord(half.group()):04x}) is no text", place or None)


# Limits of what is kept while a request runs: names and labels, not prompts.
MAX_LABEL_CHARACTERS = 1024
# Penalties beyond these are effectively infinite or zero in the engine's single precision.
PENALTY_RANGE = 1e-3, 1e3
# The number of `logit_bias` keys that a refusal lists.
_NAMED_KEYS = 5
_TOKEN_ID_DIGITS = 10
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class StrictModel(BaseModel):
    """Values of the wrong JSON type are errors; unknown fields are ignored, or errors in strict mode."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)
    place: ClassVar[str] = ""  # prefix of its fields' names in the list of ignored ones

    @model_validator(mode="before")
    @classmethod
    def _tolerate(cls, data: Any, info: ValidationInfo) -> Any:
        """Drops unknown fields, and reads 2.0 as 2 where an integer is expected."""
        tolerance = tolerance_of(info)
        if tolerance.strict or not isinstance(data, dict):
            return data
        names, integers = _names_of(cls)
        unknown = data.keys() - names
        tolerance.ignored.update(f"{cls.place}{name}" for name in unknown if data[name] is not None)
        return {
            name: _integral(value) if name in integers else value
            for name, value in data.items()
            if name not in unknown
        }


@functools.cache
def _names_of(model: type[BaseModel]) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names of `model`'s fields, and those of them that hold integers or lists of integers."""
    names: set[str] = set()
    integers: set[str] = set()
    for name, declared in model.model_fields.items():
        alias = declared.validation_alias
        aliases = alias.choices if isinstance(alias, AliasChoices) else [alias]
        sent_by = {name, *(choice for choice in aliases if isinstance(choice, str))}
        names |= sent_by
        if _holds_integers(declared.annotation):
            integers |= sent_by
    return frozenset(names), frozenset(integers)


def _holds_integers(hint: Any) -> bool:
    """Returns whether `hint` is int, or a union or list of it, and float is no part of it."""
    if get_origin(hint) is Annotated:
        return _holds_integers(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType, list):
        parts = [part for part in get_args(hint) if part is not NoneType]
        return float not in parts and any(map(_holds_integers, parts))
    return hint is int


def _integral(value: Any) -> Any:
    """Returns the value with integral floats as integers, also in a list."""
    if isinstance(value, list):
        return [_integral(item) if isinstance(item, float) else item for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]


def tagged(tags: Mapping[str, str], untyped: str | Callable[[dict[str, Any]], str]) -> Discriminator:
    """Picks a union's member by the value's `type`; "an-other" tags the member for unknown types.

    Args:
        tags: the member's tag for each type; tags have hyphens, by which errors leave them out.
        untyped: the tag of values without a type, or a function that returns it.
    """

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if isinstance(kind, str):
            return tags.get(kind, "an-other")
        if isinstance(untyped, str):
            return untyped
        return untyped(value if isinstance(value, dict) else {})

    return Discriminator(tag)


class StreamOptions(StrictModel):
    """The additional contents of a stream."""

    place = "stream_options."

    include_usage: bool = Field(False, description="A last chunk with the token counts")
    continuous_usage_stats: bool = Field(False, description="Token counts so far on every chunk")
    include_obfuscation: bool | None = Field(None, description="No effect: chunks are not padded")


class GenerationFields(StrictModel):
    """Sampling and stream parameters; unset ones take the model's generation defaults, then the API's."""

    model: str | None = Field(
        None, max_length=MAX_LABEL_CHARACTERS, description="Name as in /v1/models; unset: the served one"
    )
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31, description="Candidates kept; -1 or 0 keep all")
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_OUTPUTS, description="Independent outputs")
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    stop: str | list[str] | None = Field(
        None, description=f"Up to {MAX_STOP_STRINGS} strings that end an output"
    )
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=2**31)
    max_tokens: int | None = Field(None, ge=0, le=2**31)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=PENALTY_RANGE[0], le=PENALTY_RANGE[1])
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_LOGIT_BIAS, description="Token ids as text, and the values added to their logits"
    )
    allowed_token_ids: list[TokenId] | None = Field(
        None,
        min_length=1,
        max_length=MAX_ALLOWED_TOKEN_IDS,
        fail_fast=True,
        description="Only these are sampled",
    )
    bad_words: list[BadWord] | None = Field(
        None, max_length=MAX_BAD_WORDS, fail_fast=True, description="Texts that outputs do not contain"
    )
    logprob_token_ids: list[TokenId] | None = Field(
        None,
        max_length=MAX_LOGPROB_TOKEN_IDS,
        fail_fast=True,
        description="Tokens whose log-probabilities are returned at every position, not the likeliest",
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Alternatives per prompt token; not in streams"
    )
    return_token_ids: bool | None = Field(None, description="Return ids of prompt and output tokens, too")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Name tokens in log-probabilities by id, as in token_id:7"
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=2**31, description="Longest prompt, the rest is cut off; -1: the model's limit"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which end of a prompt is cut off; unset: left, its beginning"
    )
    detokenize: bool = Field(True, description="False: texts are empty; for use with return_token_ids")
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool | None = Field(
        None, description="No difference: special tokens are written as they are"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = Field(
        None, ge=1, le=2**31, description="Tokens per chunk, except for the first and last"
    )
    user: str | None = Field(
        None, max_length=MAX_LABEL_CHARACTERS, description="Recorded on the request's span and log line"
    )
    priority: int = Field(
        0, ge=INT64_MIN, le=INT64_MAX, description="Lower runs earlier among waiting requests"
    )
    cache_salt: str | None = Field(
        None, max_length=MAX_LABEL_CHARACTERS, description="Prefixes are shared only between equal salts"
    )
    keep_prefix_s: float | None = Field(
        None,
        ge=0,
        le=MAX_KEEP_PREFIX_S,
        description="Seconds from its end for which the prefix cache gives up other requests' prefixes first",
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description="24h: `keep_prefix_s` of a day, unless that is set"
    )

    @property
    def kept_s(self) -> float:
        """For how long the request's prefix is kept, seconds; 0: as long as others."""
        if self.keep_prefix_s is not None:
            return self.keep_prefix_s
        return MAX_KEEP_PREFIX_S if self.prompt_cache_retention == "24h" else 0.0

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any, info: ValidationInfo) -> Any:
        """Accepts known fields without an implementation only with a neutral value."""
        if not isinstance(data, dict):
            return data
        tolerance = tolerance_of(info)
        if tolerance.strict and "model" not in data:
            raise param_error("model", "missing required parameter: 'model'", "missing_required_parameter")
        return refuse_unsupported(data, cls.model_fields, tolerance)

    @field_validator("stop", mode="after")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else (stop or [])
        if len(strings) > MAX_STOP_STRINGS:
            raise param_error("stop", f"'stop' takes at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
        if "" in strings:
            raise param_error("stop", "a stop string must not be empty")
        if any(len(string) > MAX_STOP_STRING_CHARACTERS for string in strings):
            raise param_error("stop", f"a stop string has at most {MAX_STOP_STRING_CHARACTERS} characters")
        return stop

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _check_logit_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        wrong = [
            shown(key)
            for key in bias or {}
            if not (key.isascii() and key.isdigit() and len(key) <= _TOKEN_ID_DIGITS)
        ]
        if wrong:
            more = f" and {len(wrong) - _NAMED_KEYS} more" if len(wrong) > _NAMED_KEYS else ""
            named = ", ".join(wrong[:_NAMED_KEYS])
            raise param_error("logit_bias", f"keys of 'logit_bias' must be token ids, got {named}{more}")
        return bias

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise param_error("stream_options", "'stream_options' is only allowed when 'stream' is true")
        return self

    @model_validator(mode="after")
    def _check_token_fields(self) -> Self:
        if self.stream and self.prompt_logprobs:
            raise param_error("prompt_logprobs", "'prompt_logprobs' are not available when 'stream' is true")
        if not self.detokenize and self.stop_strings():
            raise param_error("stop", "'stop' needs text: it excludes 'detokenize' false")
        return self

    def stop_strings(self) -> tuple[str, ...]:
        """Returns `stop` as a tuple, from either form."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def token_bias(self) -> dict[int, float]:
        """Returns `logit_bias` with token ids as integers."""
        return {int(key): value for key, value in (self.logit_bias or {}).items()}
