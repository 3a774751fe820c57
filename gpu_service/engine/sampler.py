"""From logits to tokens: bias, penalties, masks, temperature, truncation, one draw per row.

A row's token depends on its own logits, parameters, counts and uniform number only, never on the other
rows of the batch. Knows nothing of requests and pages. Nothing here waits for the device: what decides
which rows are treated how is in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_service.engine.logprobs import token_logprobs
from gpu_service.engine.penalties import PenaltyCounts
from gpu_service.engine.sampling_plan import SamplingPlan
from gpu_service.ops.sampling import argmax_and_finite, truncate_probabilities


@dataclass(frozen=True, slots=True)
class Sampled:
    """R = rows; filled by `Sampler.sample`."""

    token_ids: torch.Tensor  # int64 [R]
    finite: torch.Tensor  # bool [R]; False: the logits held NaN or Inf and the token means nothing
    # For plan.logprob_rows: chosen [P], top ids [P, N], top values [P, N].
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None


class Sampler:
    """Batched sampling in float32 (probabilities are summed in float64). Runs in stream order.

    `num_slots`: slots whose counts are allocated now; 0: at first use.
    """

    def __init__(self, vocab_size: int, device: torch.device, num_slots: int = 0) -> None:
        self.penalties = PenaltyCounts(vocab_size, device, num_slots)

    def greedy(self, logits: torch.Tensor) -> Sampled:
        """The likeliest token of each row of float32 `[R, V]` logits; may be captured in a graph."""
        token_ids, finite = argmax_and_finite(logits)
        return Sampled(token_ids, finite, None)

    def sample(self, logits: torch.Tensor, plan: SamplingPlan) -> Sampled:
        """Draws a token for each row of float32 `[R, V]` logits, which are not changed.

        Order: logit bias, penalties, min_tokens mask, temperature, min_p, top_k, top_p, draw; that is
        vLLM's order, so that equal parameters mean equal distributions.
        """
        adjusted = self._adjust(logits, plan)
        token_ids, finite = argmax_and_finite(logits)
        if adjusted is not logits:
            # Not finite by intention where tokens are banned.
            token_ids, _ = argmax_and_finite(adjusted)
        if plan.random_rows.numel():
            token_ids[plan.random_rows] = self._draw(adjusted, plan)
        if plan.penalties is not None:
            self.penalties.advance(plan.penalties, token_ids)
        logprobs = None
        if plan.logprob_rows:
            rows = plan.logprob_index
            logprobs = token_logprobs(logits[rows], token_ids[rows], plan.num_top_logprobs)
        return Sampled(token_ids, finite, logprobs)

    def _adjust(self, logits: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
        if plan.bias is None and plan.penalties is None and plan.banned is None:
            return logits
        logits = logits.clone()
        if plan.bias is not None:
            logits[plan.bias.rows, plan.bias.token_ids] += plan.bias.values
        if plan.penalties is not None:
            self.penalties.apply(logits, plan.penalties)
        if plan.banned is not None:
            logits[plan.banned.rows, plan.banned.token_ids] = plan.banned.values
        return logits

    def _draw(self, logits: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
        rows = plan.random_rows
        logits = logits[rows] / plan.temperature[rows].unsqueeze(1)
        # NaN would make every comparison below false; such rows fail anyway, by `finite`.
        probabilities = torch.softmax(logits, dim=-1).nan_to_num_(0.0)
        floor = probabilities.amax(dim=-1, keepdim=True) * plan.min_p.unsqueeze(1)
        probabilities = torch.where(probabilities >= floor, probabilities, 0.0)
        cut = plan.truncated
        if cut.numel():
            kept = truncate_probabilities(probabilities[cut], plan.top_k[cut], plan.top_p[cut])
            probabilities[cut] = kept
        return _inverse_cdf(probabilities, plan.uniform)


def _inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative weight exceeds `uniform` times the total: never one of weight 0."""
    cumulative = weights.double().cumsum(dim=-1)
    target = uniform.unsqueeze(1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return index.clamp_(max=weights.shape[-1] - 1)
