"""What a part of a layer stores in a checkpoint: names, shapes, types, and what of it each rank has.

Each value of a layer declares its weights once; modules, loader, plans and random models go by that alone.
Names are canonical ones (`moebius.models.names`) below the part; shapes are the whole model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from moebius.models.layers.ranks import WHOLE, Cut, ShardRange

# "activation": the type that the model is computed in; "e8m0": bytes that stand for powers of two.
WeightType = Literal["activation", "float32", "int32", "e8m0"]
# "product": multiplies activations, and "lookup": is read by rows; both may stay in a quantised checkpoint's
# format. "values": its numbers are used otherwise.
WeightUse = Literal["product", "lookup", "values"]


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint; of a quantised matrix, the values that it stands for."""

    name: str
    shape: tuple[int, ...]
    dtype: WeightType = "activation"
    use: WeightUse = "values"
    cut: Cut = WHOLE
    axis: int = 0  # Which the cut divides: rows or columns.
    # The parameter that it fills together with others, whose rows follow its own; empty: one of its name.
    into: str = ""
    may_be_missing: bool = False  # Whether it is zero where the checkpoint leaves it out.
    # Whether it stays in the host's memory next to a GPU, which reads single rows of it.
    on_host: bool = False
    # The scale of its values where the checkpoint stores them in 8 bits, and they stay so; empty: such values
    # are not kept.
    scale: str = ""
    scale_columns: int = 0  # Columns of a row that have one, a power of two; 0: all values have the same.

    @property
    def parameter(self) -> str:
        """The name of the parameter that it fills, or a part of whose rows."""
        return self.into or self.name

    def under(self, prefix: str) -> Weight:
        """Returns the same weight with names below `prefix`."""
        into, scale = (f"{prefix}.{name}" if name else "" for name in (self.into, self.scale))
        return replace(self, name=f"{prefix}.{self.name}", into=into, scale=scale)

    @property
    def scales(self) -> Weight:
        """The scale as a weight by itself."""
        if not self.scale_columns:
            return Weight(self.scale, (1,), "float32")
        shape = self.shape[0], self.shape[1] // self.scale_columns
        return Weight(self.scale, shape, "e8m0", cut=self.cut, on_host=self.on_host)

    def parts(self, rank: int, count: int) -> tuple[ShardRange, ShardRange | None]:
        """Returns the rows and the columns that a rank reads; None: it has one dimension."""
        found = [
            (self.cut if axis == self.axis else WHOLE).part(size, rank, count)
            for axis, size in enumerate(self.shape[:2])
        ]
        return found[0], found[1] if len(found) > 1 else None

    def held_shape(self, rank: int, count: int) -> tuple[int, ...]:
        """Returns the shape of what a rank has memory for."""
        held = self.cut.held(self.shape[self.axis], rank, count)
        return (*self.shape[: self.axis], held, *self.shape[self.axis + 1 :])

    @property
    def num_elements(self) -> int:
        """Elements of the whole model's tensor."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Returns whether more than one dimension has more than one element."""
        return sum(size > 1 for size in self.shape) > 1


Weights = Iterator[Weight]


def under(prefix: str, weights: Iterable[Weight]) -> Weights:
    """Yields the weights with names below `prefix`."""
    for weight in weights:
        yield weight.under(prefix)


def matrix_elements(weights: Iterable[Weight]) -> int:
    """Returns the elements of all matrices, without norms, biases and vectors of heads."""
    return sum(weight.num_elements for weight in weights if weight.is_matrix)


def linear(
    name: str,
    rows: int,
    columns: int,
    *,
    bias: bool = False,
    cut: Cut = WHOLE,
    axis: int = 0,
    into: str = "",
    dtype: WeightType = "activation",
) -> Weights:
    """Yields a projection to `rows` elements, and its bias; with columns cut (`axis` 1) every rank has all of
    the bias.
    """
    places = [f"{into}.{suffix}" if into else "" for suffix in ("weight", "bias")]
    yield Weight(f"{name}.weight", (rows, columns), dtype, "product", cut, axis, places[0])
    if bias:
        of_bias = WHOLE if axis else cut
        yield Weight(f"{name}.bias", (rows,), dtype, cut=of_bias, into=places[1])


def fused(into: str, columns: int, parts: Mapping[str, tuple[int, Cut]], *, bias: bool = False) -> Weights:
    """Yields projections of one input that one product computes: `parts` are rows and their cut by name."""
    for name, (rows, cut) in parts.items():
        yield from linear(name, rows, columns, bias=bias, cut=cut, into=into)


def conv_taps(
    name: str, channels: int, width: int, cut: Cut = WHOLE, *, bias: bool = False, into: str = ""
) -> Weights:
    """Yields the taps of a causal convolution of each channel by itself, and its bias."""
    yield Weight(f"{name}.weight", (channels, 1, width), cut=cut, into=f"{into}.weight" if into else "")
    if bias:
        yield Weight(f"{name}.bias", (channels,), cut=cut)


def rms_norm(name: str, size: int, cut: Cut = WHOLE) -> Weights:
    """Yields the weight of a norm that divides by the root mean square."""
    yield Weight(f"{name}.weight", (size,), cut=cut)


def layer_norm(name: str, size: int) -> Weights:
    """Yields weight and bias of a norm that takes off the mean first."""
    yield Weight(f"{name}.weight", (size,))
    yield Weight(f"{name}.bias", (size,))
