"""From the scheduler's batch to what the device needs, with everything about requests snapshotted.

After `build` a step in flight looks at no request any more: the host is free to change them.

As long as the same requests decode, what does not change from step to step is kept (`_Rows`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from opentelemetry.context import Context

from gpu_service.core.depths import make_depths
from gpu_service.core.images import NUM_AXES, ImagePlan, ImageSlice, Positions
from gpu_service.core.request import Pooling, Request, SchedulerLimits
from gpu_service.core.step import (
    NO_INPUT_IDS,
    Batch,
    DepthRows,
    PooledRows,
    PromptLogprobRows,
    SamplingPlan,
    SlotUpload,
    StepPlan,
    TokenMasks,
)
from gpu_service.engine.sampling_plan import SampledRows
from gpu_service.engine.token_masks import MaskBuilder
from gpu_service.speculation.rows import as_rows, plan_drafts


class BlockTable:
    """Which pages each slot's request has: int32 `[num_slots, max_pages]`, padded with the dummy page 0.

    Only changes are written.
    """

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self._table = np.zeros((num_slots, max_pages), dtype=np.int32)
        # Per slot: the pages_epoch that the row was written for, and how many entries are written.
        self._epoch = [0] * num_slots
        self._written = [0] * num_slots

    def sync(self, requests: Sequence[Request]) -> int:
        """Brings the rows of running requests up to date; returns the most pages that one of them has."""
        written, epochs, longest = self._written, self._epoch, 0
        for request in requests:
            count, slot = len(request.pages), request.slot
            if count > longest:
                longest = count
            if count != written[slot] or request.pages_epoch != epochs[slot]:
                self._write(request, slot, count)
        return longest

    def _write(self, request: Request, slot: int, count: int) -> None:
        start = self._written[slot]
        if self._epoch[slot] != request.pages_epoch:
            start = 0
            self._table[slot] = 0
            self._epoch[slot] = request.pages_epoch
        if count > start:
            self._table[slot, start:count] = request.pages[start:]
        self._written[slot] = count

    def rows(self, slots: npt.NDArray[np.int64], longest: int) -> npt.NDArray[np.int32]:
        """Returns a copy `[R, longest]`: a step in flight must not see later changes."""
        return self._table[slots, :longest]


class _Rows:
    """The requests of a batch in order, and what is the same in every step that has just them."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.slots = np.asarray([request.slot for request in requests], dtype=np.int64)
        self.sampled = SampledRows(requests)
        self.has_images = any(request.vision is not None for request in requests)
        self.scores_prompts = any(request.params.prompt_logprobs is not None for request in requests)
        self.pools = any(request.params.pooling for request in requests)


