"""Which (row, choice) pairs belong to which slot, and the sum of a row's choices.

`align` orders pairs by slot and pads each slot's to whole blocks of BLOCK pairs, so that a GEMM tile reads
one expert only. Everything stays on the device and has a size known on the host; the order of a slot's pairs
is theirs, so results do not depend on timing.
"""

from __future__ import annotations

import triton.language as tl

from gpu_service.experts.resident.triton_kernels.gemm import slot_of
from gpu_service.ops.triton.jit import jit, jit_for_any


@jit_for_any("count")
def cpu_ids_kernel(  # type: ignore[no-untyped-def]
    ids, slot_of_expert, counts, output, count, NUM_EXPERTS: tl.constexpr, COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """output = ids, -1 where the expert is in a slot of any rank.

    With COUNTS each chosen expert's count grows by one.
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = pair < count
    expert = tl.load(ids + pair, mask=held, other=-1)
    slot = tl.load(slot_of_expert + tl.maximum(expert, 0), mask=held, other=0)
    tl.store(output + pair, tl.where(slot != -1, -1, expert), mask=held)
    if COUNTS:
        is_expert = held & (expert >= 0) & (expert < NUM_EXPERTS)
        tl.atomic_add(counts + expert, 1, mask=is_expert, sem="relaxed")


@jit
def _slots_of(ids, slot_of_expert, pair, count):  # type: ignore[no-untyped-def]
    held = pair < count
    expert = tl.load(ids + pair, mask=held, other=-1)
    return tl.load(slot_of_expert + tl.maximum(expert, 0), mask=held & (expert >= 0), other=-1)


@jit_for_any("count", "first")
def count_pairs(ids, slot_of_expert, counts, count, first, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (slot - first): int32 counts[slot - first], its pairs."""
    slot = first + tl.program_id(0)
    total = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, count, CHUNK):
        found = _slots_of(ids, slot_of_expert, begin + tl.arange(0, CHUNK), count)
        total += (found == slot).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(total, 0))


@jit_for_any("count", "num_slots", "first")
def place_pairs(  # type: ignore[no-untyped-def]
    ids, slot_of_expert, counts, pairs, block_slots, count, num_slots, first, MAX_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (slot - first): writes its pairs, in their order, and which slot its blocks belong to.

    `pairs` must hold `count` (no pair) and `block_slots` -1 (no slot) everywhere.
    """
    slot = tl.program_id(0)
    every = tl.arange(0, MAX_SLOTS)
    blocks = (tl.load(counts + every, mask=every < num_slots, other=0) + BLOCK - 1) // BLOCK
    first_block = tl.sum(tl.where(every < slot, blocks, 0), 0)
    own_blocks = tl.sum(tl.where(every == slot, blocks, 0), 0)
    for block in range(own_blocks):
        tl.store(block_slots + first_block + block, first + slot)
    done = first_block * BLOCK
    for begin in range(0, count, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        chosen = _slots_of(ids, slot_of_expert, pair, count) == first + slot
        one = chosen.to(tl.int32)
        tl.store(pairs + done + tl.cumsum(one, 0) - 1, pair, mask=chosen)
        done += tl.sum(one, 0)


@jit_for_any("first", "end")
def combine(  # type: ignore[no-untyped-def]
    outputs, partial, result, ids, slot_of_expert, weights, first, end,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, HAS_PARTIAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block of columns): result = partial + sum of weight * output over the row's choices.

    Those whose slots are `first` to `end` - 1.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < HIDDEN
    place = row.to(tl.int64) * HIDDEN + column
    if HAS_PARTIAL:
        total = tl.load(partial + place, mask=held, other=0.0).to(tl.float32)
    else:
        total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = row * TOP_K + choice
        slot = slot_of(ids, slot_of_expert, pair)
        weight = tl.load(weights + pair)
        # What was not computed is never read: it may hold anything.
        is_here = (slot >= first) & (slot < end)
        output = tl.load(outputs + pair.to(tl.int64) * HIDDEN + column, mask=held & is_here, other=0.0)
        total += weight * output
    tl.store(result + place, total, mask=held)
