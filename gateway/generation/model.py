"""The gateway's description of the served model, as the engine reports it."""

from __future__ import annotations

import datetime
import hashlib
import json
import time
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gateway.parsers.detection import chosen_parsers
from gateway.schemas.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, bad_request
from gateway.text.tokenizer import Tokenizer
from moebius import __version__
from moebius.config.parser_names import AUTO
from protos import engine_pb2


@dataclass(frozen=True)
class ServedModel:
    """The served model; filled by `load_served_model` from the engine's answer and the tokenizer's files."""

    name: str
    root: str
    max_context_length: int  # prompt + output, tokens
    max_prompt_length: int  # tokens
    vocab_size: int  # logits width
    eos_token_ids: frozenset[int]
    defaults: dict[str, Any]  # generation_config.json's sampling fields
    tokenizer: Tokenizer
    supports_vision: bool = False
    image_token_id: int = -1  # stands for one image in a prompt; only when supports_vision
    aliases: tuple[str, ...] = ()  # patterns of further names that clients may use
    model_type: str = ""  # as in the checkpoint's config.json
    tool_parser: str | None = None  # names of `gateway/parsers/registry.py`; None: no parser
    reasoning_parser: str | None = None
    hidden_size: int = 0  # values of an embedding; 0: not reported
    max_waiting_outputs: int = 0  # the engine's limit; 0: not reported
    fingerprint: str = ""  # of all that determines an answer; empty: the engine reports no identity
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds

    def card(self) -> dict[str, Any]:
        """Returns the entry of /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "moebius",
            "root": self.root,
            "parent": None,
            "max_model_len": self.max_context_length,
            "capabilities": {"vision": self.supports_vision},
            "system_fingerprint": self.fingerprint or None,
        }

    def anthropic_card(self) -> dict[str, Any]:
        """Returns the entry of Anthropic's list of models."""
        created = datetime.datetime.fromtimestamp(self.created, datetime.UTC)
        return {
            "type": "model",
            "id": self.name,
            "display_name": self.name,
            "created_at": created.isoformat().replace("+00:00", "Z"),
        }

    def check_token_ids(self, token_ids: list[int], param: str) -> None:
        """Raises ApiError 400 when an id is outside the vocabulary."""
        wrong = next((token for token in token_ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise bad_request(
                f"{param}: token id {wrong} is out of vocabulary, which is [0, {self.vocab_size})", param
            )

    def check_length(self, length: int, param: str) -> None:
        """Raises ApiError 400 for a prompt of more tokens than the model accepts."""
        if length > self.max_prompt_length:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.max_context_length} tokens, of which a prompt "
                f"may take {self.max_prompt_length}; your '{param}' resulted in {length} tokens.",
                param=param,
                code=CONTEXT_LENGTH_EXCEEDED,
            )

    def check_name(self, name: str | None) -> None:
        """Raises ApiError 404 naming `model` when `name` is neither None, this model's, nor an alias."""
        if name is None or name == self.name:
            return
        if not any(fnmatchcase(name, alias) for alias in self.aliases):
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )


def load_served_model(
    info: engine_pb2.GetModelInfoResponse,
    tokenizer: Tokenizer,
    served_name: str,
    aliases: tuple[str, ...] = (),
    parsers: tuple[str, str] = (AUTO, AUTO),
) -> ServedModel:
    """Combines the tokenizer with the engine's answer.

    `served_name` is the name that clients send (empty: the engine's), `aliases` are patterns of further
    names, and `parsers` the settings `tool_call_parser` and `reasoning_parser`.

    Raises:
        ValueError: the engine's sampling defaults are no JSON.
        TokenizerError: the tokenizer is another model's.
    """
    tokenizer.check_fits(info.vocab_size)
    template = "" if tokenizer.chat_template is None else tokenizer.chat_template.spelled_source
    chosen = chosen_parsers(*parsers, info.model_type, template, tokenizer.added_tokens)
    tool_parser, reasoning_parser = chosen
    name = served_name or info.served_model_name or Path(info.model_path).name
    return ServedModel(
        name=name,
        root=info.model_path,
        max_context_length=info.max_context_length,
        max_prompt_length=info.max_req_input_len or info.max_context_length - 1,
        vocab_size=info.vocab_size,
        eos_token_ids=frozenset(info.eos_token_ids),
        defaults=json.loads(info.default_sampling_params_json or "{}"),
        tokenizer=tokenizer,
        supports_vision=info.supports_vision,
        image_token_id=info.image_token_id if info.supports_vision else -1,
        aliases=aliases,
        model_type=info.model_type,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        hidden_size=info.hidden_size,
        max_waiting_outputs=info.max_waiting_requests,
        fingerprint=_fingerprint(info.identity, tokenizer),
    )


def _fingerprint(identity: str, tokenizer: Tokenizer) -> str:
    """Returns OpenAI's `system_fingerprint`, which changes with files, templates and versions."""
    if not identity:
        return ""
    template = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
    made_of = "\0".join((identity, template, __version__))
    return f"fp_{hashlib.blake2b(made_of.encode(), digest_size=6).hexdigest()}"
