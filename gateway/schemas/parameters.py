"""Unsupported request fields: which are refused, and which are ignored and reported."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationInfo

from gateway.schemas.errors import param_error


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
    "prompt_cache_retention": (),
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
