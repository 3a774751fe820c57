"""Pairs of a row and one of its choices: which are computed together, in what order, and their sums."""

from __future__ import annotations

import torch

from gpu_service.experts.resident.experts import LayerSlots
from gpu_service.experts.resident.panels import pair_bytes
from gpu_service.experts.resident.triton_kernels import launch, routing
from gpu_service.ops.triton.jit import next_power_of_2

_COMBINE_BLOCK = 512
# Pairs that a program of the routing kernels looks at together; more of them where there are many.
_CHUNK, _LARGE_CHUNK, _MANY_PAIRS = 1024, 4096, 16384


def row_parts(slots: LayerSlots, hidden_states: torch.Tensor, top_k: int) -> list[slice]:
    """Returns the rows that are computed together: all of them, or equal parts of many."""
    rows, kind = hidden_states.shape[0], slots.kind
    per_pair = pair_bytes(kind.intermediate_columns, kind.hidden_size, hidden_states.dtype.itemsize)
    parts = launch.parts_of(rows, top_k * per_pair)
    return [slice(rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]


def pair_memory(
    slots: LayerSlots, hidden_states: torch.Tensor, pairs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what lies between the two products, and in float32 what comes of them."""
    intermediate = hidden_states.new_empty((pairs, slots.kind.intermediate_columns))
    return intermediate, hidden_states.new_empty((pairs, slots.kind.hidden_size), dtype=torch.float32)


def combine_choices(
    slots: LayerSlots,
    first: int,
    count: int,
    outputs: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    partial: torch.Tensor | None,
    result: torch.Tensor,
) -> None:
    rows, hidden = result.shape
    block = min(_COMBINE_BLOCK, next_power_of_2(hidden))
    routing.combine[(rows, -(-hidden // block))](
        outputs,
        result if partial is None else partial,
        result,
        topk_ids,
        slots.slot_of_expert,
        topk_weights,
        first,
        first + count,
        TOP_K=topk_ids.shape[1],
        HIDDEN=hidden,
        HAS_PARTIAL=partial is not None,
        BLOCK=block,
    )


def align(
    slots: LayerSlots, topk_ids: torch.Tensor, rows_per_block: int, first: int, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pairs by slot, each slot's padded to whole blocks; int32 `[blocks * rows_per_block]` and
    `[blocks]`.

    Of `num_slots` slots from `first`. A pair is row * K + choice; padding is their number, a block without a
    slot -1.
    """
    count = topk_ids.numel()
    blocks = launch.max_blocks(count, num_slots, rows_per_block)
    pairs = topk_ids.new_full((blocks * rows_per_block,), count)
    block_slots = topk_ids.new_full((blocks,), -1)
    counts = topk_ids.new_empty((num_slots,))
    chunk = _LARGE_CHUNK if count >= _MANY_PAIRS else _CHUNK
    grid, warps = (num_slots,), chunk // 256
    routing.count_pairs[grid](
        topk_ids, slots.slot_of_expert, counts, count, first, CHUNK=chunk, num_warps=warps
    )
    routing.place_pairs[grid](
        topk_ids,
        slots.slot_of_expert,
        counts,
        pairs,
        block_slots,
        count,
        num_slots,
        first,
        MAX_SLOTS=next_power_of_2(slots.slot_of_expert.shape[0]),
        BLOCK=rows_per_block,
        CHUNK=chunk,
        num_warps=warps,
    )
    return pairs, block_slots
