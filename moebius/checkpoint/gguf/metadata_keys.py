"""Typed access to the metadata of a GGUF architecture that remembers what was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.model import GgufModel


class MetadataKeys:
    """The architecture's metadata, and which of it was asked for."""

    def __init__(self, model: GgufModel) -> None:
        self.model = model
        self._prefix = f"{model.architecture}."
        self._asked: set[str] = set()

    def get(self, name: str) -> Any:
        """Returns the value as config.json spells it; None where there is none.

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
        """Returns an integer. Raises CheckpointError naming the key where it is missing or none."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not int:
            raise self.error(name, value, "an integer")
        return value

    def listed(self, name: str, count: int) -> list[int]:
        """Returns the values of the first `count` layers; one value is that of all.

        Raises CheckpointError naming the key.
        """
        self.skip(name)
        value = self.model.value(name)
        values = [value] * count if isinstance(value, int) else value
        is_list = isinstance(values, list) and len(values) >= count
        if not is_list or not all(isinstance(entry, int) for entry in values):
            raise self.error(name, value, f"an integer, or one for each of {count} layers")
        return [int(entry) for entry in values[:count]]

    def numbers(self, name: str, count: int) -> list[float]:
        """Returns the numbers of the first `count` layers, spelled as in `get`; none without a key.

        Raises CheckpointError.
        """
        self.skip(name)
        values = self.model.value(name)
        if values is None:
            return []
        if not isinstance(values, list) or len(values) < count:
            raise self.error(name, values, f"a number for each of {count} layers")
        return [float(str(np.float32(value))) for value in values[:count]]

    def flags(self, name: str, count: int) -> list[bool]:
        """Returns the flags of the first `count` layers; none without a key.

        Raises CheckpointError naming the key.
        """
        self.skip(name)
        values = self.model.value(name)
        if values is None:
            return []
        if not isinstance(values, list) or len(values) < count:
            raise self.error(name, values, f"true or false for each of {count} layers")
        return [bool(value) for value in values[:count]]

    def floats(self, tensor: str) -> NDArray[np.float32] | None:
        """Returns the values of a small tensor of float32; None: there is none."""
        stored = self.model.tensors.get(tensor)
        if stored is None:
            return None
        if stored.type.name != "F32":
            raise CheckpointError(f"{stored.file}: tensor {tensor!r} is {stored.type.name}; allowed: F32")
        count = stored.nbytes // np.dtype("<f4").itemsize
        return np.fromfile(stored.file, "<f4", count, offset=stored.offset)

    def skip(self, *names: str) -> None:
        """They say nothing that is needed."""
        self._asked.update(self._prefix + name for name in names)

    @property
    def unread(self) -> list[str]:
        """Keys of the architecture that no reader asked for."""
        return sorted(
            key for key in self.model.metadata if key.startswith(self._prefix) and key not in self._asked
        )

    def error(self, name: str, value: object, allowed: str) -> CheckpointError:
        """Returns the error for a value that cannot be served."""
        return CheckpointError(f"{self.model.file}: {self._prefix}{name} is {value!r}; allowed: {allowed}")

    def layers_with(self, tensor: str) -> list[int]:
        """Returns the layers that have `blk.<layer>.<tensor>`, ascending."""
        count = self.integer("block_count") - self.integer("nextn_predict_layers", 0)
        return [layer for layer in range(count) if f"blk.{layer}.{tensor}" in self.model.tensors]
