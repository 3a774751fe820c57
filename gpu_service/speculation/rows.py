"""Verified positions as rows of a decode step, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gpu_service.core.results import RowResult
from gpu_service.core.step import Batch, Drafts, ForwardInputs, StepPlan


def as_rows(batch: Batch) -> Batch:
    """Returns the same step with an entry for each row of attention: every draft is one of its request's.

    |-- request a: p --|-- a: p + 1, its first draft --|-- a: p + 2 --|-- request b: q --| ...
    """
    if not batch.drafts:
        return batch
    places = [(index, place) for index, drafts in enumerate(batch.drafts) for place in range(1 + len(drafts))]
    reads, writes = _state_slots(batch)
    return replace(
        batch,
        state_reads=reads,
        state_writes=writes,
        requests=[batch.requests[index] for index, _ in places],
        start_positions=[batch.start_positions[index] + place for index, place in places],
        num_new_tokens=[batch.num_new_tokens[index] for index, _ in places],
        samples=[batch.samples[index] for index, _ in places],
        output_positions=[batch.output_positions[index] + place for index, place in places],
        preceding_drafts=[batch.drafts[index][:place] for index, place in places],
        drafts=[],
        draft_states=[],
    )


def _state_slots(batch: Batch) -> tuple[list[int], list[int]]:
    """Slots that each row reads and writes: a draft's row begins with what the row before it left."""
    if not batch.state_writes:
        return [], []
    reads, writes = list[int](), list[int]()
    for read, write, own in zip(batch.state_reads, batch.state_writes, batch.draft_states, strict=True):
        slots = [read, write, *own]
        reads += slots[:-1]
        writes += slots[1:]
    return reads, writes


def plan_drafts(batch: Batch) -> Drafts | None:
    """Returns where a batch's drafts go before its step, and where they are verified; None: it has none."""
    if not batch.drafts:
        return None
    requests = zip(batch.requests, batch.start_positions, batch.drafts, strict=True)
    placed = [
        (request.slot, start + place, token_id)
        for request, start, drafts in requests
        for place, token_id in enumerate(drafts, 1)
    ]
    slots, positions, token_ids = (torch.tensor(column) for column in zip(*placed, strict=True))
    counts = [len(drafts) for drafts in batch.drafts]
    expected = [[*drafts, *[-1] * (max(counts) - len(drafts))] for drafts in batch.drafts]
    first_rows = torch.tensor([0, *(1 + count for count in counts[:-1])]).cumsum(0)
    return Drafts(slots, positions, token_ids, torch.tensor(expected), first_rows, counts)


def fold(rows: Sequence[RowResult], counts: Sequence[int]) -> list[RowResult]:
    """Returns the results of rows as those of requests, with `counts` drafts each."""
    folded, begin = [], 0
    for count in counts:
        end = begin + 1 + count
        rows[begin].verified = rows[begin + 1 : end]
        folded.append(rows[begin])
        begin = end
    return folded


def last_rows(plan: StepPlan, sampled_ids: torch.Tensor) -> torch.Tensor:
    """Returns row (of T) of each of Q sampling requests that its newest token follows, int64 `[Q]`: the one
    after the last accepted draft.

    `sampled_ids` int64 `[S]`. All on the device; nothing is waited for.
    """
    if plan.drafts is None:
        return plan.logits_indices
    first, expected = plan.drafts.first_rows, plan.drafts.expected
    places = torch.arange(expected.shape[1], device=expected.device)
    # Beyond a request's own rows there is no draft: -1 equals no token.
    rows = (first.unsqueeze(1) + places).clamp_(max=sampled_ids.shape[0] - 1)
    accepted = (sampled_ids[rows] == expected).long().cumprod(1).sum(1)
    return plan.logits_indices[first + accepted]


def rows_ahead(
    plan: StepPlan, page_size: int, ahead: int, rows: torch.Tensor, is_last: torch.Tensor
) -> ForwardInputs:
    """Returns inputs of one row per entry of the plan, `ahead` positions after it.

    `rows` int64 `[R]`: the entries' last; `is_last` bool `[R]`: those that count.
    """
    count, device = rows.shape[0], rows.device
    positions = plan.positions[rows] + ahead
    lengths = [length + ahead for length in plan.seq_lens]
    missing = -(-max(lengths) // page_size) - plan.block_table.shape[1]
    table = torch.nn.functional.pad(plan.block_table, (0, max(0, missing)))
    pages = table.gather(1, (positions // page_size).unsqueeze(1)).squeeze(1).long()
    slots = (pages * page_size + positions % page_size).masked_fill(~is_last, 0)
    axes = plan.mrope_positions
    return ForwardInputs(
        input_ids=rows,
        positions=positions,
        slot_mapping=slots,
        block_table=table,
        query_start_loc=list(range(count + 1)),
        seq_lens=lengths,
        logits_indices=rows,
        query_start_loc_tensor=torch.arange(count + 1, dtype=torch.int32, device=device),
        seq_lens_tensor=(plan.seq_lens_tensor + ahead),
        mrope_positions=None if axes is None else axes[:, rows] + ahead,
        valid_rows=is_last,
    )
