"""Short prompts as rows of a decode step, which captured graphs compute: each token is a request of its own.

What a row writes to the cache is there before any row attends, so a token sees those before it in the step,
as drafts do (docs/decisions/0016-draft-tokens-are-decode-rows.md). Launched one by one, the kernels of such
a step take the host several times as long as the device.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from gpu_service.core.step import StepPlan

# Tokens that all rows of prompts may see in all. Rows of one request do not share what they read: beyond it
# kernels for prompts, which do, make up for their launches.
_MOST_SEEN = 1 << 17


def fit_rows(plan: StepPlan) -> bool:
    """Returns whether a step can be computed as rows: each of its requests decodes or has a short prompt.

    States are no rows: a token's begins with what the one before left.
    """
    if plan.is_uniform_decode:
        return plan.is_sampling_decode
    if plan.sampling is None or plan.prompt_logprobs or plan.pooled or plan.images is not None:
        return False
    counts = [end - begin for begin, end in pairwise(plan.query_start_loc)]
    seen = sum(count * end for count, end in zip(counts, plan.seq_lens, strict=True) if count > 1)
    return plan.state_reads is None and seen <= _MOST_SEEN


def as_decode_rows(plan: StepPlan, dummy_slot: int) -> StepPlan:
    """Returns a step that fits as T requests of one token each, as a graph's memory holds it.

    All of them sample; those whose next token is known write theirs to `dummy_slot` of the token pool.
    """
    if plan.is_uniform_decode:
        return plan
    begins = plan.query_start_loc
    counts = torch.tensor([end - begin for begin, end in pairwise(begins)])
    seq_lens = [
        end - (last - row) + 1
        for (first, last), end in zip(pairwise(begins), plan.seq_lens, strict=True)
        for row in range(first, last)
    ]
    rows = begins[-1]
    sample_slots = torch.full((rows,), dummy_slot, dtype=plan.sample_slots.dtype)
    sample_positions = torch.zeros(rows, dtype=plan.sample_positions.dtype)
    sample_slots[plan.logits_indices] = plan.sample_slots
    sample_positions[plan.logits_indices] = plan.sample_positions
    return replace(
        plan,
        block_table=plan.block_table.repeat_interleave(counts, dim=0),
        query_start_loc=list(range(rows + 1)),
        seq_lens=seq_lens,
        seq_lens_tensor=torch.tensor(seq_lens, dtype=plan.seq_lens_tensor.dtype),
        sample_slots=sample_slots,
        sample_positions=sample_positions,
    )
