"""Typed access to the metadata of a GGUF architecture that remembers what was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.model import GgufModel


class MetadataKeys:
    """The architecture's metadata, and which of it was asked for."""

    def __init__(self, model: GgufModel) -> None:
        self.model = model
        self._prefix = f"{model.architecture}."
        self._asked: set[str] = set()

    def get(self, name: str) -> Any:
        """The value as config.json spells it; None where there is none.

        A float32 is the shortest decimal that stands for it. Of a list of one for each layer, in which 0 is a
        layer that has none, the one value there is. Raises CheckpointError for several.
        """
        self.skip(name)
        value = self.model.value(name)
        if isinstance(value, list):
            kinds = set(value) - {0} or {0}
            if len(kinds) != 1:
                raise self.error(name, value, "the same for all layers")
            value = kinds.pop()
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer. Raises CheckpointError naming the key where it is missing or none."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not int:
            raise self.error(name, value, "an integer")
        return value

    def skip(self, *names: str) -> None:
        """They say nothing that is needed."""
        self._asked.update(self._prefix + name for name in names)

    @property
    def unread(self) -> list[str]:
        """Keys of the architecture that nobody asked for."""
        return sorted(
            key for key in self.model.metadata if key.startswith(self._prefix) and key not in self._asked
        )

    def error(self, name: str, value: object, allowed: str) -> CheckpointError:
        """The error for a value that can not be served."""
        return CheckpointError(f"{self.model.file}: {self._prefix}{name} is {value!r}; allowed: {allowed}")

    def layers_with(self, tensor: str) -> list[int]:
        """Layers that have `blk.<layer>.<tensor>`, ascending."""
        count = self.integer("block_count") - self.integer("nextn_predict_layers", 0)
        return [layer for layer in range(count) if f"blk.{layer}.{tensor}" in self.model.tensors]
