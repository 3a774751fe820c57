"""`FetchKernels` by Triton: one program chooses, others copy from the host's memory on a stream aside."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from gpu_service.experts.fetching.kernels import FetchKernels, kept_after
from gpu_service.experts.fetching.slots import FetchLayer
from gpu_service.ops.triton.jit import jit, jit_for_any, next_power_of_2

# torch leaves its streams untyped.
_cuda: Any = torch.cuda
# Pairs that are compared with all experts at once: of few rows, and of more. Comparisons of a warp.
_FEW_PAIRS, _PAIRS, _COMPARED = 16, 64, 2048
# Programs that copy, and 32-bit words that each has on the way. On one H200 sixteen programs of 2048 words
# had 48.9 GB/s (the copy engine 51.5), but 36 beside threads that read 147 GB/s of the same memory, and these
# 43.
COPY_PROGRAMS, COPY_WORDS, _COPY_WARPS = 32, 8192, 4
_NEVER = tl.constexpr(1e30)


@jit
def _rows_of(ids, count, expert, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns how many of `count` pairs chose each expert, int32 like `expert`."""
    rows = expert - expert
    for begin in range(0, count, PAIRS):
        pair = begin + tl.arange(0, PAIRS)
        chosen = tl.load(ids + pair, mask=pair < count, other=-1)
        rows += tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
    return rows


