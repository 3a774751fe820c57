"""From a step's host values to one result per request of its batch."""

from __future__ import annotations

from gpu_service.batch import Batch
from gpu_service.engine.step_runner import StepResult
from gpu_service.scheduler.scheduler import RowResult

NON_FINITE_LOGITS = "the model produced NaN or Inf logits for this request"


def row_results(batch: Batch, result: StepResult) -> list[RowResult]:
    """In batch order. Rows whose logits are not finite become errors; their token means nothing."""
    rows = [RowResult() for _ in batch.requests]
    sampling = [index for index, samples in enumerate(batch.samples) if samples]
    for row, index in enumerate(sampling):
        if result.finite[row]:
            rows[index].token_id = result.token_ids[row]
            rows[index].logprobs = result.logprobs.get(row)
        else:
            rows[index].error = NON_FINITE_LOGITS
    for index, (start, records) in result.prompt_logprobs.items():
        rows[index].prompt_logprobs_start = start
        rows[index].prompt_logprobs = records
    return rows
