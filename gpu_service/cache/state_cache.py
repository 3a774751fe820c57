"""The device tensors of what layers remember of a request, whatever its length: states of linear attention,
the latest tokens of compressed attention and of n-grams.

Knows layers and slots; who holds a slot, `cache/request_states.py` knows. A step reads the states that an
earlier step left in one slot and writes its own into another one, never the same: so a step can be run
again, and a state that was written at the end of a prefix can be kept for others to start from.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from moebius.models.layers.layer import Layers, states
from moebius.models.layers.tensors import state_bytes as tensors_state_bytes

# What a request starts from: zeros, never written.
ZERO_SLOT = 0
_DTYPES = {"float32": torch.float32, "int64": torch.int64}


class StateSlots:
    """Slots 0 to `num_slots` of every part of a layer that has a state: slot 0 is `ZERO_SLOT`; the last one,
    `dummy_slot`, is what padding writes. Rows of tokens before a request's first one hold anything.
    """

    def __init__(
        self, layers: Layers, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """`layers` are the rank's own, `dtype` the activations' type, and `num_slots` includes slot 0.

        Raises ValueError unless there is another one.
        """
        if num_slots < 2:
            raise ValueError(f"states need num_slots >= 2 (slot 0 is all zeros), got {num_slots}")
        self.num_slots = num_slots
        self.dummy_slot = num_slots
        self.device = torch.device(device)
        self._parts = [
            tuple(
                _zeros((num_slots + 1, *part.row), _DTYPES.get(part.dtype, dtype), self.device)
                for part in state
            )
            for state in states(layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(tensor.nbytes for state in self._parts for tensor in state)

    def tensors(self) -> list[torch.Tensor]:
        """All memory of states, the slot being the first index: for copies of whole states."""
        return [tensor for state in self._parts for tensor in state]

    def of(self, place: int) -> tuple[torch.Tensor, ...]:
        """Returns all slots of each tensor of the `place`-th part with a state, in its order."""
        return self._parts[place]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros; on a CPU, memory that the system provides only where it is first written."""
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


def state_bytes(layers: Layers, dtype: torch.dtype) -> int:
    """Returns the bytes of one slot over all layers; 0 for a model whose layers have none."""
    return tensors_state_bytes((part for state in states(layers) for part in state), dtype.itemsize)


def make_states(
    layers: Layers, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> StateSlots | None:
    """The states of a rank's own layers; None where no layer has one."""
    return StateSlots(layers, num_slots, dtype, device) if states(layers) else None
