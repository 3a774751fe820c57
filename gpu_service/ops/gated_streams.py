"""Gated residual streams (Qwen4): hyper-connections that norm and mix N streams element by element.

Before each half of a layer the N streams of a token are normed, each by itself, and its input is

    1/N * sum over n of sigmoid(mix_n) * normed_n        (element by element)

where `mix` is a projection of all normed streams through a bottleneck. Afterwards the half's output is added
to stream n, times 2 * sigmoid(inject_n / N), one number that is projected from the normed streams as well.
"""

from __future__ import annotations

import torch

from gpu_service.ops.registry import Op


@Op
def norm_streams(streams: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The RMS norm of each of N streams by itself, each with a weight of its own.

    streams `[T, N, H]`, contiguous; weight float32 `[N, H]`. Statistics and weight in float32. Returns a new
    `[T, N, H]` of the streams' dtype.
    """
    normed = torch.rms_norm(streams.float(), streams.shape[2:], None, eps)
    return (normed * weight).to(streams.dtype)


@Op
def mix_gated_streams(mix: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """Computes `1/N * sum over n of sigmoid(mix_n) * normed_n`: mix `[T, N * H]`, normed `[T, N, H]`, both
    contiguous.

    Returns `[T, H]` of their dtype, summed in float32.
    """
    weights = mix.view(normed.shape).float().sigmoid()
    return (weights * normed.float()).mean(1).to(normed.dtype)


@Op
def inject_update(update: torch.Tensor, streams: torch.Tensor, inject: torch.Tensor) -> torch.Tensor:
    """Returns the streams after one half of a layer, in place, and returned: `+= 2 * sigmoid(inject / N) *
    update`.

    update `[T, H]`, which may be float32 where the streams `[T, N, H]` are not; inject `[T, N]` (columns
    contiguous), of the streams' dtype. Rounded once.
    """
    weights = 2 * (inject.float() / streams.shape[1]).sigmoid()
    return streams.copy_(streams.float() + weights[..., None] * update[:, None].float())


@Op
def gate_values(
    keys: torch.Tensor,
    streams: torch.Tensor,
    values: torch.Tensor,
    key_weight: torch.Tensor,
    query_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Returns what embeddings of n-grams add to each stream, before its convolution: `[T, N, H]`.

    The gate of a stream is `sigmoid(sign(s) sqrt(max(|s|, 1e-6)))`, where s is the product of a key with the
    stream, both normed (`norm_streams`), divided by sqrt(H); it multiplies one value `[T, H]` of all streams.
    keys and streams `[T, N, H]`, those contiguous, the others but for the tokens; values `[T, H]` (columns
    contiguous), all of one dtype; the weights of both norms float32 `[N, H]`. Computed in float32.
    """
    size = streams.shape[2:]
    normed = torch.rms_norm(keys.float(), size, None, eps) * key_weight
    query = torch.rms_norm(streams.float(), size, None, eps) * query_weight
    score = (normed * query).sum(-1, keepdim=True) * size[0] ** -0.5
    gate = (score.abs().clamp_min(1e-6).sqrt() * score.sign()).sigmoid()
    gated: torch.Tensor = gate * values[:, None].float()
    return gated.to(values.dtype)
