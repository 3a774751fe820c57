"""Linear layers: alone, fused, and divided over tensor-parallel ranks.

Modules here hold parameters on the `meta` device until the loader fills them, in the shapes that the layer's
value declares (`rank_weights`). Checkpoints that mix by head what is computed apart are put in order by the
functions at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from gpu_service.core.parallel import ParallelContext
from gpu_service.core.step import ForwardInputs
from gpu_service.device.stream import own_pages
from gpu_service.layers.rank_weights import RankWeights, empty_parameter
from gpu_service.ops.linear import GROUP, add_norm_linear, can_pack, fp8_linear, linear, pack_weight
from gpu_service.ops.packed_weight import PackedPart, PackedWeight, packed_bytes
from gpu_service.ops.panel_weight import PanelWeight
from moebius import _kernels
from moebius.models.layers.recurrent import GatedDeltaNet

# What computes with kept weights.
PackedMaker = _kernels.DenseThreads | torch.device
# A weight as `_kernels.DecoderLayers` multiplies by it, the address of its bias, 0: none, and that of the
# order of its outputs, 0: as they are stored.
Projection = tuple[_kernels.DenseMatrix, int, int]


@runtime_checkable
class Packed(Protocol):
    """A module whose parameters are used in another form than the checkpoint's."""

    def pack(self) -> None:
        """From the loaded form to the one in use; called once, when everything is loaded."""


@runtime_checkable
class Scaled(Protocol):
    """A module whose weight may stay in 8 bits with scales of their own, `Weight.scales`."""

    def keep_fp8(self) -> None:
        """Hold the weight in e4m3; the loader calls this before filling it."""


class Seam(NamedTuple):
    """What the input of a module is the RMS norm of; the first arguments of `add_norm_linear`."""

    residual: torch.Tensor  # [T, N]
    update: torch.Tensor | None  # [T, N], to be added to it
    norm_weight: torch.Tensor  # [N]
    eps: float


@runtime_checkable
class ReadsSeam(Protocol):
    """A module that starts with a product of its input, which may be one kernel with the norm before it."""

    def read_seam(self, seam: Seam, inputs: ForwardInputs) -> tuple[torch.Tensor, ...] | None:
        """Returns the sum, its norm, and what else `forward` is to be called with; None: it reads a norm
        alone.
        """


class StoredWeight(nn.Module):
    """A module with one `weight` `[rows, columns]` that can be used in the checkpoint's own format.

    Kept so, the parameter is the packed memory, uint8 `[bytes]`, and `packed` what computes with it.
    """

    def __init__(self, own: RankWeights) -> None:
        super().__init__()
        self.weight = own.parameter("weight")
        self.weight_shape = self.weight.shape
        # Of a weight that is kept: its parts, and the whole once it has memory.
        self.packed_parts: tuple[PackedPart, ...] = ()
        self.packed: PackedWeight | PanelWeight | None = None
        self._weight_dtype = self.weight.dtype

    def keep_packed(self, parts: tuple[PackedPart, ...]) -> None:
        """Hold the weight as parts in stored formats; the loader calls this before it gives memory."""
        self.packed_parts = parts
        self.weight = empty_parameter(packed_bytes(self.weight_shape[1], parts), dtype=torch.uint8)

    def make_packed(self, maker: PackedMaker) -> PackedWeight | PanelWeight:
        """Returns the kept weight, which gets memory at the first call.

        `maker`: threads of a CPU that will compute with it, or the device that will.
        """
        if self.packed is not None:
            return self.packed
        columns = self.weight_shape[1]
        if isinstance(maker, torch.device):
            self.packed = PanelWeight(columns, self.packed_parts, maker, self._weight_dtype)
            self.weight = self.packed.memory
        else:
            memory = own_pages(self.weight.shape, torch.uint8)
            self.weight = nn.Parameter(memory, requires_grad=False)
            self.packed = PackedWeight(maker, columns, self.packed_parts, memory)
        return self.packed