@jit
def _divide(  # type: ignore[no-untyped-def]
    ids, served, fetched, count, expert, place,
    PAIRS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Stores which pairs are servers' and which are in this rank's fetch slots; `place`: of each expert."""
    for begin in range(0, count, PAIRS):
        pair = begin + tl.arange(0, PAIRS)
        held = pair < count
        chosen = tl.load(ids + pair, mask=held, other=-1)
        found = tl.max(tl.where(chosen[:, None] == expert[None, :], place[None, :], -1), 1)
        tl.store(served + pair, tl.where(found >= 0, -1, chosen), mask=held)
        tl.store(fetched + pair, tl.where((found >= 0) & (found % RANKS == RANK), chosen, -1), mask=held)


@jit_for_any("count")
def choose(  # type: ignore[no-untyped-def]
    ids, slot_of_expert, places, scores, addresses, prices, coming, counters, served, fetched, count, kept,
    NUM_EXPERTS: tl.constexpr, NUM_PLACES: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, RANK_PLACES: tl.constexpr,
):  # fmt: skip
    """Computes `FetchKernels.choose`, of `count` pairs; EXPERTS and RANK_PLACES: powers of two that are not
    below NUM_EXPERTS and RANKS.

    Occupied places are always the first ones: an expert leaves only where another takes its place.
    """
    expert, rank = tl.arange(0, EXPERTS), tl.arange(0, RANK_PLACES)
    is_expert = expert < NUM_EXPERTS
    rows = tl.where(is_expert, _rows_of(ids, count, expert, PAIRS), 0)
    place = tl.load(places + expert, mask=is_expert, other=-1)
    score = tl.load(scores + expert, mask=is_expert, other=0.0) * kept + rows.to(tl.float32)
    tl.store(scores + expert, score, mask=is_expert)
    server_seconds, link_seconds = tl.load(prices), tl.load(prices + 1)

    is_missing = (rows > 0) & (place < 0)
    is_there = tl.load(addresses + expert, mask=is_missing, other=0) != 0
    candidates = tl.where(is_there, score, -1.0)
    leavers = tl.where((place >= 0) & (rows == 0), score, _NEVER)
    left = tl.sum(tl.where(is_missing, rows, 0), 0).to(tl.float32)
    occupied = tl.sum((place >= 0).to(tl.int32), 0)
    copied, own = tl.zeros([RANK_PLACES], tl.int32), occupied - occupied
    now, is_open = left * server_seconds, left > 0
    while is_open:
        best, leaver, has_room = tl.argmax(candidates, 0), tl.argmin(leavers, 0), occupied < NUM_PLACES
        leaves = (expert == leaver) & ~has_room
        taken = tl.where(has_room, occupied, tl.sum(tl.where(leaves, place, 0), 0))
        of_best = tl.sum(tl.where(expert == best, rows, 0), 0).to(tl.float32)
        with_it = copied + (rank == taken % RANKS).to(tl.int32)
        then = tl.maximum((left - of_best) * server_seconds, tl.max(with_it, 0).to(tl.float32) * link_seconds)
        most, least = tl.max(candidates, 0), tl.min(leavers, 0)
        gained = tl.maximum(most - of_best - tl.where(has_room, 0.0, least), 0.0)
        is_open = (most > 0) & (has_room | (least < _NEVER)) & (then < now + gained * server_seconds)
        if is_open:
            place = tl.where(expert == best, taken, tl.where(leaves, -1, place))
            leavers = tl.where(leaves, _NEVER, leavers)
            candidates = tl.where(expert == best, -1.0, candidates)
            is_own = taken % RANKS == RANK
            tl.store(coming + 1 + 2 * own, best, mask=is_own)
            tl.store(coming + 2 + 2 * own, taken // RANKS, mask=is_own)
            left, now, copied = left - of_best, then, with_it
            own += is_own.to(tl.int32)
            occupied += has_room.to(tl.int32)
    tl.store(coming, own)
    is_mine = (place >= 0) & (place % RANKS == RANK)
    tl.store(places + expert, place, mask=is_expert)
    tl.store(slot_of_expert + expert, tl.where(is_mine, place // RANKS, -1), mask=is_expert)

    in_slots = tl.sum(tl.where(place >= 0, rows, 0), 0)
    tl.store(counters, tl.load(counters) + tl.sum(copied, 0))
    tl.store(counters + 1, tl.load(counters + 1) + in_slots)
    tl.store(counters + 2, tl.load(counters + 2) + tl.sum(rows, 0) - in_slots)
    _divide(ids, served, fetched, count, expert, place, PAIRS, RANK, RANKS)


@jit
def copy(  # type: ignore[no-untyped-def]
    coming, addresses, target,
    EXPERT_WORDS: tl.constexpr, PROGRAMS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Each of PROGRAMS programs copies every PROGRAMS-th block of WORDS words of each expert that comes.

    Experts begin at multiples of 16 bytes, on the host and in slots.
    """
    blocks: tl.constexpr = (EXPERT_WORDS + WORDS - 1) // WORDS
    for number in range(tl.load(coming)):
        expert, slot = tl.load(coming + 1 + 2 * number), tl.load(coming + 2 + 2 * number)
        source = tl.load(addresses + expert).to(tl.pointer_type(tl.int32))
        goal = target + slot.to(tl.int64) * EXPERT_WORDS
        for block in range(tl.program_id(0), blocks, PROGRAMS):
            word = block * WORDS + tl.arange(0, WORDS)
            held = word < EXPERT_WORDS
            read = tl.max_contiguous(tl.multiple_of(source + word, 16), WORDS)
            written = tl.max_contiguous(tl.multiple_of(goal + word, 16), WORDS)
            tl.store(written, tl.load(read, mask=held, cache_modifier=".cg"), mask=held)


class TritonFetchKernels(FetchKernels):
    """On a GPU, with a stream aside for copies; under the interpreter the host is the device."""

    def __init__(self, device: torch.device, programs: int = COPY_PROGRAMS) -> None:
        self._device, self._programs = device, programs
        self._aside = _cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def choose(self, layer: FetchLayer, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = topk_ids.contiguous()
        served, fetched = torch.empty_like(ids), torch.empty_like(ids)
        experts = next_power_of_2(layer.num_experts)
        pairs = _FEW_PAIRS if ids.numel() <= 8 * _FEW_PAIRS else _PAIRS
        choose[(1,)](
            ids,
            layer.slot_of_expert,
            layer.places,
            layer.scores,
            layer.addresses,
            layer.prices,
            layer.coming,
            layer.counters,
            served,
            fetched,
            ids.numel(),
            kept_after(ids.shape[0]),
            NUM_EXPERTS=layer.num_experts,
            NUM_PLACES=layer.num_places,
            EXPERTS=experts,
            PAIRS=pairs,
            RANK=layer.rank,
            RANKS=layer.num_ranks,
            RANK_PLACES=next_power_of_2(layer.num_ranks),
            num_warps=next_power_of_2(min(8, experts * pairs // _COMPARED)),
        )
        return served, fetched

    def copy(self, layer: FetchLayer) -> None:
        if self._aside is None:
            self._launch_copy(layer)
            return
        self._aside.wait_stream(_cuda.current_stream(self._device))
        with _cuda.stream(self._aside):
            self._launch_copy(layer)

    def _launch_copy(self, layer: FetchLayer) -> None:
        for group, slots in enumerate(layer.groups):
            words = slots.weights.view(torch.int32)
            copy[(self._programs,)](
                layer.coming,
                layer.addresses[group],
                words,
                EXPERT_WORDS=words.shape[1],
                PROGRAMS=self._programs,
                WORDS=COPY_WORDS,
                num_warps=_COPY_WARPS,
            )

    def join(self) -> None:
        if self._aside is not None:
            _cuda.current_stream(self._device).wait_stream(self._aside)
