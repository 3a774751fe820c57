"""From logits to tokens on the device, and from those to a step's results on the host.

Bias, penalties, masks, temperature, truncation, one draw per row. A row's token depends on its own logits,
parameters, counts and uniform number only, never on the other rows of the batch. Nothing on the device waits:
what decides which rows are treated how is in the plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, float32, int32, int64
from torch import bool as boolean

from gpu_service.core.request import TokenLogprobs
from gpu_service.core.results import (
    FLOAT16_OVERFLOW,
    NON_FINITE_IN_FLOAT16,
    NON_FINITE_LOGITS,
    RowResult,
    StepResult,
)
from gpu_service.core.step import BadWords, PenaltyRows, SamplingPlan, StepPlan, TensorField
from gpu_service.experts.streaming.step import StreamedExperts
from gpu_service.ops.overflow import EMBEDDING, FINAL_NORM, NO_OVERFLOW
from gpu_service.ops.sampling import argmax_and_finite, mask_logits, truncate_probabilities
from gpu_service.speculation.drafter import FirstPass
from gpu_service.speculation.rows import fold

# Of an image's rows, what comes before all layers.
TOWER = EMBEDDING - 1
_PLACES = {
    TOWER: "in the vision tower",
    EMBEDDING: "in the embedding",
    FINAL_NORM: "in the norm after the last layer",
}
# Of N rows: the chosen tokens' log-probabilities [N], the best ids [N, top] and their values [N, top].
Logprobs = tuple[Tensor, Tensor, Tensor]


@dataclass(slots=True)
class StepOutputs:
    """What a step leaves on the device: logits once its layers have run, and what they become."""

    # Filled by `ModelRunner.compute` and dropped by `ModelRunner.draw`, which reads them. None: no row is
    # sampled from.
    logits: Annotated[Tensor | None, TensorField("S V", float32, on_device=True)] = None
    # In the model's own type, for a drafter; None: there is none.
    hidden_states: Annotated[Tensor | None, TensorField("T H", float32, on_device=True)] = None
    # Filled by `Sampler`: a token for each of S rows. None: no row samples, or none is sampled from yet.
    token_ids: Annotated[Tensor | None, TensorField("S", int64)] = None
    # False: the logits held NaN or Inf, or none was left, and the token means nothing.
    finite: Annotated[Tensor | None, TensorField("S", boolean)] = None
    logprobs: Logprobs | None = None  # of the plan's logprob_rows
    # For each of the plan's prompt_logprobs: its rows in order, in pieces.
    prompt_logprobs: list[list[Logprobs]] = field(default_factory=list)
    # For each of the plan's pooled: float32 [H].
    pooled: list[Tensor] = field(default_factory=list)
    # To be asked, once the step has ended, whether its experts were whole; None: it streamed none.
    streamed: StreamedExperts | None = None
    # The first layer after which a row was not finite; None: it is not noted.
    first_overflow: Annotated[Tensor | None, TensorField("T", int32)] = None
    # Whether that ends the row's request: the activations' type is what has too little room.
    is_float16: bool = False
    # As in `StepResult`.
    has_copies: bool | None = False
    # What a device drafter proposes for each request that samples; None: it proposes nothing.
    drafts: Annotated[Tensor | None, TensorField("Q K", int64)] = None
    # Of a step that is sampled, see `ChoiceSamples.take`.
    choices: Annotated[Tensor | None, TensorField("3 L T K", int32)] = None
    # Runs the drafter's first pass, once the tokens are in the token pool; None: no graph has it.
    replay_first_pass: Callable[[], FirstPass] | None = None


def to_result(plan: StepPlan, outputs: StepOutputs) -> StepResult:
    """Host values; `plan` and `outputs` hold host tensors.

    Rows whose logits are not finite become errors; their token means nothing.
    """
    streamed = outputs.streamed
    predicted = None if streamed is None else streamed.predicted_seconds
    is_streamed = streamed is not None and streamed.is_planned
    result = StepResult(is_streamed=is_streamed, has_copies=outputs.has_copies, predicted_seconds=predicted)
    if outputs.choices is not None:
        # The memory is another step's soon.
        result.choices = outputs.choices.numpy().copy()
    if _is_plain(plan, outputs):
        assert outputs.token_ids is not None
        result.token_ids = outputs.token_ids.tolist()
        return result
    rows = [RowResult() for _ in plan.seq_lens]
    for wanted, pieces in zip(plan.prompt_logprobs, outputs.prompt_logprobs, strict=True):
        records: list[TokenLogprobs] = []
        for scored in pieces:
            targets = wanted.target_ids[len(records) : len(records) + scored[0].shape[0]].tolist()
            tops = [wanted.num_top] * len(targets)
            records += _to_records(targets, scored, tops, [0] * len(targets))
        row = rows[wanted.batch_index]
        row.prompt_logprobs_start, row.prompt_logprobs = wanted.start, records
    if outputs.token_ids is not None:
        error = NON_FINITE_IN_FLOAT16 if outputs.is_float16 else NON_FINITE_LOGITS
        _add_sampled(plan, outputs, rows, error)
    if outputs.first_overflow is not None:
        result.nonfinite_layers = frozenset(outputs.first_overflow.tolist()) - {NO_OVERFLOW}
        if outputs.is_float16 and result.nonfinite_layers:
            _add_overflows(plan, outputs.first_overflow, rows)
    for pooled, summed in zip(plan.pooled, outputs.pooled, strict=True):
        row = rows[pooled.batch_index]
        row.pooled_sum, row.pooled_from_start = summed.numpy(), pooled.from_start
        if not summed.isfinite().all():
            row.error = row.error or NON_FINITE_LOGITS
    if outputs.drafts is not None:
        owners = plan.drafts.owners if plan.drafts is not None else plan.sample_batch_indices
        for index, drafts in zip(owners, outputs.drafts.tolist(), strict=True):
            rows[index].drafts = drafts
    if plan.drafts is not None:
        rows = fold(rows, plan.drafts.counts)
    result.rows = rows
    return result


def _is_plain(plan: StepPlan, outputs: StepOutputs) -> bool:
    """Returns whether each request has sampled one finite token and nothing else came of it, as in nearly all
    steps.
    """
    if outputs.token_ids is None or outputs.finite is None or outputs.logprobs is not None:
        return False
    if outputs.drafts is not None or plan.drafts is not None or not plan.is_sampling_decode:
        return False
    overflow = outputs.first_overflow
    is_finite = bool(outputs.finite.numpy().all())
    return is_finite and (overflow is None or not (overflow.numpy() != NO_OVERFLOW).any())


def _add_overflows(plan: StepPlan, first_overflow: Tensor, rows: list[RowResult]) -> None:
    """Errors of the requests one of whose rows overflowed, whether or not it is sampled from."""
    bounds = plan.query_start_loc
    if plan.images is not None:
        # Before all layers, rows of images hold what the tower made of them.
        first_overflow = first_overflow.clone()
        seen = first_overflow[plan.images.rows]
        first_overflow[plan.images.rows] = seen.where(seen != EMBEDDING, TOWER)
    for row, begin, end in zip(rows, bounds, bounds[1:], strict=False):
        layer = int(first_overflow[begin:end].min())
        if layer != NO_OVERFLOW:
            row.error = overflow_error(layer)


def overflow_error(layer: int) -> str:
    """Returns the error message of a request whose hidden states first overflowed there."""
    place = _PLACES.get(layer, f"in layer {layer}")
    return (
        f"{FLOAT16_OVERFLOW} hidden states exceeded 65504 {place}; --dtype bfloat16 has room for what this "
        "model computes"
    )


def _add_sampled(plan: StepPlan, outputs: StepOutputs, rows: list[RowResult], error: str) -> None:
    assert outputs.token_ids is not None
    assert outputs.finite is not None
    token_ids, finite = outputs.token_ids.tolist(), outputs.finite.tolist()
    sampling = [rows[index] for index in plan.sample_batch_indices]
    for row, token_id, is_finite in zip(sampling, token_ids, finite, strict=True):
        if is_finite:
            row.token_id = token_id
        else:
            row.error = error
    if plan.sampling is not None and outputs.logprobs is not None:
        scored = plan.sampling.logprob_rows
        records = _to_records(
            [token_ids[row] for row in scored], outputs.logprobs, plan.num_top_logprobs, plan.num_scored_ids
        )
        for index, record in zip(scored, records, strict=True):
            sampling[index].logprobs = record if finite[index] else None


def _to_records(
    token_ids: list[int], computed: Logprobs, num_top: list[int], num_scored: list[int]
) -> list[TokenLogprobs]:
    """Host records; row l keeps its own `num_top[l]` alternatives and the first `num_scored[l]` of the last
    columns, which are ids that requests named."""
    width = computed[1].shape[1]
    begin = width - max(num_scored, default=0)
    chosen, ids, values = (tensor.tolist() for tensor in computed)
    records = []
    for row, token_id in enumerate(token_ids):
        kept = [*range(min(num_top[row], begin)), *range(begin, begin + num_scored[row])]
        own = tuple(ids[row][column] for column in kept), tuple(values[row][column] for column in kept)
        records.append(TokenLogprobs(token_id, chosen[row], *own))
    return records


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
        positive and multiplied when negative. Presence and frequency as in the OpenAI API. A row that follows
        drafts counts them as output: its token is of use only if they are.
        """
        counts = self._output_counts[plan.slots]
        drafts = plan.preceding_drafts
        counts.scatter_add_(1, drafts.clamp(min=0), (drafts >= 0).int())
        occurred = counts > 0
        chosen = logits[plan.rows]
        seen = occurred | self._in_prompt[plan.slots]
        scaled = torch.where(chosen > 0, chosen / plan.repetition, chosen * plan.repetition)
        chosen = torch.where(seen, scaled, chosen)
        chosen = chosen - plan.frequency * counts - plan.presence * occurred
        logits[plan.rows] = chosen

    def advance(self, plan: PenaltyRows, token_ids: torch.Tensor) -> None:
        """Counts the sampled tokens, int64 `[R]`, of the planned rows, but for those that follow a draft that
        was not sampled."""
        self._add(plan, token_ids, 1)

    def retract(self, plan: PenaltyRows, token_ids: torch.Tensor) -> None:
        """Undoes `advance`, for a step that has to be run again. Steps are undone in reverse order."""
        self._add(plan, token_ids, -1)

    def _add(self, plan: PenaltyRows, token_ids: torch.Tensor, number: int) -> None:
        drafts = plan.preceding_drafts
        first_rows = plan.rows - (drafts >= 0).sum(1)
        places = torch.arange(drafts.shape[1], device=drafts.device)
        # Padding is of rows with fewer drafts.
        rows = (first_rows.unsqueeze(1) + places).clamp_(max=token_ids.shape[0] - 1)
        is_output = ((token_ids[rows] == drafts) | (drafts < 0)).all(1)
        index = plan.slots, token_ids[plan.rows]
        # Several rows of a slot may have sampled one token.
        self._output_counts.index_put_(index, is_output.int() * number, accumulate=True)

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

    def greedy(self, logits: torch.Tensor) -> StepOutputs:
        """Returns the likeliest token of each row of float32 `[R, V]` logits; may be captured in a graph."""
        token_ids, finite = argmax_and_finite(logits)
        return StepOutputs(token_ids=token_ids, finite=finite)

    def sample(
        self, logits: torch.Tensor, plan: SamplingPlan, tokens: torch.Tensor | None = None
    ) -> StepOutputs:
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
        return StepOutputs(token_ids=token_ids, finite=finite, logprobs=logprobs)

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