class Linear(StoredWeight):
    """`y = x W^T + b`; weight `[out_features, in_features]`.

    Several projections of one input may be one product: their rows lie in the order in which they are
    declared. A rank that holds some rows (column parallel) needs no exchange for what it computes.
    """

    def __init__(self, own: RankWeights, order: Sequence[int] | None = None) -> None:
        """`order`: where the checkpoint mixes what is to lie apart, the loaded rows in the order that they
        are computed in; None: as they are loaded, of a tensor that is loaded whole those that the rank keeps.
        """
        super().__init__(own)
        self.bias = own.optional("bias")
        self._order = own.kept("weight") if order is None else list(order)
        # Of a weight kept in 8 bits; its first column is this one of its group.
        self.weight_scales: nn.Parameter | None = None
        self._first_column = 0
        # Of a kept weight, filled by `pack`: the bias, on a CPU in float32, and the order of outputs where it
        # differs.
        self._wide_bias: torch.Tensor | None = None
        self._output_order: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps `[..., in_features]` to `[..., out_features]`."""
        return self._gemm(hidden_states, self.bias)

    def _gemm(self, hidden_states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.packed is not None:
            product = self.packed.linear(hidden_states, None if bias is None else self._wide_bias)
            return product if self._output_order is None else product[..., self._output_order]
        if self.weight_scales is None:
            return linear(hidden_states, self.weight, bias)
        return fp8_linear(hidden_states, self.weight, self.weight_scales, self._first_column, bias)

    @property
    def projection(self) -> Projection | None:
        """The weight that a CPU keeps, its bias and the order of its outputs; None: there is none."""
        if not isinstance(self.packed, PackedWeight):
            return None
        parts = self._wide_bias, self._output_order
        bias, order = (0 if part is None else part.data_ptr() for part in parts)
        return self.packed.matrix, bias, order

    def after_seam(self, seam: Seam) -> tuple[torch.Tensor, ...] | None:
        """Returns what `add_norm_linear` returns, the product being `forward`'s; None: of weights kept as
        stored.
        """
        if self.weight_scales is not None or self.packed is not None:
            return None
        return add_norm_linear(*seam, self.weight, self.bias)

    def keep_fp8(self, first_column: int) -> None:
        """Hold the weight as `ops.linear.fp8_linear` takes it; the loader calls this before filling it."""
        rows, columns = self.weight.shape
        groups = -(-(first_column + columns) // GROUP)
        self.weight = empty_parameter(rows, columns, dtype=torch.float8_e4m3fn)
        self.weight_scales = empty_parameter(rows, groups, dtype=torch.float32)
        self._first_column = first_column

    def pack(self) -> None:
        """Put the loaded weight into the device's fastest layout, in place of the plain one, rows in their
        order; of a kept weight products are ordered.
        """
        if self._order is not None and self.packed is not None:
            self._output_order = torch.tensor(self._order, device=self.weight.device)
        elif self._order is not None:
            for name, rows in list(self.named_parameters(recurse=False)):
                # As bytes where it can be, because torch indexes no 8-bit floats.
                plain = rows.view(torch.uint8) if rows.element_size() == 1 else rows
                ordered = plain[self._order].view(rows.dtype)
                setattr(self, name, nn.Parameter(ordered, requires_grad=False))
        if self.packed is not None:
            self.packed.calibrate()
            # On a GPU the parameter itself: kernels convert it, and it was there long before they begin.
            widens = self.bias is not None and isinstance(self.packed, PackedWeight)
            self._wide_bias = self.bias.float() if widens and self.bias is not None else self.bias
        elif can_pack(self.weight):
            self.weight = nn.Parameter(pack_weight(self.weight), requires_grad=False)


class RowParallelLinear(Linear):
    """A GEMM whose input is divided over ranks: each multiplies its columns, the results are summed.

    With `reduce=False` the sum is left to the caller, who has more to add before it. The bias is added by
    the first rank only, so that the sum holds it once.
    """

    def __init__(self, own: RankWeights, parallel: ParallelContext, *, reduce: bool = True) -> None:
        super().__init__(own)
        self._adds_bias = parallel.tp_rank == 0
        self._group = parallel.tensor_group if reduce else None
        self._num_ranks = parallel.tp_size

    @property
    def projection(self) -> Projection | None:
        """Returns `Linear.projection`; None also where what it computes is a part of a sum over ranks."""
        return super().projection if self._num_ranks == 1 else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns `[T, in_features]` of this rank to `[T, out_features]`, summed over ranks unless
        `reduce=False`.
        """
        output = self._gemm(hidden_states, self.bias if self._adds_bias else None)
        return output if self._group is None else self._group.all_reduce(output)


def _apart(begin: int, heads: int, widths: Sequence[int]) -> Iterator[list[int]]:
    """Yields the rows from `begin` on, `widths` of each part for every head: for each part, those of all
    heads.
    """
    stride, offset = sum(widths), 0
    for width in widths:
        firsts = (begin + head * stride + offset for head in range(heads))
        yield [row for first in firsts for row in range(first, first + width)]
        offset += width


def gated_query_order(num_heads: int, num_kv_heads: int, head_dim: int) -> list[int]:
    """Returns a query projection with each head's query, then its gate; keys; values: the gates go last."""
    query, gate = _apart(0, num_heads, (head_dim, head_dim))
    begin = 2 * num_heads * head_dim
    return [*query, *range(begin, begin + 2 * num_kv_heads * head_dim), *gate]


def lightning_order(num_heads: int, head_dim: int) -> list[int]:
    """Returns a projection with each head's query, key and value: values of all heads, then keys, then
    queries.
    """
    query, key, value = _apart(0, num_heads, (head_dim,) * 3)
    return [*value, *key, *query]


def linear_attention_order(spec: GatedDeltaNet) -> list[int]:
    """Returns the rows of `in_proj_qkvz`, then of `in_proj_ba`, as queries, keys, values, gates, b, a of all
    heads.

    The checkpoint has for each key head: its query, its key, the values and then the gates of the value heads
    it serves; and b, then a of these.
    """
    heads = spec.num_key_heads
    repeats = spec.num_value_heads // heads
    values = repeats * spec.value_head_dim
    widths = (spec.key_head_dim, spec.key_head_dim, values, values)
    parts = (*_apart(0, heads, widths), *_apart(heads * sum(widths), heads, (repeats, repeats)))
    return [row for part in parts for row in part]
