"""Sampling: the parameters of a step's rows as tensors, built by the host, then from logits to tokens.

Order on the device: bias, penalties, masks, temperature, truncation, one draw per row. A row's token depends
on its own logits, parameters, counts and uniform number only, never on the other rows of the batch. Nothing
there knows requests or pages, or waits for the device: which rows are treated how is in the plan.

Uniform numbers depend on (seed, output position) and nothing else, so a sampled token is the same in any
batch, after a preemption and when a step is run again. The mixer is the finaliser of SplitMix64 (Steele,
Lea, Flood: "Fast splittable pseudorandom number generators", 2014), applied twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpu_service.engine.results import Logprobs, Sampled
from gpu_service.engine.step import PenaltyRows, SamplingPlan, SparseBias
from gpu_service.ops.sampling import argmax_and_finite, truncate_probabilities
from gpu_service.request import Entries, Request
from gpu_service.scheduler.limits import SchedulerLimits, stop_token_ids

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """A bijection of 64-bit integers whose output bits each depend on all input bits."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 random bits (exact in float32)."""
    return (mix64(mix64(seed & _MASK) ^ mix64(position)) >> 40) / (1 << 24)


def derive_seed(seed: int, *parts: int | str) -> int:
    """A seed in [0, 2^63) for a sub-stream, e.g. one of a request's outputs."""
    state = mix64(seed & _MASK)
    for part in parts:
        for byte in str(part).encode():
            state = mix64(state ^ byte)
        state = mix64(state ^ 0x100)
    return state >> 1


def build_sampling_plan(
    requests: Sequence[Request], positions: Sequence[int], limits: SchedulerLimits
) -> SamplingPlan:
    """`positions[r]` is the output position that row r samples, counted from 0."""
    params = [request.params for request in requests]
    random_rows = [row for row, p in enumerate(params) if not p.is_greedy]
    chosen = [params[row] for row in random_rows]
    logprob_rows = [row for row, p in enumerate(params) if p.logprobs is not None]
    return SamplingPlan(
        temperature=torch.tensor([0.0 if p.is_greedy else p.temperature for p in params]),
        random_rows=_index(random_rows),
        uniform=torch.tensor(
            [uniform(params[row].seed, positions[row]) for row in random_rows], dtype=torch.float64
        ),
        top_k=torch.tensor([p.top_k for p in chosen], dtype=torch.int64),
        top_p=torch.tensor([p.top_p for p in chosen], dtype=torch.float64),
        min_p=torch.tensor([p.min_p for p in chosen], dtype=torch.float32),
        truncated=_index([row for row, p in enumerate(chosen) if p.top_k > 0 or p.top_p < 1.0]),
        bias=_bias(requests),
        banned=_banned(requests, positions, limits),
        penalties=_penalties(requests),
        logprob_rows=logprob_rows,
        logprob_index=_index(logprob_rows),
        num_top_logprobs=max((params[row].logprobs or 0 for row in logprob_rows), default=0),
    )


def _index(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def _sparse(parts: Sequence[tuple[int, Entries]]) -> SparseBias | None:
    """Row and entries of each; arrays all the way, since there may be thousands of entries in every step."""
    if not parts:
        return None
    rows = np.repeat([row for row, _ in parts], [len(ids) for _, (ids, _) in parts])
    token_ids = np.concatenate([ids for _, (ids, _) in parts])
    values = np.concatenate([values for _, (_, values) in parts])
    return SparseBias(torch.from_numpy(rows), torch.from_numpy(token_ids), torch.from_numpy(values))


def _bias(requests: Sequence[Request]) -> SparseBias | None:
    biased = [row for row, request in enumerate(requests) if request.params.logit_bias]
    return _sparse([(row, _bias_entries(requests[row])) for row in biased])


def _bias_entries(request: Request) -> Entries:
    """The request's `logit_bias`; made once, and kept with it."""
    if request.bias_entries is None:
        token_ids, values = zip(*request.params.logit_bias, strict=True)
        request.bias_entries = np.array(token_ids, dtype=np.int64), np.array(values, dtype=np.float32)
    return request.bias_entries


def _banned(
    requests: Sequence[Request], positions: Sequence[int], limits: SchedulerLimits
) -> SparseBias | None:
    held = [row for row, request in enumerate(requests) if positions[row] < request.params.min_tokens]
    parts = [(row, _stop_entries(requests[row], limits)) for row in held]
    return _sparse([(row, entries) for row, entries in parts if len(entries[0])])


def _stop_entries(request: Request, limits: SchedulerLimits) -> Entries:
    """Minus infinity for each of `stop_token_ids`; made once per request, and kept with it."""
    if request.stop_entries is None:
        ids = np.array(sorted(stop_token_ids(request, limits)), dtype=np.int64)
        request.stop_entries = ids, np.full(len(ids), -np.inf, dtype=np.float32)
    return request.stop_entries


def has_penalties(request: Request) -> bool:
    """Whether token counts of this request are needed."""
    p = request.params
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def _penalties(requests: Sequence[Request]) -> PenaltyRows | None:
    rows = [row for row, request in enumerate(requests) if has_penalties(request)]
    if not rows:
        return None
    params = [requests[row].params for row in rows]
    return PenaltyRows(
        rows=torch.tensor(rows),
        slots=torch.tensor([requests[row].slot for row in rows]),
        repetition=torch.tensor([[p.repetition_penalty] for p in params]),
        presence=torch.tensor([[p.presence_penalty] for p in params]),
        frequency=torch.tensor([[p.frequency_penalty] for p in params]),
    )


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


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """From raw logits float32 `[L, V]`, before bias, penalties and temperature; chosen ids int64 `[L]`.

    Returns the chosen tokens' natural log-probabilities `[L]`, and the `num_top` best ids and
    log-probabilities `[L, num_top]`, best first.
    """
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - normaliser
    top = min(num_top, logits.shape[-1])
    # At least one: not every device takes an empty selection.
    values, ids = torch.topk(logits, max(top, 1), dim=-1)
    return chosen.squeeze(1), ids[:, :top], (values - normaliser)[:, :top]
