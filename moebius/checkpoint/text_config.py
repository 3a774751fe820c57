"""The language model's part of a multimodal config.json, as text-only models spell it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = "text_config"
# What the outer object decides although the inner one may say something else: which family it is, and
# whether the head is the embedding (transformers writes a default of its own into the inner one).
_OUTER = ("model_type", "architectures", "tie_word_embeddings")


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the keys of `text_config` in its top level; unchanged where there is no such object.

    An inner key counts before an outer one of the same name, unless it is null or one of `_OUTER`.
    """
    text = config.get(_TEXT)
    if not isinstance(text, dict):
        return dict(config)
    flat = {key: value for key, value in config.items() if key != _TEXT}
    inner = {key: value for key, value in text.items() if value is not None}
    decided = {key: config[key] for key in _OUTER if config.get(key) is not None}
    return flat | inner | decided
