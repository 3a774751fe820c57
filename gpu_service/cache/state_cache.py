"""The device tensors of linear attention: what its layers remember of a request, whatever its length.

Knows layers and slots; who holds a slot, `cache/state_pool.py` knows. A step reads the states that an
earlier step left in one slot and writes its own into another one, never the same: so a step can be run
again, and a state that was written at the end of a prefix can be kept for others to start from.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from moebius.models.config import LinearAttentionConfig, ModelConfig

# What a request starts from: zeros, never written.
ZERO_SLOT = 0


class StateCache:
    """States of all linear-attention layers.

    Per layer `[num_slots + 1, conv_width - 1, conv_size]` in the activations' dtype, the latest inputs of
    the convolution, oldest first; and `[num_slots + 1, num_value_heads, key_head_dim, value_head_dim]` in
    float32, the recurrent state. Slot 0 is `ZERO_SLOT`; the last one, `dummy_slot`, is what padding writes.
    """

    def __init__(
        self, config: LinearAttentionConfig, num_slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """`num_slots` includes slot 0. Raises ValueError unless there is another one."""
        if num_slots < 2:
            raise ValueError(f"states need num_slots >= 2 (slot 0 is all zeros), got {num_slots}")
        self.num_slots = num_slots
        self.dummy_slot = num_slots
        self.device = torch.device(device)
        recent = (num_slots + 1, config.conv_width - 1, config.conv_size)
        heads = (num_slots + 1, config.num_value_heads, config.key_head_dim, config.value_head_dim)
        layers = range(len(config.layers))
        self._conv = [_zeros(recent, dtype, self.device) for _ in layers]
        self._recurrent = [_zeros(heads, torch.float32, self.device) for _ in layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(tensor.nbytes for tensor in (*self._conv, *self._recurrent))

    def conv(self, layer: int) -> torch.Tensor:
        """Inputs of the layer's convolution, all slots; `layer` counts the linear-attention layers."""
        return self._conv[layer]

    def recurrent(self, layer: int) -> torch.Tensor:
        """States of the layer's recurrence (the delta rule), all slots."""
        return self._recurrent[layer]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU, memory that the system hands over only where it is first written: most slots never are."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


def state_bytes(config: ModelConfig) -> int:
    """Bytes of one slot over all layers; 0 for a model without linear attention."""
    linear = config.linear
    if linear is None:
        return 0
    conv = (linear.conv_width - 1) * linear.conv_size * config.dtype_bytes
    recurrent = 4 * linear.num_value_heads * linear.key_head_dim * linear.value_head_dim
    return len(linear.layers) * (conv + recurrent)


def make_states(
    config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> StateCache | None:
    """The states of a rank whose own configuration is `config`; None where no layer has one."""
    return None if config.linear is None else StateCache(config.linear, num_slots, dtype, device)
