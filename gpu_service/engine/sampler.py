"""From logits to tokens: bias, penalties, masks, temperature, truncation, one draw per row.

A row's token depends on its own logits, parameters, counts and uniform number only, never on the other
rows of the batch. Knows nothing of requests and pages. Nothing here waits for the device: what decides
which rows are treated how is in the plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from gpu_service.core.step import BadWords, PenaltyRows, SamplingPlan
from gpu_service.engine.results import Logprobs, Sampled
from gpu_service.ops.sampling import argmax_and_finite, mask_logits, truncate_probabilities


class PenaltyCounts:
    """One row of counts per slot. Rows are allocated at first use, or at once for `num_slots` slots.

    All methods must run in stream order, and none waits for the device. Meaning of the penalties as in
    protos/engine.proto: repetition looks at prompt and output, presence and frequency at the output only.
    """

    def __init__(self, vocab_size: int, device: torch.device, num_slots: int = 0) -> None:
        self._output_counts = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((num_slots, vocab_size), dtype=torch.bool, device=device)

    @property
    def num_rows(self) -> int:
        """Rows allocated so far."""
        return self._output_counts.shape[0]

    def assign(self, slot: int, token_ids: torch.Tensor, prompt_len: int) -> None:
        """Rebuilds a slot's counts from all its known tokens, int `[n]`, prompt first."""
        if slot >= self.num_rows:
            self._enlarge(1 << slot.bit_length())
        token_ids = token_ids.long().to(self._output_counts.device)
        output = token_ids[prompt_len:]
        self._in_prompt[slot].zero_().index_fill_(0, token_ids[:prompt_len], True)
        counts = self._output_counts[slot].zero_()
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def apply(self, logits: torch.Tensor, plan: PenaltyRows) -> None:
        """Changes the planned rows of float32 `[R, V]` logits in place.

        Repetition as in CTRL (Keskar et al. 2019): a seen token's logit is divided by the penalty when
        positive and multiplied when negative. Presence and frequency as in the OpenAI API.
        """
        counts = self._output_counts[plan.slots]
        occurred = counts > 0
        chosen = logits[plan.rows]
        seen = occurred | self._in_prompt[plan.slots]
        scaled = torch.where(chosen > 0, chosen / plan.repetition, chosen * plan.repetition)
        chosen = torch.where(seen, scaled, chosen)
        chosen = chosen - plan.frequency * counts - plan.presence * occurred
        logits[plan.rows] = chosen

    def advance(self, plan: PenaltyRows, token_ids: torch.Tensor) -> None:
        """Counts the sampled tokens, int64 `[R]`, of the planned rows."""
        self._output_counts[plan.slots, token_ids[plan.rows]] += 1

    def retract(self, plan: PenaltyRows, token_ids: torch.Tensor) -> None:
        """Undoes `advance`, for a step that has to be run again. Steps are undone in reverse order."""
        self._output_counts[plan.slots, token_ids[plan.rows]] -= 1

    def _enlarge(self, num_rows: int) -> None:
        for name in ("_output_counts", "_in_prompt"):
            old = getattr(self, name)
            new = old.new_zeros((num_rows, old.shape[1]))
            new[: old.shape[0]] = old
            setattr(self, name, new)


