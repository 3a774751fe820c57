"""From the scheduler's batch to what the device needs, with everything about requests snapshotted.

After `build` a step in flight looks at no request any more: the host is free to change them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from opentelemetry.context import Context

from gpu_service.batch import Batch
from gpu_service.engine.block_table import BlockTable
from gpu_service.engine.image_plan import plan_axis_positions, plan_images
from gpu_service.engine.sampling_plan import SamplingPlan, build_sampling_plan, has_penalties
from gpu_service.request import Request
from gpu_service.scheduler.limits import SchedulerLimits
from gpu_service.vision.features import ImagePlan


@dataclass(frozen=True, slots=True)
class SlotUpload:
    """Known tokens of a request that was given a slot in this step."""

    slot: int
    token_ids: torch.Tensor  # int32 [n], prompt then output
    prompt_len: int
    has_penalties: bool


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """Rows of one request whose logits score the next prompt token; filled by the input builder."""

    batch_index: int
    rows: torch.Tensor  # int64 [n], rows of hidden_states
    target_ids: torch.Tensor  # int64 [n]
    start: int  # position of target_ids[0]
    num_top: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Host-side tensors of one step. T, R, L as in `ForwardInputs`; S = rows that sample (= L)."""

    uploads: list[SlotUpload]
    token_slots: torch.Tensor  # int64 [T], token pool row of each input token
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T]
    block_table: torch.Tensor  # int32 [R, max_pages]
    query_start_loc: list[int]
    seq_lens: list[int]
    logits_indices: torch.Tensor  # int64 [S]
    # The two lists above again, for the device.
    query_start_loc_tensor: torch.Tensor  # int32 [R + 1]
    seq_lens_tensor: torch.Tensor  # int32 [R]
    sample_batch_indices: list[int]  # [S], index into the batch
    sample_slots: torch.Tensor  # int64 [S]
    sample_positions: torch.Tensor  # int64 [S], where the sampled token goes in the token pool
    sampling: SamplingPlan | None  # None when no row samples
    # int64 [R], slots of states that each request's row reads and writes; zeros without linear attention.
    state_reads: torch.Tensor
    state_writes: torch.Tensor
    prompt_logprobs: list[PromptLogprobRows]
    num_top_logprobs: list[int]  # per logprob row
    # The context that expert spans of this step hang under; None: no spans are recorded.
    trace_context: Context | None
    # int64 [3, T], of a model with mRoPE; else None.
    mrope_positions: torch.Tensor | None = None
    # None: no token of the step is part of an image.
    images: ImagePlan | None = None

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.seq_lens)

    @property
    def is_sampling_decode(self) -> bool:
        """Whether every request computes exactly one token, which is text, and samples the next."""
        rows = len(self.seq_lens)
        one_each = self.query_start_loc[-1] == len(self.sample_batch_indices) == rows
        return one_each and not self.prompt_logprobs and self.images is None


class InputBuilder:
    """Owns the host mirror of the block table."""

    def __init__(self, limits: SchedulerLimits, page_size: int, *, has_mrope: bool = False) -> None:
        """`has_mrope`: the model's rotary embedding wants positions in time, height and width."""
        self._limits = limits
        self._has_mrope = has_mrope
        self._page_size = page_size
        max_pages = -(-limits.context_limit // page_size)
        self._block_table = BlockTable(limits.max_num_seqs, max_pages)

    def build(self, batch: Batch, trace_context: Context | None = None) -> StepPlan:
        """Tensors are fresh in every call, so two steps may be in flight."""
        counts = np.asarray(batch.num_new_tokens, dtype=np.int64)
        starts = np.asarray(batch.start_positions, dtype=np.int64)
        slots = np.asarray([request.slot for request in batch.requests], dtype=np.int64)
        ends = counts.cumsum()
        owner = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(ends[-1]) - (ends - counts)[owner] + starts[owner]
        for request in batch.requests:
            self._block_table.sync(request)
        block_table = self._block_table.rows(batch.requests)
        pages = block_table[owner, positions // self._page_size].astype(np.int64)
        sampling_rows = [index for index, samples in enumerate(batch.samples) if samples]
        seq_lens = starts + counts
        query_start_loc = np.concatenate(([0], ends))
        requests = [batch.requests[index] for index in sampling_rows]
        output_positions = [batch.output_positions[index] for index in sampling_rows]
        return StepPlan(
            uploads=[_upload(request) for request in batch.admitted],
            token_slots=torch.from_numpy(slots[owner]),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(pages * self._page_size + positions % self._page_size),
            block_table=torch.from_numpy(block_table),
            query_start_loc=query_start_loc.tolist(),
            seq_lens=seq_lens.tolist(),
            logits_indices=torch.from_numpy(ends[sampling_rows] - 1),
            query_start_loc_tensor=torch.from_numpy(query_start_loc.astype(np.int32)),
            seq_lens_tensor=torch.from_numpy(seq_lens.astype(np.int32)),
            sample_batch_indices=sampling_rows,
            sample_slots=torch.from_numpy(slots[sampling_rows]),
            sample_positions=torch.from_numpy(seq_lens[sampling_rows]),
            sampling=build_sampling_plan(requests, output_positions, self._limits) if requests else None,
            state_reads=_state_slots(batch.state_reads, batch),
            state_writes=_state_slots(batch.state_writes, batch),
            prompt_logprobs=_prompt_logprob_rows(batch),
            num_top_logprobs=[r.params.logprobs for r in requests if r.params.logprobs is not None],
            trace_context=trace_context,
            mrope_positions=plan_axis_positions(batch, positions) if self._has_mrope else None,
            images=plan_images(batch),
        )


def _upload(request: Request) -> SlotUpload:
    tokens = torch.tensor(request.known_tokens(0, request.total_len), dtype=torch.int32)
    return SlotUpload(request.slot, tokens, request.prompt_len, has_penalties(request))


def _state_slots(slots: list[int], batch: Batch) -> torch.Tensor:
    return torch.tensor(slots or [0] * len(batch.requests))


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
