"""RMSNorm in the forms that families have (plain, `(1 + w)`, over all heads together), and LayerNorm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from gpu_service.core.parallel import Collectives
from gpu_service.layers.linear import CheckpointPart, empty_parameter
from gpu_service.ops.norm import fused_add_rms_norm, rms_norm
from moebius import _kernels
from moebius.models.layers import norms
from moebius.models.layers.ranks import ShardRange


class Norm(nn.Module):
    """A norm over the last dimension with a learned weight `[size]`: of which kind, its subclass says.

    Who asks for an `RMSNorm` may compute it in a fused kernel from weight and `eps` alone; of any other norm
    only what is called here is known.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; returns a new tensor."""
        raise NotImplementedError

    def after_adding(self, update: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Computes `residual += update` in place, then the sum's norm; both `[T, N]`.

        May overwrite the update.
        """
        normed: torch.Tensor = self(residual.add_(update))
        return normed


class RMSNorm(Norm):
    """`ops.norm.rms_norm`."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; returns a new tensor."""
        return rms_norm(hidden_states, self.weight, self.eps)

    def after_adding(self, update: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Computes `residual += update` in place, then the sum's norm; both `[T, N]`.

        May overwrite the update.
        """
        return fused_add_rms_norm(update, residual, self.weight, self.eps)

    def host_weights(self) -> _kernels.NormWeights:
        """Returns the norm as `_kernels.DecoderLayers` computes it."""
        return _kernels.NormWeights(self.weight.data_ptr(), self.weight.dtype == torch.bfloat16, self.eps)


class OnePlusWeightRMSNorm(RMSNorm):
    """The norm of families whose checkpoints hold `weight - 1`: it multiplies by 1 + what was stored.

    The one is added once, by `pack`, so that every implementation of the op serves both norms. The sum is
    kept in float32: a stored 0.003 would be lost next to a 1 in bfloat16.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        """`dtype` is that of the activations; the weight is float32 whatever it is."""
        super().__init__(size, eps, dtype=torch.float32)

    def pack(self) -> None:
        """Turns the checkpoint's weight into the factor; the loader calls it once."""
        self.weight = nn.Parameter(self.weight + 1.0, requires_grad=False)


class ScaledRMSNorm(RMSNorm):
    """The norm before a router whose weight counts `size^-0.5` times; `pack` puts the factor into it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps, dtype=torch.float32)

    def pack(self) -> None:
        """Turns the checkpoint's weight into the factor; the loader calls it once."""
        self.weight = nn.Parameter(self.weight * self.weight.shape[0] ** -0.5, requires_grad=False)


class MeanRemovingNorm(Norm):
    """LayerNorm where other families have `RMSNorm`; with a bias `[size]` or none. Computed in float32."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__(size, eps, dtype=dtype)
        self.bias = empty_parameter(size, dtype=dtype) if bias else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; returns a new tensor."""
        return functional.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(norm: norms.Norm, size: int, *, dtype: torch.dtype) -> Norm:
    """Returns the norm over `size` elements that a layer's value describes."""
    if isinstance(norm, norms.LayerNorm):
        return MeanRemovingNorm(size, norm.eps, dtype=dtype, bias=norm.bias)
    return make_rms_norm(norm, size, dtype=dtype)


def make_rms_norm(norm: norms.RMSNorm, size: int, *, dtype: torch.dtype) -> RMSNorm:
    """Returns the same for who computes it from its weight alone."""
    kind = OnePlusWeightRMSNorm if norm.one_plus_weight else RMSNorm
    return kind(size, norm.eps, dtype=dtype)


class FullWidthNorm(nn.Module):
    """The weights of a rank's heads, of a root-mean-square norm over the whole projection."""

    def __init__(self, rows: ShardRange, num_ranks: int, eps: float, *, dtype: torch.dtype) -> None:
        """`rows` are the rank's of the projection; of `num_ranks`, several may hold the same ones."""
        super().__init__()
        self.weight = empty_parameter(rows.size, dtype=dtype)
        self.rows, self.eps = rows, eps
        # Elements that the squares of all ranks are of, those that several hold counted as often.
        self.counted = rows.size * num_ranks

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        yield CheckpointPart("", "weight", self.rows, None)

    def apply_statistics(self, values: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """Norms float32 `[T, rows]` by the sum `[T, 1]` of all ranks' squares; rounded before the
        weight.
        """
        normalized = values * torch.rsqrt(squares / self.counted + self.eps)
        return normalized.to(self.weight.dtype) * self.weight


def norm_full_width(
    query_heads: torch.Tensor,
    key_heads: torch.Tensor,
    q_norm: FullWidthNorm,
    k_norm: FullWidthNorm,
    group: Collectives,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms the queries `[T, num_heads, head_dim]` and the keys `[T, num_kv_heads, head_dim]`.

    Heads of a token are contiguous. Returns new tensors of the same shapes. One all-reduce of two numbers a
    token where there are several ranks.
    """
    query, key = query_heads.flatten(1), key_heads.flatten(1)
    if q_norm.rows.is_whole:
        query, key = rms_norm(query, q_norm.weight, q_norm.eps), rms_norm(key, k_norm.weight, k_norm.eps)
    else:
        query, key = query.float(), key.float()
        squares = torch.stack((query.square().sum(dim=-1), key.square().sum(dim=-1)), dim=-1)
        squares = group.all_reduce(squares)
        query = q_norm.apply_statistics(query, squares[:, :1])
        key = k_norm.apply_statistics(key, squares[:, 1:])
    return query.view(query_heads.shape), key.view(key_heads.shape)


class LayerNorm(nn.Module):
    """With a learned weight and bias `[size]`; computed in float32, whatever the type of the rows."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.bias = empty_parameter(size, dtype=dtype)
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; returns a new tensor."""
        return functional.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, self.eps)
