"""Refuses switches of a `ModelConfig` that none of the model's layers reads.

A switch is a field whose value is not its default. What a kind of layer does not read would be without effect
on it, and the answers wrong in silence. `check_switches` is called when a configuration is read, and when a
model is composed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cached_property
from typing import Any, cast

from moebius.models.config import ModelConfig, ModelConfigError, MoeConfig
from moebius.models.layers.of_config import layers_of

# What no layer reads: the model's begin and end, tokens, and remarks.
_OF_NO_LAYER = frozenset(
    {
        *("embedding_scale", "rounds_embedding_scale", "logit_scale", "final_logit_softcap", "head_bias"),
        *("tie_word_embeddings", "eos_token_ids", "bos_token_id", "num_mtp_layers", "mtp", "vision"),
        *("remarks", "unread_keys"),
    }
)


class _Recorder:
    """A section of a configuration that notes which of its fields are read."""

    def __init__(self, section: Any, prefix: str, read: set[str], sections: dict[str, Any]) -> None:
        self._section, self._prefix, self._read, self._sections = section, prefix, read, sections

    def __getattr__(self, name: str) -> Any:
        if name in self._sections:
            return self._sections[name]
        member = getattr(type(self._section), name, None)
        # What these read is read.
        if isinstance(member, cached_property):
            return member.func(self)
        if isinstance(member, property):
            assert member.fget is not None
            return member.fget(self)
        self._read.add(self._prefix + name)
        return getattr(self._section, name)


def check_switches(config: ModelConfig) -> None:
    """Raises ModelConfigError naming a switch that no layer reads, or two that no layer has together."""
    read = set(_OF_NO_LAYER)
    moe = _Recorder(config.moe, "moe.", read, {})
    layers_of(cast(ModelConfig, _Recorder(config, "", read, {"moe": moe})))
    if config.tie_word_embeddings and config.head_bias:
        raise ModelConfigError(
            f"{config.model_type}: tie_word_embeddings and head_bias are not computed together: the "
            "embedding is the head"
        )
    for name in _switches(config):
        if name not in read:
            raise ModelConfigError(
                f"{config.model_type}: {name} has no effect: no layer of this model has it"
            )


def _switches(config: ModelConfig) -> Iterator[str]:
    """Yields the names of the fields that are set; those of the experts begin with `moe.`."""
    sections: tuple[tuple[str, ModelConfig | MoeConfig], ...] = (("", config), ("moe.", config.moe))
    for prefix, section in sections:
        for field in fields(section):
            if field.default is not MISSING and getattr(section, field.name) != field.default:
                yield prefix + field.name
