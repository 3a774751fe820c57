"""What a layer keeps of a request: rows in pages, which grow with it, and a state, which does not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# "activation": the type that the model is computed in.
StateType = Literal["activation", "float32", "int64"]
_BYTES = {"float32": 4, "int64": 8}


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """A tensor `[pages, places, *row]` of a layer, whose places stand for tokens of a request in order."""

    row: tuple[int, ...]
    # Tokens that a place stands for; it lies in the page of the last of them. 0: there are no places.
    tokens: int = 1
    # Keys that tokens are only chosen by: in the activations' type, whatever pages hold otherwise.
    is_index: bool = False

    def places(self, page_size: int) -> int:
        """Returns the number of places in a page of `page_size` tokens: room for each that may end in it."""
        return -(-page_size // self.tokens) if self.tokens else 0

    def page_bytes(self, page_size: int, stored_bytes: int, activation_bytes: int) -> int:
        """Returns the bytes in a page; `stored_bytes`: of an element of keys, values and latents."""
        item = activation_bytes if self.is_index else stored_bytes
        return self.places(page_size) * math.prod(self.row) * item


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor `[slots, *row]` of a layer: what it remembers of a request, whatever its length."""

    row: tuple[int, ...]
    dtype: StateType = "activation"

    def slot_bytes(self, activation_bytes: int) -> int:
        """Returns the bytes of one slot."""
        return math.prod(self.row) * _BYTES.get(self.dtype, activation_bytes)


def state_bytes(tensors: Iterable[StateTensor], activation_bytes: int) -> int:
    """Returns the bytes of one slot of all tensors."""
    return sum(tensor.slot_bytes(activation_bytes) for tensor in tensors)
