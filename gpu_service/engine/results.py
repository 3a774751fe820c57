"""What comes of a step: tensors on the device, then host values, one row for each request of its batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor, int32, int64
from torch import bool as boolean

from gpu_service.core.request import TokenLogprobs
from gpu_service.core.results import (
    FLOAT16_OVERFLOW,
    NON_FINITE_IN_FLOAT16,
    NON_FINITE_LOGITS,
    RowResult,
    StepResult,
)
from gpu_service.core.step import StepPlan, TensorField
from gpu_service.experts.streaming.step import StreamedExperts
from gpu_service.ops.overflow import EMBEDDING, FINAL_NORM, NO_OVERFLOW
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


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token for each of R rows; filled by `Sampler`."""

    token_ids: Annotated[Tensor, TensorField("R", int64)]
    # False: the logits held NaN or Inf, or none was left, and the token means nothing.
    finite: Annotated[Tensor, TensorField("R", boolean)]
    logprobs: Logprobs | None  # of the plan's logprob_rows


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step leaves on the device for the host; filled by `ModelRunner.run`."""

    sampled: Sampled | None  # None when no row samples
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


def to_result(plan: StepPlan, outputs: StepOutputs) -> StepResult:
    """Returns host values; `plan` and `outputs` hold host tensors.

    Rows whose logits are not finite become errors; their token means nothing.
    """
    rows = [RowResult() for _ in plan.seq_lens]
    for wanted, pieces in zip(plan.prompt_logprobs, outputs.prompt_logprobs, strict=True):
        records: list[TokenLogprobs] = []
        for scored in pieces:
            targets = wanted.target_ids[len(records) : len(records) + scored[0].shape[0]].tolist()
            tops = [wanted.num_top] * len(targets)
            records += _to_records(targets, scored, tops, [0] * len(targets))
        row = rows[wanted.batch_index]
        row.prompt_logprobs_start, row.prompt_logprobs = wanted.start, records
    if outputs.sampled is not None:
        error = NON_FINITE_IN_FLOAT16 if outputs.is_float16 else NON_FINITE_LOGITS
        _add_sampled(plan, outputs.sampled, rows, error)
    nonfinite = frozenset[int]()
    if outputs.first_overflow is not None:
        nonfinite = frozenset(outputs.first_overflow.tolist()) - {NO_OVERFLOW}
        if outputs.is_float16:
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
    streamed = outputs.streamed
    predicted = None if streamed is None else streamed.predicted_seconds
    is_streamed = streamed is not None and streamed.is_planned
    return StepResult(rows, nonfinite, is_streamed, outputs.has_copies, predicted)


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


def _add_sampled(plan: StepPlan, sampled: Sampled, rows: list[RowResult], error: str) -> None:
    token_ids, finite = sampled.token_ids.tolist(), sampled.finite.tolist()
    sampling = [rows[index] for index in plan.sample_batch_indices]
    for row, token_id, is_finite in zip(sampling, token_ids, finite, strict=True):
        if is_finite:
            row.token_id = token_id
        else:
            row.error = error
    if plan.sampling is not None and sampled.logprobs is not None:
        scored = plan.sampling.logprob_rows
        records = _to_records(
            [token_ids[row] for row in scored], sampled.logprobs, plan.num_top_logprobs, plan.num_scored_ids
        )
        for index, record in zip(scored, records, strict=True):
            sampling[index].logprobs = record if finite[index] else None


def _to_records(
    token_ids: list[int], computed: Logprobs, num_top: list[int], num_scored: list[int]
) -> list[TokenLogprobs]:
    """Returns host records; row l keeps its own `num_top[l]` alternatives and the first `num_scored[l]` of
    the last columns, which are ids that requests named.
    """
    width = computed[1].shape[1]
    begin = width - max(num_scored, default=0)
    chosen, ids, values = (tensor.tolist() for tensor in computed)
    records = []
    for row, token_id in enumerate(token_ids):
        kept = [*range(min(num_top[row], begin)), *range(begin, begin + num_scored[row])]
        own = tuple(ids[row][column] for column in kept), tuple(values[row][column] for column in kept)
        records.append(TokenLogprobs(token_id, chosen[row], *own))
    return records
