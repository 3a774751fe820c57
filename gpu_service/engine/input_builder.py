"""From the scheduler's batch to what the device needs, with everything about requests snapshotted.

After `build` a step in flight looks at no request any more: the host is free to change them.

As long as the same requests decode, what does not change from step to step is kept: where their rows are
(`_Rows`), and what follows from their parameters (`SampledRows`), so that in most steps only the numbers by
which rows are sampled are new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from opentelemetry.context import Context

from gpu_service.core.depths import make_depths
from gpu_service.core.images import NUM_AXES, ImagePlan, ImageSlice, Positions
from gpu_service.core.request import (
    BadWordEntries,
    Entries,
    Pooling,
    Request,
    SchedulerLimits,
    stop_token_ids,
)
from gpu_service.core.step import (
    NO_INPUT_IDS,
    AllowedTokens,
    BadWords,
    Batch,
    DepthRows,
    PenaltyRows,
    PooledRows,
    PromptLogprobRows,
    SamplingPlan,
    SlotUpload,
    SparseBias,
    StepPlan,
    TokenMasks,
)
from gpu_service.engine.token_masks import MaskBuilder
from gpu_service.ops.sampling import mix64, uniforms
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
        # Of steps in which each computes one token and samples the next.
        self.slots_tensor = torch.from_numpy(self.slots)
        self.index, self.places = np.arange(len(requests)), list(range(len(requests)))
        self.index_tensor = torch.from_numpy(self.index)
        self.starts, self.starts_tensor = [*self.places, len(requests)], torch.arange(len(requests) + 1).int()


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
        starts = np.asarray(batch.start_positions, dtype=np.int64)
        block_table = self._block_table.rows(rows.slots, self._block_table.sync(batch.requests))
        sampled, output_positions = rows.sampled, batch.output_positions
        if batch.is_uniform_decode and all(batch.samples):
            owner, positions, seq_lens = rows.index, starts, starts + 1
            where = _decoding(rows, seq_lens)
        else:
            counts = np.asarray(batch.num_new_tokens, dtype=np.int64)
            seq_lens = starts + counts
            owner, positions, where = _spread(rows, counts, starts, batch.samples)
            if not all(batch.samples):
                sampling_rows = where["sample_batch_indices"]
                sampled = SampledRows([batch.requests[index] for index in sampling_rows])
                output_positions = [output_positions[index] for index in sampling_rows]
        pages = block_table[owner, positions // self._page_size].astype(np.int64)
        return StepPlan(
            input_ids=NO_INPUT_IDS,
            uploads=[_upload(request) for request in batch.admitted],
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(pages * self._page_size + positions % self._page_size),
            block_table=torch.from_numpy(block_table),
            seq_lens=seq_lens.tolist(),
            seq_lens_tensor=torch.from_numpy(seq_lens.astype(np.int32)),
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
            **where,
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


def _decoding(rows: _Rows, seq_lens: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Returns the rows of a plan in which each request computes one token and samples the next: but for the
    lengths, what such a step had before.
    """
    return {
        "token_slots": rows.slots_tensor,
        "query_start_loc": rows.starts,
        "query_start_loc_tensor": rows.starts_tensor,
        "logits_indices": rows.index_tensor,
        "sample_batch_indices": rows.places,
        "sample_slots": rows.slots_tensor,
        "sample_positions": torch.from_numpy(seq_lens),
    }


def _spread(
    rows: _Rows, counts: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], samples: Sequence[bool]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], dict[str, Any]]:
    """Returns whose each row is and its position, `[T]`, and as `_decoding` where requests' rows are."""
    ends = counts.cumsum()
    owner = np.repeat(rows.index, counts)
    positions = np.arange(ends[-1]) - (ends - counts)[owner] + starts[owner]
    query_start_loc = np.concatenate(([0], ends))
    sampling_rows = [index for index, is_sampled in enumerate(samples) if is_sampled]
    where = {
        "token_slots": torch.from_numpy(rows.slots[owner]),
        "query_start_loc": query_start_loc.tolist(),
        "query_start_loc_tensor": torch.from_numpy(query_start_loc.astype(np.int32)),
        "logits_indices": torch.from_numpy((ends - 1)[sampling_rows]),
        "sample_batch_indices": sampling_rows,
        "sample_slots": torch.from_numpy(rows.slots[sampling_rows]),
        "sample_positions": torch.from_numpy((starts + counts)[sampling_rows]),
    }
    return owner, positions, where


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


