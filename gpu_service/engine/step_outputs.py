"""What a step leaves on the device for the host, and its host form."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gpu_service.engine.input_builder import StepPlan
from gpu_service.engine.logprobs import to_records
from gpu_service.engine.sampler import Sampled
from gpu_service.engine.step_runner import StepResult
from gpu_service.request import TokenLogprobs

# Chosen [P], top ids [P, N], top values [P, N].
Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Filled by `ModelRunner.run`."""

    sampled: Sampled | None  # None when no row samples
    # For each of the plan's prompt_logprobs: its rows in order, in pieces.
    prompt_logprobs: list[list[Logprobs]] = field(default_factory=list)


def to_result(plan: StepPlan, outputs: StepOutputs) -> StepResult:
    """Host values; `plan` and `outputs` hold host tensors."""
    result = StepResult()
    for wanted, pieces in zip(plan.prompt_logprobs, outputs.prompt_logprobs, strict=True):
        records: list[TokenLogprobs] = []
        for scored in pieces:
            targets = wanted.target_ids[len(records) : len(records) + scored[0].shape[0]].tolist()
            records += to_records(targets, scored, [wanted.num_top] * len(targets))
        result.prompt_logprobs[wanted.batch_index] = (wanted.start, records)
    sampled = outputs.sampled
    if sampled is None:
        return result
    result.token_ids = sampled.token_ids.tolist()
    result.finite = sampled.finite.tolist()
    if plan.sampling is not None and sampled.logprobs is not None:
        rows = plan.sampling.logprob_rows
        token_ids = [result.token_ids[row] for row in rows]
        records = to_records(token_ids, sampled.logprobs, plan.num_top_logprobs)
        result.logprobs = dict(zip(rows, records, strict=True))
    return result
