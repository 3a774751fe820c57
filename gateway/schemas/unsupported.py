"""Fields that clients know and this gateway does not implement yet, with the values that ask for nothing."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from gateway.validation import param_error

# OpenAI's fields, then fields other servers offer. None always means "not set".
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "ebnf": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "prompt_logprobs": (),
    "regex": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


def refuse_unsupported(data: dict[str, Any], implemented: Container[str]) -> dict[str, Any]:
    """`data` without unsupported fields at neutral values.

    Raises:
        PydanticCustomError: such a field has another value; the error names it and what is allowed.
    """
    kept: dict[str, Any] = {}
    for name, value in data.items():
        if name in implemented or name not in NEUTRAL_VALUES:
            kept[name] = value  # unknown names are refused by the schema itself
            continue
        allowed = NEUTRAL_VALUES[name]
        if value is not None and not any(type(value) is type(item) and value == item for item in allowed):
            choices = " or ".join(["unset", *(repr(item) for item in allowed)])
            raise param_error(
                name, f"{name!r} is not supported yet: leave it {choices}", "unsupported_parameter"
            )
    return kept
