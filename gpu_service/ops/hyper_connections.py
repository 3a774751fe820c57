"""Manifold-constrained hyper-connections: several residual streams instead of one.

Source: mHC (arXiv:2512.24880), as in DeepSeek-V4 and GLM-5.3-Flash. A token has N streams. Before each half
of a layer they are collapsed into its one input; afterwards stream j becomes

    post_j * output + sum over i of comb_ij * stream_i

All weights depend on the streams: of their concatenation, normed, a projection gives N + N + N * N numbers,
which a sigmoid, twice a sigmoid, and a softmax turned doubly stochastic by Sinkhorn's iteration make `pre`,
`post`, `comb`.

Independent hyper-connections (Hy4) have no `comb`: a projection gives N + N numbers, and stream j becomes
`post_j * output + stream_j`.

Lagging hyper-connections (DeepSeek-V4.1): `pre` is what the half before computed, from what it read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from gpu_service.ops.registry import Op


class Collapsed(NamedTuple):
    """What goes into one half of a layer, and how what comes out of it joins the streams again."""

    hidden_states: torch.Tensor  # [T, H], in the streams' dtype
    post: torch.Tensor  # float32 [T, N]
    # float32 [T, N, N]: to stream j from stream i is `[i, j]`; [T, 0, 0]: each stream keeps what it has.
    comb: torch.Tensor
    pre: torch.Tensor  # float32 [T, N], of a half that reads with what the one before gave it; else [0].


@Op
def collapse_streams(
    streams: torch.Tensor,
    projection: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    magnitude: float = 2.0,
    given: torch.Tensor | None = None,
) -> Collapsed:
    """Returns the input of one half of a layer.

    streams `[T, N, H]`, contiguous; projection `[(2 + N) * N, N * H]`, base `[(2 + N) * N]` and scale `[3]`
    float32, in the order of pre, post, comb. `eps` is added to pre, to comb and to the sums that Sinkhorn
    divides by. post is at most `magnitude`. No iterations: there is no comb, projection, base and scale are
    without it (`2 * N` rows, 2 scales), and `eps` is added to post instead. given float32 `[T, N]`: collapses
    the streams with these weights, and returns the computed ones as `pre`.
    """
    num_streams = streams.shape[1]
    mixed = project_streams(streams, projection)
    mixed = mixed * torch.rsqrt(streams.flatten(1).float().square().mean(-1, keepdim=True) + norm_eps)
    ends = num_streams, 2 * num_streams
    pre = mixed[:, : ends[0]] * scale[0] + base[: ends[0]]
    post = mixed[:, ends[0] : ends[1]] * scale[1] + base[ends[0] : ends[1]]
    pre = pre.sigmoid() + eps
    collapsed = ((pre if given is None else given)[..., None] * streams).sum(1).to(streams.dtype)
    kept = pre.new_empty(0) if given is None else pre
    post = magnitude * post.sigmoid()
    if not iterations:
        return Collapsed(collapsed, post + eps, post.new_empty(post.shape[0], 0, 0), kept)
    comb = mixed[:, ends[1] :] * scale[2] + base[ends[1] :]
    weights = comb.view(-1, num_streams, num_streams).softmax(-1) + eps
    weights = weights / (weights.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
        weights = weights / (weights.sum(-2, keepdim=True) + eps)
    return Collapsed(collapsed, post, weights, kept)


def weigh_streams(
    streams: torch.Tensor,
    projection: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
) -> torch.Tensor:
    """Returns the streams `[T, N, H]` as one, `[T, H]`, once at the end of a model: `pre` of
    `collapse_streams`.

    projection `[N, N * H]`, base `[N]` and scale `[1]` float32. Some launches of torch's: once a step.
    """
    mixed = project_streams(streams, projection)
    mixed = mixed * torch.rsqrt(streams.flatten(1).float().square().mean(-1, keepdim=True) + norm_eps)
    pre = (mixed * scale + base).sigmoid() + eps
    return (pre[..., None] * streams).sum(1).to(streams.dtype)


def project_streams(streams: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """Projects the streams before their norm, which is one factor of a token: float32 `[T, rows]`."""
    return functional.linear(streams.flatten(1).float(), projection)


@Op
def mix_streams(
    update: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Returns the streams after one half of a layer, in place, and returned.

    update `[T, H]`, its output, which may be float32 where the streams `[T, N, H]` are not; post and comb as
    in `Collapsed`. Rounded once.
    """
    kept = comb.mT @ streams.float() if comb.shape[1] else streams.float()
    return streams.copy_(kept + post[..., None] * update[:, None].float())
