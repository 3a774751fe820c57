"""Mixers with a state of fixed size for each request instead of a cache: linear attention, state spaces,
convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from moebius.models.layers.mixer import Mixer
from moebius.models.layers.ranks import even_shard
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.tensors import StateTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent(Mixer):
    """Base: heads of keys, each of which serves as many consecutive heads of values."""

    num_key_heads: int
    num_value_heads: int  # A multiple of the key heads.
    key_head_dim: int
    value_head_dim: int
    conv_width: int  # Tokens that the causal convolution sees, the newest included; 1: there is none.
    eps: float  # Of the norms.

    @property
    def rope(self) -> RopeConfig | None:  # type: ignore[override]
        """Nothing is rotated: order is what the state leaves."""
        return None

    @property
    def key_size(self) -> int:
        """Elements of all heads' keys, and of all heads' queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Elements of all heads' values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_size + self.value_size

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The latest inputs of the convolution, oldest first; the recurrence's state of each value head."""
        heads = self.num_value_heads, self.key_head_dim, self.value_head_dim
        recent = StateTensor((self.conv_width - 1, self.conv_size))
        return recent, StateTensor(heads, "float32")

    def on_rank(self, rank: int, num_ranks: int) -> Self:
        """Returns a rank's key heads, and the value heads that they serve."""
        heads = even_shard(self.num_key_heads, rank, num_ranks).size
        repeats = self.num_value_heads // self.num_key_heads
        return replace(self, num_key_heads=heads, num_value_heads=heads * repeats)

    def indivisible(self, num_ranks: int) -> str:
        heads = self.num_key_heads
        return f"the {heads} key heads of linear attention" if heads % num_ranks else ""

    @property
    def row_elements(self) -> int:
        # Projected and convolved; all heads' queries, keys, values, changes in float32, some of them twice.
        recurrence = 3 * self.num_value_heads * (2 * self.key_head_dim + 2 * self.value_head_dim)
        return 3 * self.conv_size + 2 * self.value_size + 2 * recurrence

    @property
    def widest_row(self) -> int:
        return self.conv_size + self.value_size

    def weight_elements(self, hidden_size: int) -> int:
        """Returns those of queries, keys and values, their gates, decays and steps, and of the outputs."""
        rows = self.conv_size + 2 * self.value_size + 2 * self.num_value_heads
        return hidden_size * rows + self.conv_width * self.conv_size


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet(Recurrent):
    """The gated delta rule (arXiv:2412.06464)."""

    # Whether one matrix makes queries, keys, values and gates, its rows grouped by key head.
    interleaved: bool = False
    sigmoid_gates: bool = False  # Whether the outputs' gates are sigmoids; False: SiLU.


@dataclass(frozen=True, slots=True, kw_only=True)
class KDA(Recurrent):
    """Kimi Delta Attention (arXiv:2510.26692): each element of a key has a decay, not only each head."""

    # Whether these decays, and the gates of the outputs, come directly from the hidden states; False: through
    # a bottleneck of one head's width.
    direct_gates: bool = False
    # A token's logarithm of a decay lies between this and 0; None: it has no bound.
    decay_bound: float | None = None
    decay_has_axes: bool = False  # Whether the checkpoint stores `A_log` as `[1, 1, heads, 1]`.

    def weight_elements(self, hidden_size: int) -> int:
        gates, narrow = self.key_size + self.value_size, self.value_head_dim
        gating = hidden_size * gates if self.direct_gates else narrow * (2 * hidden_size + gates)
        rows = self.conv_size + self.num_value_heads + self.value_size
        return hidden_size * rows + gating + self.conv_width * self.conv_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(Recurrent):
    """A selective state space (arXiv:2405.21060): key heads are the groups of B and C, x is the values."""

    def weight_elements(self, hidden_size: int) -> int:
        rows = self.conv_size + 2 * self.value_size + self.num_value_heads
        return hidden_size * rows + self.conv_width * self.conv_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveScan(Recurrent):
    """Mamba (arXiv:2312.00752): every channel is a head with a value of one element."""

    step_rank: int  # Width of the bottleneck that the channels' steps come through.

    @property
    def conv_size(self) -> int:
        """Only the values pass the convolution."""
        return self.value_size

    @property
    def row_elements(self) -> int:
        # x and gates projected, convolved, steps of all channels, and what comes of them.
        return 6 * self.value_size

    def weight_elements(self, hidden_size: int) -> int:
        narrow = self.step_rank + 2 * self.key_head_dim
        each = 3 * hidden_size + narrow + self.step_rank + self.key_head_dim + self.conv_width
        return self.value_size * each


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv(Recurrent):
    """A convolution between two gates (LFM2): every channel is a head without a key."""

    def weight_elements(self, hidden_size: int) -> int:
        return self.value_size * (4 * hidden_size + self.conv_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lightning(Recurrent):
    """Lightning attention (arXiv:2501.08313): no convolution, and heads that forget at fixed rates."""

    layer: int  # Its number in the model, and the model's layers, from which the rates follow.
    num_layers: int

    def weight_elements(self, hidden_size: int) -> int:
        return hidden_size * (self.conv_size + 2 * self.value_size)