@dataclass(eq=False)
class SampledRows:
    """Requests that rows are sampled of, in order, and what their parameters ask for; made once for them.

    Which requests have a constraint, bias entries and so on does not change while they live.
    """

    requests: list[Request]

    def __post_init__(self) -> None:
        params = [request.params for request in self.requests]
        random_rows = [row for row, p in enumerate(params) if not p.is_greedy]
        chosen = [params[row] for row in random_rows]
        self._random = np.asarray(random_rows, dtype=np.int64)
        self._mixed_seeds = np.asarray([mix64(p.seed) for p in chosen], dtype=np.uint64)
        self._with_bad_words = [row for row, p in enumerate(params) if p.bad_words]
        # The masks of requests with a constraint see to stop tokens themselves.
        self._with_min_tokens = [
            row for row, p in enumerate(params) if p.min_tokens and self.requests[row].constraint is None
        ]
        self._has_penalties = any(p.has_penalties for p in params)
        changing = (self._random.size, self._with_bad_words, self._with_min_tokens, self._has_penalties)
        self._is_constant = not any(changing)
        self.has_constraints = any(request.constraint is not None for request in self.requests)
        rows = [row for row, p in enumerate(params) if p.logprobs is not None]
        # Per logprob row: alternatives, and ids scored in addition.
        self.num_top_logprobs = [params[row].logprobs or 0 for row in rows]
        self.num_scored_ids = [len(params[row].logprob_token_ids) for row in rows]
        self._constant = SamplingPlan(
            temperature=torch.tensor([0.0 if p.is_greedy else p.temperature for p in params]),
            random_rows=_index(random_rows),
            uniform=torch.empty(0, dtype=torch.float64),
            top_k=torch.tensor([p.top_k for p in chosen], dtype=torch.int64),
            top_p=torch.tensor([p.top_p for p in chosen], dtype=torch.float64),
            min_p=torch.tensor([p.min_p for p in chosen], dtype=torch.float32),
            truncated=_index([row for row, p in enumerate(chosen) if p.top_k > 0 or p.top_p < 1.0]),
            bias=_bias(self.requests),
            banned=None,
            penalties=None,
            logprob_rows=rows,
            logprob_index=_index(rows),
            num_top_logprobs=max(self.num_top_logprobs, default=0),
            allowed=_allowed(self.requests),
            bad_words=None,
            scored_ids=_scored_ids([params[row].logprob_token_ids for row in rows]),
        )

    def plan(
        self,
        positions: Sequence[int],
        limits: SchedulerLimits,
        preceding_drafts: Sequence[list[int]] = (),
    ) -> SamplingPlan:
        """`positions[r]` is the output position that row r samples, counted from 0.

        `preceding_drafts`: of each row, as in `Batch`; empty: no row follows a draft.
        """
        if self._is_constant:
            return self._constant
        requests, drawn = self.requests, self._constant.uniform
        if self._random.size:
            places = np.asarray(positions, dtype=np.int64)[self._random]
            drawn = torch.from_numpy(uniforms(self._mixed_seeds, places))
        return replace(
            self._constant,
            uniform=drawn,
            banned=_banned(requests, self._with_min_tokens, positions, limits),
            penalties=_penalties(requests, preceding_drafts) if self._has_penalties else None,
            bad_words=_bad_words(requests, self._with_bad_words, positions),
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
    """Returns the request's `logit_bias`; made once, and kept with it."""
    if request.bias_entries is None:
        token_ids, values = zip(*request.params.logit_bias, strict=True)
        request.bias_entries = np.array(token_ids, dtype=np.int64), np.array(values, dtype=np.float32)
    return request.bias_entries


def _banned(
    requests: Sequence[Request], rows: Sequence[int], positions: Sequence[int], limits: SchedulerLimits
) -> SparseBias | None:
    held = [row for row in rows if positions[row] < requests[row].params.min_tokens]
    parts = [(row, _stop_entries(requests[row], limits)) for row in held]
    return _sparse([(row, entries) for row, entries in parts if len(entries[0])])


def _stop_entries(request: Request, limits: SchedulerLimits) -> Entries:
    """Minus infinity for each of `stop_token_ids`; made once per request, and kept with it."""
    if request.stop_entries is None:
        ids = np.array(sorted(stop_token_ids(request, limits)), dtype=np.int64)
        request.stop_entries = ids, np.full(len(ids), -np.inf, dtype=np.float32)
    return request.stop_entries


def _allowed(requests: Sequence[Request]) -> AllowedTokens | None:
    rows = [row for row, request in enumerate(requests) if request.params.allowed_token_ids]
    if not rows:
        return None
    lists = [requests[row].params.allowed_token_ids for row in rows]
    entry_rows = np.repeat(rows, [len(ids) for ids in lists])
    token_ids = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in lists])
    return AllowedTokens(_index(rows), torch.from_numpy(entry_rows), torch.from_numpy(token_ids))


