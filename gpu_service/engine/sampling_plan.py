"""Which rows of a step are sampled how, from their requests' parameters.

What follows from the parameters alone is kept for as long as the same requests are sampled
(`SampledRows`): in most steps only uniform numbers are new.

Uniform numbers depend on (seed, output position) and nothing else, so a sampled token is the same in any
batch, after a preemption and when a step is run again. The mixer is the finaliser of SplitMix64 (Steele,
Lea, Flood: "Fast splittable pseudorandom number generators", 2014), applied twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from gpu_service.core.request import BadWordEntries, Entries, Request, SchedulerLimits, stop_token_ids
from gpu_service.core.step import AllowedTokens, BadWords, PenaltyRows, SamplingPlan, SparseBias

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


def uniforms(
    mixed_seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Returns `uniform` of N seeds, each of which `mix64` was applied to, and N positions, float64 `[N]`."""
    numbers = _mix64s(mixed_seeds ^ _mix64s(positions.astype(np.uint64))) >> np.uint64(40)
    return numbers.astype(np.float64) / (1 << 24)


def _mix64s(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mix64` of an array, whose integers wrap around."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


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
        self._mixed_seeds = np.asarray([mix64(p.seed & _MASK) for p in chosen], dtype=np.uint64)
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


def build_sampling_plan(
    requests: Sequence[Request],
    positions: Sequence[int],
    limits: SchedulerLimits,
    preceding_drafts: Sequence[list[int]] = (),
) -> SamplingPlan:
    """Returns `SampledRows.plan` of requests that are sampled once."""
    return SampledRows(list(requests)).plan(positions, limits, preceding_drafts)


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
