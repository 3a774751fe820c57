"""The device tensors of what layers remember of a request, whatever its length: states of linear attention,
and the latest tokens of compressed attention.

Knows layers and slots; who holds a slot, `cache/state_pool.py` knows. A step reads the states that an
earlier step left in one slot and writes its own into another one, never the same: so a step can be run
again, and a state that was written at the end of a prefix can be kept for others to start from.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from moebius.models.attention_config import CompressedAttentionConfig, NGramConfig
from moebius.models.config import LinearAttentionConfig, ModelConfig

# What a request starts from: zeros, never written.
ZERO_SLOT = 0


class StateSlots:
    """Slots 0 to `num_slots` of every layer: slot 0 is `ZERO_SLOT`; the last one, `dummy_slot`, is what
    padding writes.
    """

    def __init__(self, num_slots: int, device: torch.device | str) -> None:
        """`num_slots` includes slot 0. Raises ValueError unless there is another one."""
        if num_slots < 2:
            raise ValueError(f"states need num_slots >= 2 (slot 0 is all zeros), got {num_slots}")
        self.num_slots = num_slots
        self.dummy_slot = num_slots
        self.device = torch.device(device)
        self._tensors: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def _make(self, row: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = _zeros((self.num_slots + 1, *row), dtype, self.device)
        self._tensors.append(made)
        return made


class StateCache(StateSlots):
    """States of all linear-attention layers, and of those that embed n-grams.

    Per layer `[num_slots + 1, conv_width - 1, conv_size]` in the activations' dtype, the latest inputs of
    the convolution, oldest first; and `[num_slots + 1, num_value_heads, key_head_dim, value_head_dim]` in
    float32, the recurrent state, without elements where there is only the convolution. Per layer that embeds
    n-grams, tokens int64 `[num_slots + 1, size - 1]`, and inputs of its convolution, which has a channel for
    each element of the residual streams.
    """

    def __init__(
        self,
        config: LinearAttentionConfig,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
        ngram: NGramConfig | None = None,
        stream_size: int = 0,
    ) -> None:
        """As in `StateSlots`; `stream_size`: elements of a token's residual streams."""
        super().__init__(num_slots, device)
        recent = (config.conv_width - 1, config.conv_size)
        heads = (config.num_value_heads, config.key_head_dim, config.value_head_dim)
        layers = range(len(config.layers))
        self._conv = [self._make(recent, dtype) for _ in layers]
        self._recurrent = [self._make(heads, torch.float32) for _ in layers]
        places = range(0 if ngram is None else len(ngram.layers))
        self._tokens, self._token_convs = list[torch.Tensor](), list[torch.Tensor]()
        if ngram is not None:
            self._tokens = [self._make((ngram.size - 1,), torch.int64) for _ in places]
            spanned = (ngram.conv_width - 1, stream_size)
            self._token_convs = [self._make(spanned, dtype) for _ in places]

    def tokens(self, place: int) -> torch.Tensor:
        """Latest token ids, all slots; `place` counts the layers that embed n-grams."""
        return self._tokens[place]

    def token_conv(self, place: int) -> torch.Tensor:
        """Inputs of the convolution over embedded n-grams, all slots."""
        return self._token_convs[place]

    def conv(self, layer: int) -> torch.Tensor:
        """Inputs of the layer's convolution, all slots; `layer` counts the linear-attention layers."""
        return self._conv[layer]

    def recurrent(self, layer: int) -> torch.Tensor:
        """States of the layer's recurrence (the delta rule), all slots."""
        return self._recurrent[layer]


class RecentTokens(StateSlots):
    """Of compressed attention: what its layers need of a request's latest tokens, oldest first.

    Per layer `window` `[num_slots + 1, window - 1, head_dim]`, keys; and of what is still to be compressed a
    tensor for each kind of entries (`entry_rows`): `[num_slots + 1, tokens, row]`. All in the activations'
    type. A row of a token before the first one holds anything.
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """As in `StateSlots`; `config` is the rank's own."""
        super().__init__(num_slots, device)
        sizes = config.compressed
        assert sizes is not None, "the family's reader fills `compressed`"
        window = (sizes.window - 1, config.head_dim)
        layers = range(len(sizes.rates))
        self._windows = [self._make(window, dtype) for _ in layers]
        self._recent = [
            [self._make(shape, dtype) for shape in entry_rows(sizes, config.head_dim, layer)]
            for layer in layers
        ]

    def window(self, layer: int) -> torch.Tensor:
        """Keys of the latest tokens but one, all slots."""
        return self._windows[layer]

    def recent(self, layer: int) -> list[torch.Tensor]:
        """What is to be compressed, all slots: for attention, then for the indexer."""
        return self._recent[layer]


def entry_rows(sizes: CompressedAttentionConfig, head_dim: int, layer: int) -> list[tuple[int, int]]:
    """Of each kind of a layer's entries, how many tokens before a new one its entry may need, and the
    elements of a row: values, then logits of their weights. Of overlapping entries both are there twice.
    """
    rate = sizes.rates[layer]
    if not rate:
        return []
    if layer not in sizes.sparse_layers:
        return [(rate - 1, 2 * head_dim)]
    return [(2 * rate - 1, 4 * size) for size in (head_dim, sizes.index_head_dim)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU, memory that the system hands over only where it is first written: most slots never are."""
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


def state_bytes(config: ModelConfig) -> int:
    """Bytes of one slot over all layers; 0 for a model whose layers have none."""
    if config.compressed is not None:
        return config.dtype_bytes * _recent_elements(config.compressed, config.head_dim)
    linear = config.linear
    if linear is None:
        return 0
    conv = (linear.conv_width - 1) * linear.conv_size * config.dtype_bytes
    recurrent = 4 * linear.num_value_heads * linear.key_head_dim * linear.value_head_dim
    return len(linear.layers) * (conv + recurrent) + _ngram_bytes(config)


def _ngram_bytes(config: ModelConfig) -> int:
    ngram = config.ngram
    if ngram is None:
        return 0
    spanned = (ngram.conv_width - 1) * config.stream_size * config.dtype_bytes
    return len(ngram.layers) * (8 * (ngram.size - 1) + spanned)


def _recent_elements(sizes: CompressedAttentionConfig, head_dim: int) -> int:
    layers = range(len(sizes.rates))
    recent = (math.prod(shape) for layer in layers for shape in entry_rows(sizes, head_dim, layer))
    return len(layers) * (sizes.window - 1) * head_dim + sum(recent)


def make_states(
    config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> StateSlots | None:
    """The states of a rank whose own configuration is `config`; None where no layer has one."""
    if config.compressed is not None:
        return RecentTokens(config, num_slots, dtype, device)
    if config.linear is None:
        return None
    return StateCache(config.linear, num_slots, dtype, device, config.ngram, config.stream_size)
