"""Reading keys of a `quantization_config`: what is not known is refused by key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moebius.checkpoint.errors import CheckpointError

Config = Mapping[str, Any]
# Weights that share a scale, along a row.
GROUP_SIZES = (32, 64, 128)
# Rows and columns that share a scale of fp8 blocks.
BLOCK = [128, 128]


def unsupported(key: str, value: object, allowed: str) -> CheckpointError:
    """The error for a value that is not known."""
    return CheckpointError(f"config.json: quantization_config: {key} is {value!r}; allowed: {allowed}")


def require(config: Config, key: str, allowed: tuple[object, ...], default: object = None) -> Any:
    """The value of a key. Raises CheckpointError naming key, value and what is allowed."""
    value = config.get(key, default)
    if value not in allowed:
        raise unsupported(key, value, ", ".join(map(str, allowed)))
    return value


def require_object(config: Config, key: str, default: Config | None = None) -> Config:
    """The value of a key that is an object. Raises CheckpointError naming key and value."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, dict):
        raise unsupported(key, value, "an object")
    return value