class Sampler:
    """Batched sampling in float32 (probabilities are summed in float64). Runs in stream order.

    `num_slots`: slots whose counts are allocated now; 0: at first use.
    """

    def __init__(self, vocab_size: int, device: torch.device, num_slots: int = 0) -> None:
        self.penalties = PenaltyCounts(vocab_size, device, num_slots)
        self._truncate: Callable[..., torch.Tensor] = truncate_probabilities

    def for_another_stream(self) -> Sampler:
        """Returns a sampler with the same counts that runs next to this one, for other slots.

        FlashInfer's kernel of top-k works in memory that it keeps for the whole device.
        """
        other = copy.copy(self)
        other._truncate = truncate_probabilities.reference
        return other

    def greedy(self, logits: torch.Tensor) -> Sampled:
        """Returns the likeliest token of each row of float32 `[R, V]` logits; may be captured in a graph."""
        token_ids, finite = argmax_and_finite(logits)
        return Sampled(token_ids, finite, None)

    def sample(self, logits: torch.Tensor, plan: SamplingPlan, tokens: torch.Tensor | None = None) -> Sampled:
        """Draws a token for each row of float32 `[R, V]` logits, which are used up: a copy would cost as
        much as all masks.

        Order: logit bias, penalties, masks (min_tokens, bad words, allowed ids, constraints), temperature,
        min_p, top_k, top_p, draw; that is vLLM's order, so that equal parameters mean equal distributions.
        `tokens` is the token pool, int32 `[slots + 1, length]`; None where no plan has bad words.
        """
        assert not plan.awaits_masks, "sampled before the masks were known"
        changes = (plan.bias, plan.penalties, plan.banned, plan.allowed, plan.bad_words, plan.masks)
        scored = logits[plan.logprob_index] if plan.logprob_rows else None  # a copy
        finite: torch.Tensor | None = None
        if any(change is not None for change in changes):
            # Before they are adjusted: not finite by intention where tokens are banned.
            finite = _all_finite(logits)
            self._adjust(logits, plan, tokens)
            finite &= logits.amax(dim=-1) > -torch.inf
        if plan.random_rows.numel() == logits.shape[0]:  # the likeliest tokens are not needed
            finite = _all_finite(logits) if finite is None else finite
            token_ids = self._draw(logits, plan)
        else:
            token_ids, are_finite = argmax_and_finite(logits)
            finite = are_finite if finite is None else finite
            if plan.random_rows.numel():
                token_ids[plan.random_rows] = self._draw(logits, plan)
        if plan.penalties is not None:
            self.penalties.advance(plan.penalties, token_ids)
        logprobs = None
        if scored is not None:
            ids = token_ids[plan.logprob_index]
            logprobs = token_logprobs(scored, ids, plan.num_top_logprobs, plan.scored_ids)
        return Sampled(token_ids, finite, logprobs)

    def _adjust(self, logits: torch.Tensor, plan: SamplingPlan, tokens: torch.Tensor | None) -> None:
        """All that changes logits, in place."""
        if plan.bias is not None:
            logits[plan.bias.rows, plan.bias.token_ids] += plan.bias.values
        if plan.penalties is not None:
            self.penalties.apply(logits, plan.penalties)
        if plan.banned is not None:
            logits[plan.banned.rows, plan.banned.token_ids] = plan.banned.values
        if plan.bad_words is not None:
            assert tokens is not None, "a plan with bad words needs the token pool"
            _ban_last_ids(logits, plan.bad_words, tokens)
        if plan.allowed is not None:
            entries = plan.allowed.entry_rows, plan.allowed.token_ids
            kept = logits[entries]
            logits.index_fill_(0, plan.allowed.rows, -torch.inf)
            logits[entries] = kept
        if plan.masks is not None:
            mask_logits(logits, plan.masks.rows, plan.masks.words)

    def _draw(self, logits: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
        rows = plan.random_rows
        # In place wherever that is possible: on a CPU the pages of fresh tensors of this size cost more than
        # what is computed.
        logits = logits[rows].div_(plan.temperature[rows].unsqueeze(1))
        # NaN would make every comparison below false; such rows fail anyway, by `finite`.
        probabilities = torch.softmax(logits, dim=-1).nan_to_num_(0.0)
        floor = probabilities.amax(dim=-1, keepdim=True) * plan.min_p.unsqueeze(1)
        probabilities.masked_fill_(probabilities < floor, 0.0)
        cut = plan.truncated
        if cut.numel():
            kept = self._truncate(probabilities[cut], plan.top_k[cut], plan.top_p[cut])
            probabilities[cut] = kept
        return _inverse_cdf(probabilities, plan.uniform)


def _all_finite(logits: torch.Tensor) -> torch.Tensor:
    """Returns bool `[R]`: no NaN and no Inf in a row of `[R, V]`."""
    if logits.is_cuda:  # one kernel for both
        return argmax_and_finite(logits)[1]
    return torch.isfinite(logits.amax(dim=-1)) & torch.isfinite(logits.amin(dim=-1))


def _ban_last_ids(logits: torch.Tensor, words: BadWords, tokens: torch.Tensor) -> None:
    """Minus infinity, in place, for what would complete a sequence whose other tokens come just before."""
    before = tokens[words.slots.unsqueeze(1), words.positions]
    matches = ((before == words.prefixes) | (words.prefixes < 0)).all(dim=1)
    # Added, since several sequences of a row may end with one id.
    values = torch.zeros_like(words.last_ids, dtype=logits.dtype).masked_fill_(matches, -torch.inf)
    logits.index_put_((words.rows, words.last_ids), values, accumulate=True)


def _inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Returns the first index whose cumulative weight exceeds `uniform` times the total."""
    cumulative = weights.double().cumsum_(dim=-1)
    target = uniform.unsqueeze(1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return index.clamp_(max=weights.shape[-1] - 1)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, scored_ids: torch.Tensor | None = None
) -> Logprobs:
    """Returns log-probabilities of raw logits float32 `[L, V]`, before bias, penalties and temperature.

    Returns the chosen tokens' natural log-probabilities `[L]`, and the `num_top` best ids and
    log-probabilities `[L, num_top]`, best first, followed by `scored_ids` `[L, M]` and theirs.
    """
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - normaliser
    top = min(num_top, logits.shape[-1])
    # At least one: not every device takes an empty selection.
    values, ids = torch.topk(logits, max(top, 1), dim=-1)
    ids, values = ids[:, :top], (values - normaliser)[:, :top]
    if scored_ids is not None:
        ids = torch.cat((ids, scored_ids), dim=1)
        values = torch.cat((values, logits.gather(1, scored_ids) - normaliser), dim=1)
    return chosen.squeeze(1), ids, values
