"""config.json as a mapping; the language model's part of a multimodal one as text-only models spell it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moebius.checkpoint.errors import CheckpointError, refuse_pointer

_TEXT = "text_config"
# Two spellings of one key, new and old.
_DTYPE = ("dtype", "torch_dtype")
# What the outer object decides although the inner one may say something else: which family it is, the type of
# weights, and whether the head is the embedding (transformers writes defaults of its own into the inner one).
_OUTER = ("model_type", "architectures", "tie_word_embeddings", *_DTYPE)


# Keys of the inner object whose null is not their absence.
_NULL_COUNTS = ("linear_lower_bound",)


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config` with the keys of `text_config` in its top level; unchanged where there is no such
    object.

    An inner key counts before an outer one of the same name, unless it is null or one of `_OUTER`.
    """
    text = config.get(_TEXT)
    if not isinstance(text, dict):
        return dict(config)
    flat = {key: value for key, value in config.items() if key != _TEXT}
    inner = {key: value for key, value in text.items() if value is not None or key in _NULL_COUNTS}
    decided = {key: config[key] for key in _OUTER if config.get(key) is not None}
    if decided.keys() & _DTYPE:
        inner = {key: value for key, value in inner.items() if key not in _DTYPE}
    return flat | inner | decided


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds.

    Raises CheckpointError naming the file and what is wrong with it.
    """
    refuse_pointer(path)
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: not a checkpoint directory") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(content).__name__}")
    return content


def read_config_file(directory: str | Path) -> dict[str, Any]:
    """`config.json` of a directory, see `flat_config`. Raises CheckpointError naming the file."""
    return flat_config(read_json(Path(directory) / "config.json"))
