"""Log-probabilities from the raw logits, before bias, penalties and temperature."""

from __future__ import annotations

import torch

from gpu_service.request import TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits float32 `[L, V]`, chosen ids int64 `[L]`.

    Returns the chosen tokens' natural log-probabilities `[L]`, and the `num_top` best ids and
    log-probabilities `[L, num_top]`, best first.
    """
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - normaliser
    top = min(num_top, logits.shape[-1])
    # At least one: not every device takes an empty selection.
    values, ids = torch.topk(logits, max(top, 1), dim=-1)
    return chosen.squeeze(1), ids[:, :top], (values - normaliser)[:, :top]


def to_records(
    token_ids: list[int], computed: tuple[torch.Tensor, torch.Tensor, torch.Tensor], num_top: list[int]
) -> list[TokenLogprobs]:
    """Host records; row l keeps its own `num_top[l]` alternatives."""
    chosen, ids, values = (tensor.tolist() for tensor in computed)
    return [
        TokenLogprobs(token_id, chosen[row], tuple(ids[row][:top]), tuple(values[row][:top]))
        for row, (token_id, top) in enumerate(zip(token_ids, num_top, strict=True))
    ]
