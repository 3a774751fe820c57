"""Mixers with a state of fixed size for each request instead of a cache: linear attention, state spaces,
convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from moebius.models.layers.mixer import Mixer
from moebius.models.layers.ranks import WHOLE, Cut, Even, Segments, even_shard
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.tensors import StateTensor
from moebius.models.layers.weights import Weight, Weights, conv_taps, fused, linear, rms_norm


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

    @property
    def heads_cut(self) -> Even:
        """How ranks share whatever heads have, of keys or of values."""
        return Even(self.num_key_heads)

    def segments(self, *sizes: int) -> Segments:
        """How ranks share what lies one after the other in one tensor."""
        return Segments(sizes, self.num_key_heads)

    def head_vectors(self, *names: str) -> Weights:
        """Yields a number for each value head, as trained: decays are sensitive to their last bits."""
        for name in names:
            yield Weight(name, (self.num_value_heads,), "float32", cut=self.heads_cut)

    def output(self, name: str, hidden_size: int) -> Weights:
        """Yields the projection of all heads' values, whose products ranks sum."""
        yield from linear(name, hidden_size, self.value_size, cut=self.heads_cut, axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet(Recurrent):
    """The gated delta rule (arXiv:2412.06464)."""

    name: ClassVar[str] = "linear_attn"

    # Whether one matrix makes queries, keys, values and gates, its rows grouped by key head.
    interleaved: bool = False
    sigmoid_gates: bool = False  # Whether the outputs' gates are sigmoids; False: SiLU.

    def weights(self, hidden_size: int) -> Weights:
        heads, count = self.heads_cut, self.num_value_heads
        qkv = self.segments(self.key_size, self.key_size, self.value_size)
        parts: dict[str, tuple[int, Cut]] = {"in_proj_qkv": (self.conv_size, qkv)}
        parts |= {"in_proj_z": (self.value_size, heads), "in_proj_b": (count, heads)}
        parts["in_proj_a"] = count, heads
        if self.interleaved:
            parts = {"in_proj_qkvz": (self.conv_size + self.value_size, heads)}
            parts["in_proj_ba"] = 2 * count, heads
        yield from fused("in_proj", hidden_size, parts)
        yield from conv_taps("conv1d", self.conv_size, self.conv_width, qkv)
        yield from self.head_vectors("A_log", "dt_bias")
        yield from rms_norm("norm", self.value_head_dim)
        yield from self.output("out_proj", hidden_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KDA(Recurrent):
    """Kimi Delta Attention (arXiv:2510.26692): each element of a key has a decay, not only each head."""

    # Whether these decays, and the gates of the outputs, come directly from the hidden states; False: through
    # a bottleneck of one head's width.
    direct_gates: bool = False
    # A token's logarithm of a decay lies between this and 0; None: it has no bound.
    decay_bound: float | None = None
    decay_has_axes: bool = False  # Whether the checkpoint stores `A_log` as `[1, 1, heads, 1]`.

    def weights(self, hidden_size: int) -> Weights:
        heads, narrow, keys, values = self.heads_cut, self.value_head_dim, self.key_size, self.value_size
        parts: dict[str, tuple[int, Cut]] = {
            "q_proj": (keys, heads),
            "k_proj": (keys, heads),
            "v_proj": (values, heads),
            "b_proj": (self.num_value_heads, heads),
        }
        if self.direct_gates:
            parts |= {"f_proj": (keys, heads), "g_proj": (values, heads)}
        else:
            parts |= {"f_a_proj": (narrow, WHOLE), "g_a_proj": (narrow, WHOLE)}
            yield from linear("f_b_proj", keys, narrow, cut=heads)
            yield from linear("g_b_proj", values, narrow, cut=heads)
        yield from fused("in_proj", hidden_size, parts)
        for name, channels in (("q_conv1d", keys), ("k_conv1d", keys), ("v_conv1d", values)):
            yield from conv_taps(name, channels, self.conv_width, heads, into="conv1d")
        # As published and as trained: decays are sensitive to their last bits.
        count, has_axes = self.num_value_heads, self.decay_has_axes
        shape, axis = ((1, 1, count, 1), 2) if has_axes else ((count,), 0)
        yield Weight("A_log", shape, "float32", cut=self.segments(count), axis=axis)
        yield Weight("dt_bias", (keys,), "float32", cut=heads)
        yield from rms_norm("o_norm", self.value_head_dim)
        yield from self.output("o_proj", hidden_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(Recurrent):
    """A selective state space (arXiv:2405.21060): key heads are the groups of B and C, x is the values."""

    name: ClassVar[str] = "mamba"

    def weights(self, hidden_size: int) -> Weights:
        # x of all heads, then B and C of all groups.
        xbc = self.value_size, self.key_size, self.key_size
        rows = self.segments(self.value_size, *xbc, self.num_value_heads)
        yield from linear("in_proj", sum(rows.sizes), hidden_size, cut=rows)
        yield from conv_taps("conv1d", self.conv_size, self.conv_width, self.segments(*xbc), bias=True)
        yield from self.head_vectors("A_log", "D", "dt_bias")
        yield from rms_norm("norm", self.value_size, self.heads_cut)
        yield from self.output("out_proj", hidden_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveScan(Recurrent):
    """Mamba (arXiv:2312.00752): every channel is a head with a value of one element."""

    name: ClassVar[str] = "mamba"

    step_rank: int  # Width of the bottleneck that the channels' steps come through.

    @property
    def conv_size(self) -> int:
        """Only the values pass the convolution."""
        return self.value_size

    @property
    def row_elements(self) -> int:
        # x and gates projected, convolved, steps of all channels, and what comes of them.
        return 6 * self.value_size

    @property
    def widths(self) -> tuple[int, int, int]:
        """Elements of what steps, B and C are made of."""
        return self.step_rank, self.key_head_dim, self.key_head_dim

    def weights(self, hidden_size: int) -> Weights:
        channels, cut = self.value_size, self.heads_cut
        # x of all channels, then their gates.
        yield from linear("in_proj", 2 * channels, hidden_size, cut=self.segments(channels, channels))
        yield from conv_taps("conv1d", channels, self.conv_width, cut, bias=True)
        yield from linear("x_proj", sum(self.widths), channels, cut=cut, axis=1)
        for name, width in zip(("dt", "b", "c"), self.widths, strict=True):
            yield from rms_norm(f"{name}_layernorm", width)
        yield from linear("dt_proj", channels, self.step_rank, bias=True, cut=cut, into="steps")
        yield Weight("A_log", (channels, self.key_head_dim), "float32", cut=cut)
        yield from self.head_vectors("D")
        yield from self.output("out_proj", hidden_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv(Recurrent):
    """A convolution between two gates (LFM2): every channel is a head without a key."""

    name: ClassVar[str] = "conv"

    def weights(self, hidden_size: int) -> Weights:
        # b of all channels, then c, then x.
        channels = self.value_size
        rows = self.segments(channels, channels, channels)
        yield from linear("in_proj", 3 * channels, hidden_size, cut=rows)
        yield from conv_taps("conv", channels, self.conv_width, self.heads_cut)
        yield from self.output("out_proj", hidden_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lightning(Recurrent):
    """Lightning attention (arXiv:2501.08313): no convolution, and heads that forget at fixed rates."""

    layer: int  # Its number in the model, and the model's layers, from which the rates follow.
    num_layers: int

    def weights(self, hidden_size: int) -> Weights:
        heads = self.heads_cut
        # Published checkpoints have no rates; those that transformers has saved do.
        rates = (self.num_value_heads, 1, 1)
        yield Weight("slope_rate", rates, "float32", cut=heads, may_be_missing=True)
        parts = {"qkv_proj": (self.conv_size, heads), "output_gate": (self.value_size, heads)}
        yield from fused("in_proj", hidden_size, parts)
        yield from rms_norm("norm", self.value_size, heads)
        yield from self.output("out_proj", hidden_size)
