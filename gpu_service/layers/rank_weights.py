"""A rank's parameters as the layers' values declare them; no module computes a shape of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gpu_service.core.parallel import SOLO, ParallelContext
from moebius.models.layers.ranks import ShardRange
from moebius.models.layers.weights import Weight

_TYPES = {"float32": torch.float32, "int32": torch.int32, "e8m0": torch.uint8}


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Returns a parameter without memory; the loader gives it memory and values."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


class RankWeights:
    """The declared weights below one name, by the parameters that they fill."""

    def __init__(
        self,
        declared: Iterable[Weight],
        dtype: torch.dtype,
        parallel: ParallelContext = SOLO,
        prefix: str = "",
    ) -> None:
        """`dtype`: of activations; `prefix`: what all their names begin with, up to a point."""
        self._declared, self._prefix = tuple(declared), prefix
        self._dtype, self._parallel = dtype, parallel

    def under(self, name: str) -> RankWeights:
        """Returns those of a module below; none where nothing is declared of it."""
        prefix = f"{self._prefix}{name}."
        found = (weight for weight in self._declared if weight.parameter.startswith(prefix))
        return RankWeights(found, self._dtype, self._parallel, prefix)

    def __bool__(self) -> bool:
        """Returns whether anything is declared."""
        return bool(self._declared)

    def parameter(self, name: str) -> nn.Parameter:
        """Returns a parameter without memory, of all rows that fill it. Raises KeyError: not declared."""
        found = self.optional(name)
        if found is None:
            raise KeyError(f"{self._prefix}{name} is not declared")
        return found

    def optional(self, name: str) -> nn.Parameter | None:
        """Returns the same; None: it is not declared."""
        weights = self._of(name)
        if not weights:
            return None
        shapes = [weight.held_shape(*self._rank) for weight in weights]
        rows = sum(shape[0] for shape in shapes)
        dtype = _TYPES.get(weights[0].dtype, self._dtype)
        return empty_parameter(rows, *shapes[0][1:], dtype=dtype)

    def rows(self, name: str) -> ShardRange:
        """Returns the rows that the rank has of the one tensor that fills a parameter."""
        (weight,) = self._of(name)
        return weight.parts(*self._rank)[0]

    def kept(self, name: str) -> list[int] | None:
        """Returns which elements, along the axis that is cut, the rank keeps of those that are loaded; None:
        all.
        """
        weights = self._of(name)
        sizes = [weight.shape[weight.axis] for weight in weights]
        own = [weight.cut.kept(size, *self._rank) for weight, size in zip(weights, sizes, strict=True)]
        if all(each is None for each in own):
            return None
        kept, begin = list[int](), 0
        for weight, size, each in zip(weights, sizes, own, strict=True):
            loaded = weight.cut.part(size, *self._rank).size
            kept += [begin + index for index in (range(loaded) if each is None else each)]
            begin += loaded
        return kept

    @property
    def _rank(self) -> tuple[int, int]:
        return self._parallel.tp_rank, self._parallel.tp_size

    def _of(self, name: str) -> list[Weight]:
        return [weight for weight in self._declared if weight.parameter == f"{self._prefix}{name}"]
