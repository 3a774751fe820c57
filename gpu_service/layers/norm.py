"""RMSNorm in the forms that families have (plain, `(1 + w)`, over all heads together), and LayerNorm."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from gpu_service.core.parallel import Collectives
from gpu_service.layers.rank_weights import RankWeights
from gpu_service.ops.norm import fused_add_rms_norm, rms_norm
from moebius import _kernels
from moebius.models.layers import norms


class Norm(nn.Module):
    """A norm over the last dimension with a learned weight `[size]`: of which kind, its subclass says.

    Who asks for an `RMSNorm` may compute it in a fused kernel from weight and `eps` alone; of any other norm
    only what is called here is known.
    """

    def __init__(self, own: RankWeights, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = own.parameter("weight"), eps

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

    def pack(self) -> None:
        """Turns the checkpoint's weight into the factor; the loader calls it once."""
        self.weight = nn.Parameter(self.weight + 1.0, requires_grad=False)


class ScaledRMSNorm(RMSNorm):
    """The norm before a router whose weight counts `size^-0.5` times; `pack` puts the factor into it."""

    def pack(self) -> None:
        """Turns the checkpoint's weight into the factor; the loader calls it once."""
        self.weight = nn.Parameter(self.weight * self.weight.shape[0] ** -0.5, requires_grad=False)


class MeanRemovingNorm(Norm):
    """LayerNorm where other families have `RMSNorm`; with a bias `[size]` or none. Computed in float32."""

    def __init__(self, own: RankWeights, eps: float) -> None:
        super().__init__(own, eps)
        self.bias = own.optional("bias")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; returns a new tensor."""
        return functional.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(norm: norms.Norm, own: RankWeights) -> Norm:
    """Returns the norm that a layer's value describes."""
    return MeanRemovingNorm(own, norm.eps) if isinstance(norm, norms.LayerNorm) else make_rms_norm(norm, own)


def make_rms_norm(norm: norms.RMSNorm, own: RankWeights) -> RMSNorm:
    """Returns the same for who computes it from its weight alone."""
    return (OnePlusWeightRMSNorm if norm.one_plus_weight else RMSNorm)(own, norm.eps)


class FullWidthNorm(nn.Module):
    """The weights of a rank's heads, of a root-mean-square norm over the whole projection."""

    def __init__(self, own: RankWeights, num_ranks: int, eps: float) -> None:
        """Several of `num_ranks` may hold the same rows of the projection."""
        super().__init__()
        self.weight = own.parameter("weight")
        self.rows, self.eps = own.rows("weight"), eps
        # Elements that the squares of all ranks are of, those that several hold counted as often.
        self.counted = self.rows.size * num_ranks

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

    def __init__(self, own: RankWeights, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = own.parameter("weight"), own.parameter("bias"), eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; returns a new tensor."""
        return functional.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, self.eps)
