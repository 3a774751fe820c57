"""What a rank's weights take in memory, from what layers declare and how the checkpoint stores it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import nn

from gpu_service.core.parallel import ParallelContext
from gpu_service.core.partition import rank_layers
from gpu_service.device import TORCH_DTYPES
from gpu_service.layers.linear import Linear, Scaled, StoredWeight
from gpu_service.ops.linear import GROUP
from gpu_service.ops.packed_weight import PackedPart, packed_bytes
from moebius.models.config import ModelConfig
from moebius.models.layers.layer import Layer
from moebius.models.layers.weights import Weight


class KeptForm(Protocol):
    """How a module holds its `weight` instead of as values; found before the module has memory."""

    def hold(self, module: nn.Module) -> None:
        """Makes the module hold it so."""

    def nbytes(self, rows: int, columns: int) -> int:
        """Returns the bytes of such a weight, all that comes with it included."""

    def num_elements(self, rows: int, columns: int) -> int:
        """Returns the number of its elements, those of scales of its own included."""


@dataclass(frozen=True, slots=True)
class Fp8Form:
    """Codes as they are stored, and scales of groups of columns: see `ops.linear.fp8_linear`."""

    first_column: int  # Of its group.

    def hold(self, module: nn.Module) -> None:
        assert isinstance(module, Linear)
        module.keep_fp8(self.first_column)

    def nbytes(self, rows: int, columns: int) -> int:
        return rows * (columns + 4 * self._groups(columns))

    def num_elements(self, rows: int, columns: int) -> int:
        return rows * (columns + self._groups(columns))

    def _groups(self, columns: int) -> int:
        return -(-(self.first_column + columns) // GROUP)


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Packed formats that hold what is stored."""

    parts: tuple[PackedPart, ...]

    def hold(self, module: nn.Module) -> None:
        assert isinstance(module, StoredWeight)
        module.keep_packed(self.parts)

    def nbytes(self, rows: int, columns: int) -> int:
        return packed_bytes(columns, self.parts)

    def num_elements(self, rows: int, columns: int) -> int:
        return rows * columns


@dataclass(frozen=True, slots=True)
class ScaledForm:
    """8-bit floats with scales that are a weight by themselves."""

    def hold(self, module: nn.Module) -> None:
        assert isinstance(module, Scaled)
        module.keep_fp8()

    def nbytes(self, rows: int, columns: int) -> int:
        return rows * columns

    def num_elements(self, rows: int, columns: int) -> int:
        return rows * columns


# By the path of the parameter.
KeptForms = Mapping[str, KeptForm]


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """One parameter of a rank; filled by `held_weights`."""

    weights: tuple[Weight, ...]  # That fill it.
    rows: tuple[int, ...]  # Which each of them does.
    dtype: torch.dtype  # Of values.
    nbytes: int
    num_elements: int
    is_kept: bool  # Whether it is held in a `KeptForm`.
    parts: tuple[PackedPart, ...] = ()  # Of a weight held in a `PackedForm`.

    @property
    def on_host(self) -> bool:
        """Returns whether a GPU leaves it in the host's memory, and reads single rows of it."""
        return self.weights[0].on_host

    @property
    def use(self) -> str:
        """Returns what it is used for, as `Weight.use`."""
        return self.weights[0].use

    @property
    def largest_part(self) -> int:
        """Returns the bytes of the largest part that a checkpoint stores as one tensor."""
        return self.nbytes * max(self.rows) // max(1, sum(self.rows))


@dataclass(frozen=True)
class HeldWeights:
    """All weights of a rank, of no routed expert."""

    config: ModelConfig
    parallel: ParallelContext
    on_cpu: bool
    parameters: tuple[HeldParameter, ...]

    @property
    def rank_layers(self) -> tuple[Layer, ...]:
        """The rank's own layers."""
        return rank_layers(self.config, self.parallel)

    # A plan asks for sums in every attempt.
    @cached_property
    def host_bytes(self) -> int:
        """Bytes in the host's memory next to a GPU."""
        return sum(held.nbytes for held in self.parameters if held.on_host and not self.on_cpu)

    @cached_property
    def table_bytes(self) -> int:
        """Bytes of tables that stay in the host's memory beside a GPU, or of their rows that are kept."""
        return sum(held.nbytes for held in self.parameters if held.on_host)

    @cached_property
    def device_bytes(self) -> int:
        """Bytes where the model computes."""
        return sum(held.nbytes for held in self.parameters) - self.host_bytes


def held_weights(
    config: ModelConfig,
    parallel: ParallelContext,
    weights: Iterable[Weight],
    forms: KeptForms,
    *,
    on_cpu: bool,
) -> HeldWeights:
    """Returns what a rank holds of the declared weights; `forms`: of parameters that are not values."""
    rank, found = (parallel.tp_rank, parallel.tp_size), dict[str, list[Weight]]()
    for weight in weights:
        found.setdefault(weight.parameter, []).append(weight)
    parameters = [_held(filling, config, rank, forms.get(name)) for name, filling in found.items()]
    return HeldWeights(config, parallel, on_cpu, tuple(parameters))


def _held(
    weights: list[Weight], config: ModelConfig, rank: tuple[int, int], form: KeptForm | None
) -> HeldParameter:
    shapes = [weight.held_shape(*rank) for weight in weights]
    rows, rest = tuple(shape[0] for shape in shapes), shapes[0][1:]
    types = {"activation": TORCH_DTYPES[config.dtype], "float32": torch.float32, "int32": torch.int32}
    types["e8m0"] = torch.uint8
    dtype, elements = types[weights[0].dtype], sum(rows) * math.prod(rest)
    if form is None:
        return HeldParameter(tuple(weights), rows, dtype, elements * dtype.itemsize, elements, False)
    sizes = sum(rows), math.prod(rest)
    parts = form.parts if isinstance(form, PackedForm) else ()
    nbytes, elements = form.nbytes(*sizes), form.num_elements(*sizes)
    return HeldParameter(tuple(weights), rows, dtype, nbytes, elements, True, parts)