class InputBuilder:
    """Owns the host mirror of the block table."""

    def __init__(self, limits: SchedulerLimits, page_size: int, *, has_mrope: bool = False) -> None:
        """`has_mrope`: the model's rotary embedding wants positions in time, height and width."""
        self._limits = limits
        self.token_masks = MaskBuilder(limits)
        self._has_mrope = has_mrope
        self._page_size = page_size
        max_pages = -(-limits.context_limit // page_size)
        self._block_table = BlockTable(limits.max_num_seqs, max_pages)
        self._rows: _Rows | None = None  # Of the latest step.

    def build(self, batch: Batch, trace_context: Context | None = None) -> StepPlan:
        """Tensors are fresh in every call, so two steps may be in flight."""
        drafts = None
        if batch.drafts:
            drafts, batch = plan_drafts(batch), as_rows(batch)
        rows = self._rows_of(batch)
        counts = np.asarray(batch.num_new_tokens, dtype=np.int64)
        starts = np.asarray(batch.start_positions, dtype=np.int64)
        ends, owner, positions = _spread(counts, starts, batch.is_uniform_decode)
        block_table = self._block_table.rows(rows.slots, self._block_table.sync(batch.requests))
        token_slots = rows.slots[owner]
        pages = block_table[owner, positions // self._page_size].astype(np.int64)
        seq_lens = starts + counts
        query_start_loc = np.concatenate(([0], ends))
        sampling_rows, sampled = list(range(len(counts))), rows.sampled
        sample_slots, sample_lens, logits_indices = rows.slots, seq_lens, ends - 1
        output_positions = batch.output_positions
        if not all(batch.samples):
            sampling_rows = [index for index, samples in enumerate(batch.samples) if samples]
            sampled = SampledRows([batch.requests[index] for index in sampling_rows])
            output_positions = [output_positions[index] for index in sampling_rows]
            sample_slots, sample_lens = rows.slots[sampling_rows], seq_lens[sampling_rows]
            logits_indices = logits_indices[sampling_rows]
        return StepPlan(
            input_ids=NO_INPUT_IDS,
            uploads=[_upload(request) for request in batch.admitted],
            token_slots=torch.from_numpy(token_slots),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(pages * self._page_size + positions % self._page_size),
            block_table=torch.from_numpy(block_table),
            query_start_loc=query_start_loc.tolist(),
            seq_lens=seq_lens.tolist(),
            logits_indices=torch.from_numpy(logits_indices),
            query_start_loc_tensor=torch.from_numpy(query_start_loc.astype(np.int32)),
            seq_lens_tensor=torch.from_numpy(seq_lens.astype(np.int32)),
            sample_batch_indices=sampling_rows,
            sample_slots=torch.from_numpy(sample_slots),
            sample_positions=torch.from_numpy(sample_lens),
            sampling=self._sampling(batch, sampled, output_positions),
            state_reads=_state_slots(batch.state_reads),
            state_writes=_state_slots(batch.state_writes),
            depths=_depths(batch),
            prompt_logprobs=_prompt_logprob_rows(batch) if rows.scores_prompts else [],
            pooled=_pooled_rows(batch) if rows.pools else [],
            num_top_logprobs=sampled.num_top_logprobs,
            num_scored_ids=sampled.num_scored_ids,
            trace_context=trace_context,
            mrope_positions=_axis_positions(batch, positions) if self._has_mrope else None,
            visible_ends=_visible_ends(batch, positions) if rows.has_images else None,
            images=_plan_images(batch) if rows.has_images else None,
            drafts=drafts,
            num_drafts=batch.num_drafts,
            runs_drafter=batch.runs_drafter,
        )

    def _rows_of(self, batch: Batch) -> _Rows:
        """A request that was given a slot again is among those admitted by the step that it is first in."""
        if batch.admitted or self._rows is None or self._rows.requests != batch.requests:
            self._rows = _Rows(batch.requests)
        return self._rows

    def masks(self, batch: Batch) -> TokenMasks | None:
        """Returns the masks that a step's plan awaits, once all steps before it are committed."""
        return self.token_masks.build(as_rows(batch))

    def _sampling(
        self, batch: Batch, sampled: SampledRows, output_positions: list[int]
    ) -> SamplingPlan | None:
        if not sampled.requests:
            return None
        plan = sampled.plan(output_positions, self._limits, batch.preceding_drafts)
        return self.token_masks.plan(batch, plan) if sampled.has_constraints else plan


def _spread(
    counts: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], is_uniform_decode: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns where each request's rows end, `[R]`, and whose each row is and its position, `[T]`."""
    if is_uniform_decode:
        owner = np.arange(len(counts))
        return owner + 1, owner, starts
    ends = counts.cumsum()
    owner = np.repeat(np.arange(len(counts)), counts)
    return ends, owner, np.arange(ends[-1]) - (ends - counts)[owner] + starts[owner]


def _upload(request: Request) -> SlotUpload:
    tokens = torch.tensor(request.known_tokens(0, request.total_len), dtype=torch.int32)
    return SlotUpload(request.slot, tokens, request.prompt_len, request.params.has_penalties)


def _state_slots(slots: list[int]) -> torch.Tensor | None:
    return torch.tensor(slots) if slots else None


def _depths(batch: Batch) -> list[DepthRows]:
    """Returns the depths of a model with states, where the batch has rows of drafts."""
    if not batch.state_writes or not batch.preceding_drafts:
        return []
    return make_depths([len(drafts) for drafts in batch.preceding_drafts])


def _prompt_logprob_rows(batch: Batch) -> list[PromptLogprobRows]:
    """The logits at position p score the prompt token at p + 1; the first token has no score."""
    wanted = []
    row = 0
    for index, request in enumerate(batch.requests):
        start, count = batch.start_positions[index], batch.num_new_tokens[index]
        scored = min(start + count, request.prompt_len - 1) - start
        if request.params.prompt_logprobs is not None and scored > 0:
            targets = torch.tensor(request.prompt_token_ids[start + 1 : start + 1 + scored])
            rows = torch.arange(row, row + scored)
            wanted.append(PromptLogprobRows(index, rows, targets, start + 1, request.params.prompt_logprobs))
        row += count
    return wanted


def _pooled_rows(batch: Batch) -> list[PooledRows]:
    """Returns the rows of prompts whose hidden states are pooled."""
    wanted = []
    row = 0
    for index, request in enumerate(batch.requests):
        start, count = batch.start_positions[index], batch.num_new_tokens[index]
        end = min(start + count, request.prompt_len)
        first = {Pooling.MEAN: start, Pooling.LAST: request.prompt_len - 1}.get(request.params.pooling, end)
        if max(first, start) < end:
            rows = torch.arange(row + max(first, start) - start, row + end - start)
            wanted.append(PooledRows(index, rows, start == 0))
        row += count
    return wanted


def _plan_images(batch: Batch) -> ImagePlan | None:
    """Returns image tokens among the step's rows; None: there are none."""
    slices: list[ImageSlice] = []
    rows: list[Positions] = []
    first_row = 0
    for request, start, count in zip(
        batch.requests, batch.start_positions, batch.num_new_tokens, strict=True
    ):
        for placed in () if request.vision is None else request.vision.images:
            begin, end = max(start, placed.start), min(start + count, placed.end)
            if begin < end:
                skipped = placed.first - placed.start
                slices.append(ImageSlice(placed.image, begin + skipped, end + skipped))
                rows.append(np.arange(begin, end) - start + first_row)
        first_row += count
    return ImagePlan(torch.from_numpy(np.concatenate(rows)), tuple(slices)) if slices else None


def _visible_ends(batch: Batch, positions: Positions) -> torch.Tensor | None:
    """Returns int64 `[T]`, where image tokens of the step see one another; None: there are none."""
    ends, first_row, found = positions + 1, 0, False
    for request, start, count in zip(
        batch.requests, batch.start_positions, batch.num_new_tokens, strict=True
    ):
        vision = request.vision
        for placed in vision.images if vision is not None and vision.sees_ahead else ():
            begin, end = max(start, placed.start), min(start + count, placed.end)
            if begin < end:
                assert end == placed.end, f"{request.key}: a step ends within an image"
                ends[begin - start + first_row : end - start + first_row] = end
                found = True
        first_row += count
    return torch.from_numpy(ends) if found else None


def _axis_positions(batch: Batch, positions: Positions) -> torch.Tensor:
    """Returns int64 `[3, T]`: of text `positions` `[T]` along all axes, of requests with images their own."""
    by_axis = np.broadcast_to(positions, (NUM_AXES, len(positions))).copy()
    row = 0
    for request, start, count in zip(
        batch.requests, batch.start_positions, batch.num_new_tokens, strict=True
    ):
        if request.vision is not None:
            by_axis[:, row : row + count] = request.vision.axis_positions(start, start + count)
        row += count
    return torch.from_numpy(by_axis)
