"""Heads of linear attention as the metadata of a GGUF model gives them, and the orders they lie in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moebius.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    # Its module loads a package that few processes need.
    from moebius.checkpoint.gguf.model import GgufModel

Order = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class LinearHeads:
    """Filled by `linear_heads`; sizes in elements."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def repeats(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.key_heads

    @property
    def key_size(self) -> int:
        """Channels of all heads' queries, and as many of all keys."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Channels of all heads' values, and as many of all gates."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values, which a convolution mixes with those of earlier tokens."""
        return 2 * self.key_size + self.value_size

    def tiled(self, width: int) -> Order:
        """Returns where the rows of the value heads lie, each of `width`, if those of a key head are no
        neighbours.

        Such files have the first value head of every key head, then the second of every one, and so on.
        """
        stored = np.arange(self.value_heads * width).reshape(self.repeats, self.key_heads, width)
        return stored.swapaxes(0, 1).reshape(-1)

    def mixed_rows(self) -> Order:
        """Returns where each key head's query, key, values and gates follow one another, head by head.

        Stored are all queries, all keys and all values, and in a second tensor after these all gates.
        """
        keys, values = self.key_size, self.value_size
        begins = (0, keys, 2 * keys, 2 * keys + values)
        sizes = (keys, keys, values, values)
        parts = [
            (begin + np.arange(size)).reshape(self.key_heads, -1)
            for begin, size in zip(begins, sizes, strict=True)
        ]
        return np.concatenate(parts, axis=1).reshape(-1)


def linear_heads(model: GgufModel) -> LinearHeads:
    """Raises CheckpointError naming the key that is missing, or numbers that do not divide one another."""
    sizes: dict[str, int] = {}
    for name in ("ssm.group_count", "ssm.time_step_rank", "ssm.state_size", "ssm.inner_size"):
        value = model.value(name)
        if type(value) is not int or value < 1:
            raise CheckpointError(
                f"{model.file}: {model.architecture}.{name} is {value!r}; allowed: an integer >= 1"
            )
        sizes[name] = value
    key_heads, value_heads, key_dim, inner = sizes.values()
    if value_heads % key_heads or inner % value_heads:
        raise CheckpointError(
            f"{model.file}: {model.architecture}.ssm.time_step_rank is {value_heads}; allowed: a multiple of "
            f"ssm.group_count ({key_heads}) that divides ssm.inner_size ({inner})"
        )
    return LinearHeads(key_heads, value_heads, key_dim, inner // value_heads)
