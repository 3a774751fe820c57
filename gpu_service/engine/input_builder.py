"""From the scheduler's batch to what the device needs, with everything about requests snapshotted.

After `build` a step in flight looks at no request any more: the host is free to change them.

Uniform numbers depend on (seed, output position) and nothing else, so a sampled token is the same in any
batch, after a preemption and when a step is run again. The mixer is the finaliser of SplitMix64 (Steele,
Lea, Flood: "Fast splittable pseudorandom number generators", 2014), applied twice.
"""

from __future__ import annotations

from collections.abc import Sequence

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

    def sync(self, request: Request) -> None:
        """Brings the row of a running request up to date."""
        slot, count = request.slot, len(request.pages)
        start = self._written[slot]
        if self._epoch[slot] != request.pages_epoch:
            start = 0
            self._table[slot] = 0
            self._epoch[slot] = request.pages_epoch
        if count > start:
            self._table[slot, start:count] = request.pages[start:]
        self._written[slot] = count

    def rows(self, requests: list[Request]) -> npt.NDArray[np.int32]:
        """Returns a copy `[R, longest]`: a step in flight must not see later changes."""
        longest = max(len(request.pages) for request in requests)
        return self._table[[request.slot for request in requests], :longest]


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

    def build(self, batch: Batch, trace_context: Context | None = None) -> StepPlan:
        """Tensors are fresh in every call, so two steps may be in flight."""
        drafts = None
        if batch.drafts:
            drafts, batch = plan_drafts(batch), as_rows(batch)
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
            input_ids=NO_INPUT_IDS,
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
            sampling=self._sampling(batch, requests, output_positions),
            state_reads=_state_slots(batch.state_reads),
            state_writes=_state_slots(batch.state_writes),
            depths=_depths(batch),
            prompt_logprobs=_prompt_logprob_rows(batch),
            pooled=_pooled_rows(batch),
            num_top_logprobs=[r.params.logprobs for r in requests if r.params.logprobs is not None],
            num_scored_ids=[
                len(r.params.logprob_token_ids) for r in requests if r.params.logprobs is not None
            ],
            trace_context=trace_context,
            mrope_positions=_axis_positions(batch, positions) if self._has_mrope else None,
            visible_ends=_visible_ends(batch, positions),
            images=_plan_images(batch),
            drafts=drafts,
            num_drafts=batch.num_drafts,
            runs_drafter=batch.runs_drafter,
        )

    def masks(self, batch: Batch) -> TokenMasks | None:
        """Returns the masks that a step's plan awaits, once all steps before it are committed."""
        return self.token_masks.build(as_rows(batch))

    def _sampling(
        self, batch: Batch, requests: list[Request], output_positions: list[int]
    ) -> SamplingPlan | None:
        if not requests:
            return None
        plan = build_sampling_plan(requests, output_positions, self._limits, batch.preceding_drafts)
        if any(request.constraint is not None for request in requests):
            return self.token_masks.plan(batch, plan)
        return plan


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


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """Returns a bijection of 64-bit integers whose output bits each depend on all input bits."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) with 24 random bits (exact in float32)."""
    return (mix64(mix64(seed & _MASK) ^ mix64(position)) >> 40) / (1 << 24)


def derive_seed(seed: int, *parts: int | str) -> int:
    """Returns a seed in [0, 2^63) for a sub-stream, e.g. one of a request's outputs."""
    state = mix64(seed & _MASK)
    for part in parts:
        for byte in str(part).encode():
            state = mix64(state ^ byte)
        state = mix64(state ^ 0x100)
    return state >> 1


def build_sampling_plan(
    requests: Sequence[Request],
    positions: Sequence[int],
    limits: SchedulerLimits,
    preceding_drafts: Sequence[list[int]] = (),
) -> SamplingPlan:
    """`positions[r]` is the output position that row r samples, counted from 0.

    `preceding_drafts`: of each row, as in `Batch`; empty: no row follows a draft.
    """
    params = [request.params for request in requests]
    random_rows = [row for row, p in enumerate(params) if not p.is_greedy]
    chosen = [params[row] for row in random_rows]
    logprob_rows = [row for row, p in enumerate(params) if p.logprobs is not None]
    return SamplingPlan(
        temperature=torch.tensor([0.0 if p.is_greedy else p.temperature for p in params]),
        random_rows=_index(random_rows),
        uniform=torch.tensor(
            [uniform(params[row].seed, positions[row]) for row in random_rows], dtype=torch.float64
        ),
        top_k=torch.tensor([p.top_k for p in chosen], dtype=torch.int64),
        top_p=torch.tensor([p.top_p for p in chosen], dtype=torch.float64),
        min_p=torch.tensor([p.min_p for p in chosen], dtype=torch.float32),
        truncated=_index([row for row, p in enumerate(chosen) if p.top_k > 0 or p.top_p < 1.0]),
        bias=_bias(requests),
        banned=_banned(requests, positions, limits),
        penalties=_penalties(requests, preceding_drafts),
        logprob_rows=logprob_rows,
        logprob_index=_index(logprob_rows),
        num_top_logprobs=max((params[row].logprobs or 0 for row in logprob_rows), default=0),
        allowed=_allowed(requests),
        bad_words=_bad_words(requests, positions),
        scored_ids=_scored_ids([params[row].logprob_token_ids for row in logprob_rows]),
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
    requests: Sequence[Request], positions: Sequence[int], limits: SchedulerLimits
) -> SparseBias | None:
    # The masks of requests with a constraint see to that themselves.
    held = [
        row
        for row, request in enumerate(requests)
        if positions[row] < request.params.min_tokens and request.constraint is None
    ]
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


def _bad_words(requests: Sequence[Request], positions: Sequence[int]) -> BadWords | None:
    """Sequences that the next token could complete: only the device knows the tokens before it."""
    entries: list[tuple[int, BadWordEntries, npt.NDArray[np.bool_]]] = []
    for row, request in enumerate(requests):
        if request.params.bad_words:
            own = _bad_word_entries(request)
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