def _bad_words(
    requests: Sequence[Request], rows_with_some: Sequence[int], positions: Sequence[int]
) -> BadWords | None:
    """Sequences that the next token could complete: only the device knows the tokens before it."""
    entries: list[tuple[int, BadWordEntries, npt.NDArray[np.bool_]]] = []
    for row in rows_with_some:
        own = _bad_word_entries(requests[row])
        possible = own.lengths <= positions[row] + 1
        if possible.any():
            entries.append((row, own, possible))
    if not entries:
        return None
    width = max(own.prefixes.shape[1] for _, own, _ in entries)
    prefixes, places, rows, slots = [], [], [], []
    for row, own, possible in entries:
        request, chosen = requests[row], own.prefixes[possible]
        padded = np.full((len(chosen), width), -1, dtype=np.int64)
        padded[:, width - chosen.shape[1] :] = chosen
        end = request.prompt_len + positions[row]
        prefixes.append(padded)
        places.append(np.where(padded >= 0, np.arange(end - width, end), 0))
        rows.append(np.full(len(chosen), row))
        slots.append(np.full(len(chosen), request.slot))
    last_ids = np.concatenate([own.last_ids[possible] for _, own, possible in entries])
    arrays = (np.concatenate(rows), last_ids, np.concatenate(slots), np.concatenate(prefixes))
    return BadWords(*(torch.from_numpy(array) for array in (*arrays, np.concatenate(places))))


def _bad_word_entries(request: Request) -> BadWordEntries:
    """Returns the request's `bad_words`; made once, and kept with it."""
    if request.bad_word_entries is None:
        words = request.params.bad_words
        width = max(map(len, words)) - 1
        prefixes = np.full((len(words), width), -1, dtype=np.int64)
        for number, word in enumerate(words):
            prefixes[number, width - len(word) + 1 :] = word[:-1]
        lengths = np.array([len(word) for word in words], dtype=np.int64)
        last_ids = np.array([word[-1] for word in words], dtype=np.int64)
        request.bad_word_entries = BadWordEntries(lengths, last_ids, prefixes)
    return request.bad_word_entries


def _scored_ids(lists: Sequence[tuple[int, ...]]) -> torch.Tensor | None:
    width = max(map(len, lists), default=0)
    return _padded(lists, width, 0) if width else None


def _padded(lists: Sequence[Sequence[int]], width: int, padding: int) -> torch.Tensor:
    """Returns int64 `[len(lists), width]`."""
    padded = [[*ids, *[padding] * (width - len(ids))] for ids in lists]
    return torch.tensor(padded, dtype=torch.int64).view(len(lists), width)


def _penalties(requests: Sequence[Request], preceding_drafts: Sequence[list[int]]) -> PenaltyRows | None:
    rows = [row for row, request in enumerate(requests) if request.params.has_penalties]
    if not rows:
        return None
    params = [requests[row].params for row in rows]
    preceding = [preceding_drafts[row] if preceding_drafts else [] for row in rows]
    return PenaltyRows(
        rows=torch.tensor(rows),
        slots=torch.tensor([requests[row].slot for row in rows]),
        repetition=torch.tensor([[p.repetition_penalty] for p in params]),
        presence=torch.tensor([[p.presence_penalty] for p in params]),
        frequency=torch.tensor([[p.frequency_penalty] for p in params]),
        preceding_drafts=_padded(preceding, max(map(len, preceding)), -1),
    )
