"""A decode step's rows as a captured graph reads them: padded to one of a few sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpu_service.engine.input_builder import StepPlan
from gpu_service.vision.prompt import NUM_AXES


class DecodeRows(NamedTuple):
    """What differs between two replays of one graph; B = its rows."""

    token_slots: torch.Tensor  # int64 [B]
    positions: torch.Tensor  # int64 [B]
    slot_mapping: torch.Tensor  # int64 [B]
    sample_slots: torch.Tensor  # int64 [B]
    sample_positions: torch.Tensor  # int64 [B]
    query_start_loc: torch.Tensor  # int32 [B + 1]
    seq_lens: torch.Tensor  # int32 [B]
    # int64 [B], read by models with linear attention only.
    state_reads: torch.Tensor
    state_writes: torch.Tensor
    valid_rows: torch.Tensor  # bool [B]
    mrope_positions: torch.Tensor  # int64 [3, B]; read by models with mRoPE only
    # int32 [B, P], only as wide as the longest of the step; last, so that the others keep their places.
    block_table: torch.Tensor


def graph_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, 8, then every 8 rows, and the limit itself."""
    return sorted(
        {size for size in (1, 2, 4, *range(8, max_batch_size, 8)) if size < max_batch_size} | {max_batch_size}
    )


def empty_rows(size: int, num_pages: int, dummy_slot: int, dummy_state: int = 0) -> DecodeRows:
    """Host tensors of a batch that is all padding, with so many columns of pages.

    Padding starts from the state of zeros, and leaves its own in slot `dummy_state`.
    """
    zeros = torch.zeros(size, dtype=torch.int64)
    slots = torch.full((size,), dummy_slot, dtype=torch.int64)
    return DecodeRows(
        token_slots=slots,
        positions=zeros,
        slot_mapping=zeros.clone(),
        sample_slots=slots.clone(),
        sample_positions=zeros.clone(),
        query_start_loc=torch.arange(size + 1, dtype=torch.int32),
        seq_lens=torch.ones(size, dtype=torch.int32),
        state_reads=zeros.clone(),
        state_writes=torch.full((size,), dummy_state, dtype=torch.int64),
        valid_rows=torch.zeros(size, dtype=torch.bool),
        mrope_positions=torch.zeros((NUM_AXES, size), dtype=torch.int64),
        block_table=torch.zeros((size, num_pages), dtype=torch.int32),
    )


def padded_rows(plan: StepPlan, size: int, dummy_slot: int, dummy_state: int = 0) -> DecodeRows:
    """The plan's rows, then padding."""
    rows, count = empty_rows(size, plan.block_table.shape[1], dummy_slot, dummy_state), plan.num_requests
    rows.token_slots[:count] = plan.token_slots
    rows.positions[:count] = plan.positions
    rows.slot_mapping[:count] = plan.slot_mapping
    rows.sample_slots[:count] = plan.sample_slots
    rows.sample_positions[:count] = plan.sample_positions
    rows.seq_lens[:count] = plan.seq_lens_tensor
    rows.state_reads[:count] = plan.state_reads
    rows.state_writes[:count] = plan.state_writes
    rows.block_table[:count] = plan.block_table
    rows.valid_rows[:count] = True
    if plan.mrope_positions is not None:
        rows.mrope_positions[:, :count] = plan.mrope_positions
    return rows
