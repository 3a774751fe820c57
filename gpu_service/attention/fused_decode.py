"""All that a decode step does between a layer's projections, in one launch: norm, rotation, cache, attention.

A step of few requests has too little work for a launch each. A program takes one KV head of one request and
a split of its keys: it norms and rotates the queries of that head, and attends. The program of the first
split also norms and rotates the new key, stores it with its value, and attends to it. Where rows before it
are tokens of the same request (draft tokens, a short prompt), other programs of this very launch store their
keys and values: it takes them from where those come from, just as they will be in the cache. How many keys a
split has is computed on the device, as in `triton_kernels.py` ("Flash-Decoding"). The last program of a head
to end merges the results of all splits; programs count themselves in a counter, which is zero again when the
kernel ends.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.attention.base import PLAIN, AttentionBackend, AttentionLayer
from gpu_service.attention.triton_kernels import _LOWEST, LOG2_E, _add_values, keys_per_split
from gpu_service.attention.triton_tiles import MIN_ROWS, streaming_multiprocessors
from gpu_service.ops.rope import Unrotated
from gpu_service.ops.triton.counters import MAX_COUNTERS, stream_counters
from gpu_service.ops.triton.jit import jit, jit_for_any, next_power_of_2, overlap, wait_for_previous

# Requests of a step; for more of them, FlashInfer balances long and short ones better.
MAX_REQUESTS = 32
MAX_SPLITS = 32
# Fewer keys than this are not worth a program of their own.
MIN_SPLIT = 128
_BLOCK_KEYS = 64
# Tokens of its own step that a program attends to at a time: rows that a tensor core takes at least.
_BLOCK_NEW = 16
# Elements of splits' results that are merged at a time: what a program's registers hold.
_MERGED_AT_ONCE = 8192


@jit
def _weighted(normed, weight, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the float32 of normed elements times their weights, rounded before and after as
    `rms_norm` rounds.
    """
    return (normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)


@jit
def _partners(element, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the other element of each one's pair, and which have one."""
    partner = element ^ 1 if INTERLEAVED else (element + ROTARY_DIM // 2) % ROTARY_DIM
    in_pairs = element < ROTARY_DIM
    return tl.where(in_pairs, partner, element), in_pairs


@jit
def _angles(cos, sin, element, in_pairs):  # type: ignore[no-untyped-def]
    """Returns the factors of elements and of their partners: the table's sines have the signs."""
    c = tl.load(cos + element, mask=in_pairs, other=1.0).to(tl.float32)
    return c, tl.load(sin + element, mask=in_pairs, other=0.0).to(tl.float32)


@jit
def _rotated(  # type: ignore[no-untyped-def]
    row,
    element,
    partner,
    held,
    weight,
    partner_weight,
    c,
    s,
    eps,
    HEAD_DIM: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    """Norms and rotates heads `[M, HEAD_DIM]`, rounded where the op rounds; `element` `[1,
    HEAD_DIM]`.
    """
    loaded = tl.load(row + element, mask=held, other=0.0)
    dtype: tl.constexpr = loaded.dtype
    own, other = loaded.to(tl.float32), tl.load(row + partner, mask=held, other=0.0).to(tl.float32)
    if NORMS:
        scale = 1.0 / tl.sqrt(tl.sum(own * own, axis=1, keep_dims=True) / HEAD_DIM + eps)
        own, other = _weighted(own * scale, weight, dtype), _weighted(other * scale, partner_weight, dtype)
    return (own * c + other * s).to(dtype)


@jit
def _earlier_rows(  # type: ignore[no-untyped-def]
    slot_mapping, table, request, cached, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr
):
    """Returns how many rows before this one are the tokens before its own, stored where these belong."""
    found = 0
    if ROWS > 1:
        back = 1 + tl.arange(0, ROWS)
        position, there = cached - back, (back <= request) & (back <= cached)
        page = tl.load(table + position // PAGE_SIZE, mask=there, other=0)
        stored = tl.load(slot_mapping + request - back, mask=there, other=-1)
        is_earlier = there & (stored == page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE)
        found = tl.min(tl.where(is_earlier, ROWS, back - 1), 0)
    return found


@jit
def _attended(  # type: ignore[no-untyped-def]
    q, keys, values, seen, maximum, total, weighted, score_scale, PRECISION: tl.constexpr
):
    """The running softmax of `_add_values` with one more tile, of which `seen` `[N]` count."""
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * score_scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    return _add_values(scores, values, maximum, total, weighted, PRECISION)


@jit
def _attended_cache(  # type: ignore[no-untyped-def]
    q, keys, table, begin, end, slot_stride, maximum, total, weighted, score_scale, VALUES: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running softmax with cached tokens; `keys`: those of the first slot."""
    for first in range(begin, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        seen = position < end
        page = tl.load(table + position // PAGE_SIZE, mask=seen, other=0)
        place = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        at = keys + place[:, None] * slot_stride
        key = tl.load(at, mask=seen[:, None], other=0.0)
        value = tl.load(at + VALUES, mask=seen[:, None], other=0.0)
        maximum, total, weighted = _attended(
            q, key, value, seen, maximum, total, weighted, score_scale, PRECISION
        )
    return maximum, total, weighted


@jit
def _attended_step(  # type: ignore[no-untyped-def]
    q, slot, key, value, request, earlier, element, partner, in_pairs, weight, partner_weight, c, s, cos, sin,
    eps, row_stride, value_stride, total, weighted, score_scale, VALUES: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NORMS: tl.constexpr, BLOCK_NEW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores a row's token, key and value VALUES elements apart, and begins the running softmax with it and
    the `earlier` rows before it: normed and rotated as they will be in the cache.
    """
    k = _rotated(
        key + request * row_stride, element, partner, element >= 0, weight, partner_weight, c, s, eps,
        HEAD_DIM, NORMS,
    )  # fmt: skip
    v = tl.load(value + request * value_stride)
    tl.store(slot, k)
    tl.store(slot + VALUES, v)
    maximum = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * score_scale
    total, weighted = total + 1.0, weighted + v.to(tl.float32)
    for first in range(0, earlier, BLOCK_NEW):
        back = 1 + first + tl.arange(0, BLOCK_NEW)
        is_new = back <= earlier
        row = tl.where(is_new, request - back, request)[:, None]
        cosines, sines = _angles(cos + row * ROTARY_DIM, sin + row * ROTARY_DIM, element, in_pairs)
        keys = _rotated(
            key + row * row_stride, element, partner, is_new[:, None], weight, partner_weight, cosines, sines,
            eps, HEAD_DIM, NORMS,
        )  # fmt: skip
        values = tl.load(value + row * value_stride, mask=is_new[:, None], other=0.0)
        maximum, total, weighted = _attended(
            q, keys, values, is_new, maximum, total, weighted, score_scale, PRECISION
        )
    return maximum, total, weighted


@jit
def _merge(  # type: ignore[no-untyped-def]
    output, result, logits, results, lse, counters, number, split, used, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Leaves a split's result `[BLOCK_G, HEAD_DIM]`, and of the last split to end writes all of them, merged.

    `logits` `[BLOCK_G]`: the logarithm of a split's part of the softmax. `number`: the KV head's, of all
    requests. What other programs have just written is in no L1.
    """
    element, member = tl.arange(0, HEAD_DIM)[None, :], tl.arange(0, BLOCK_G)
    first = number * (GROUP * MAX_SPLITS)
    part = first + member * MAX_SPLITS + split
    tl.store(results + part[:, None] * HEAD_DIM + element, result, mask=(member < GROUP)[:, None])
    tl.store(lse + part, logits, mask=member < GROUP)
    # All threads have written before one of them counts the program.
    tl.debug_barrier()
    if tl.atomic_add(counters + number, 1, sem="acq_rel") == used - 1:
        tl.store(counters + number, 0)
        head = tl.arange(0, BLOCK_M)
        maximum = tl.full([BLOCK_M], _LOWEST, tl.float32)
        total, merged = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
        for begin in range(0, used, BLOCK_S):
            each = begin + tl.arange(0, BLOCK_S)
            at = first + head[:, None] * MAX_SPLITS + each[None, :]
            there = (head < GROUP)[:, None] & (each < used)[None, :]
            share = tl.load(lse + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            place = results + at[:, :, None] * HEAD_DIM + element[None, :, :]
            some = tl.load(place, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
            highest = tl.maximum(maximum, tl.max(share, 1))
            shrink, share = tl.exp2(maximum - highest), tl.exp2(share - highest[:, None])
            merged = merged * shrink[:, None] + tl.sum(some * share[:, :, None], 1)
            total = total * shrink + tl.sum(share, 1)
            maximum = highest
        merged = (merged / total[:, None]).to(output.dtype.element_ty)
        tl.store(output + head[:, None] * HEAD_DIM + element, merged, mask=(head < GROUP)[:, None])


@jit_for_any("table_stride", "num_splits")
def decode_attention_kernel(  # type: ignore[no-untyped-def]
    heads, value, q_weight, k_weight, cos, sin, slots, slot_mapping, block_table, seq_lens, output, results,
    lse, counters, row_stride, head_stride, value_stride, value_head_stride, slot_stride, table_stride,
    num_splits, eps, score_scale, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, NORMS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_NEW: tl.constexpr, MOST_ROWS: tl.constexpr, MAX_SPLITS: tl.constexpr, MINIMUM: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (split, KV head, request): output `[R, num_heads, HEAD_DIM]`, keys and values in their slots.

    Lengths and pages were there before the step began; slots of tokens before the step's own also.
    """
    split, kv_head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    member, element = tl.arange(0, BLOCK_G), tl.arange(0, HEAD_DIM)[None, :]
    partner, in_pairs = _partners(element, ROTARY_DIM, INTERLEAVED)
    # All that nothing in this step writes any more is under way while the kernel before ends.
    length, own_slot = tl.load(seq_lens + request), tl.load(slot_mapping + request)
    own_cos, own_sin = _angles(cos + request * ROTARY_DIM, sin + request * ROTARY_DIM, element, in_pairs)
    q_own, q_other, k_own, k_other = 1.0, 1.0, 1.0, 1.0
    if NORMS:
        q_own, q_other = tl.load(q_weight + element), tl.load(q_weight + partner)
        k_own, k_other = tl.load(k_weight + element), tl.load(k_weight + partner)
    table = block_table + request * table_stride
    earlier = _earlier_rows(slot_mapping, table, request, length - 1, PAGE_SIZE, MOST_ROWS)
    cached = length - 1 - earlier
    share = keys_per_split(cached, num_splits, MINIMUM, BLOCK_N)
    used = tl.maximum(tl.cdiv(cached, share), 1)
    if split >= used:
        return
    begin, end = split * share, tl.minimum((split + 1) * share, cached)
    slot = slots + own_slot * slot_stride + kv_head * HEAD_DIM + element
    wait_for_previous(OVERLAPS)
    head, held = kv_head * GROUP + member, (member < GROUP)[:, None]
    q = _rotated(
        heads + request * row_stride + head[:, None] * head_stride, element, partner, held, q_own, q_other,
        own_cos, own_sin, eps, HEAD_DIM, NORMS,
    )  # fmt: skip
    maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total, weighted = tl.zeros([BLOCK_G], tl.float32), tl.zeros([BLOCK_G, HEAD_DIM], tl.float32)
    if split == 0:
        maximum, total, weighted = _attended_step(
            q, slot, heads + (GROUP * NUM_KV_HEADS + kv_head) * head_stride,
            value + kv_head * value_head_stride + element, request, earlier, element, partner, in_pairs,
            k_own, k_other, own_cos, own_sin, cos, sin, eps, row_stride, value_stride, total, weighted,
            score_scale, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, ROTARY_DIM, NORMS, BLOCK_NEW, PRECISION,
        )  # fmt: skip
    maximum, total, weighted = _attended_cache(
        q, slots + kv_head * HEAD_DIM + element, table, begin, end, slot_stride, maximum, total, weighted,
        score_scale, NUM_KV_HEADS * HEAD_DIM, PAGE_SIZE, BLOCK_N, PRECISION,
    )  # fmt: skip
    result = weighted / total[:, None]
    target = output + (request * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
    if used == 1:
        at = target + member[:, None] * HEAD_DIM + element
        tl.store(at, result.to(output.dtype.element_ty), mask=held)
        return
    _merge(
        target, result, maximum + tl.log2(total), results, lse, counters, request * NUM_KV_HEADS + kv_head,
        split, used, GROUP, HEAD_DIM, BLOCK_G, BLOCK_M, BLOCK_S, MAX_SPLITS,
    )  # fmt: skip


def can_decode(unrotated: Unrotated, value: torch.Tensor, slots: torch.Tensor) -> bool:
    """Returns whether a step of one token a request is one of few, of heads and slots that the
    kernel knows.
    """
    heads, table = unrotated.heads, unrotated.table
    num_requests, head_dim = heads.shape[0], heads.shape[2]
    return (
        0 < num_requests <= MAX_REQUESTS
        and num_requests * value.shape[1] <= MAX_COUNTERS
        and head_dim == next_power_of_2(head_dim) >= MIN_ROWS
        and table.cos.shape[-1] <= head_dim
        and table.query_scale is None
        and heads.stride(2) == value.stride(2) == 1
        and slots.dtype == heads.dtype == value.dtype
        and stream_counters(heads.device) is not None
    )


def decode_attention(
    unrotated: Unrotated,
    value: torch.Tensor,
    slots: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    softmax_scale: float,
) -> torch.Tensor:
    """Computes attention of R requests that compute one token each, `[R, num_heads * head_dim]`.

    heads `[R, num_heads + num_kv_heads, head_dim]` before norm and rotation and value `[R, num_kv_heads,
    head_dim]`; slots `[num_slots, 2 * num_kv_heads, head_dim]`, which get both; slot_mapping int64 `[R]`;
    block_table int32 `[R, max_pages]`; seq_lens int32 `[R]`, with the new tokens.
    """
    heads, q_weight, k_weight, eps, num_heads, table = unrotated
    num_requests, head_dim, num_kv_heads = heads.shape[0], heads.shape[2], heads.shape[1] - num_heads
    group, longest = num_heads // num_kv_heads, block_table.shape[1] * page_size
    programs = 2 * streaming_multiprocessors(heads.device) // (num_requests * num_kv_heads)
    splits = max(1, min(MAX_SPLITS, programs, -(-longest // MIN_SPLIT)))
    width, heads_at_once = next_power_of_2(splits), next_power_of_2(group)
    at_once = max(1, _MERGED_AT_ONCE // (heads_at_once * head_dim))
    output = heads.new_empty((num_requests, num_heads, head_dim))
    results = heads.new_empty((num_requests, num_heads, width, head_dim), dtype=torch.float32)
    lse = results.new_empty(results.shape[:3])
    decode_attention_kernel[(splits, num_kv_heads, num_requests)](
        heads, value, heads if q_weight is None else q_weight, heads if k_weight is None else k_weight,
        table.cos, table.sin, slots, slot_mapping, block_table, seq_lens, output, results, lse,
        stream_counters(heads.device), *heads.stride()[:2], *value.stride()[:2], slots.stride(0),
        block_table.stride(0), splits, eps, softmax_scale * LOG2_E, GROUP=group, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, ROTARY_DIM=table.cos.shape[-1], INTERLEAVED=table.interleaved,
        NORMS=q_weight is not None, PAGE_SIZE=page_size, BLOCK_G=max(MIN_ROWS, next_power_of_2(group)),
        BLOCK_N=_BLOCK_KEYS, BLOCK_M=heads_at_once, BLOCK_S=min(at_once, width),
        BLOCK_NEW=_BLOCK_NEW, MOST_ROWS=1 if num_requests == 1 else MAX_REQUESTS, MAX_SPLITS=width,
        MINIMUM=MIN_SPLIT, PRECISION="ieee" if heads.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=3, **overlap(heads.device),
    )  # fmt: skip
    return output.flatten(1)


class FusedDecodeAttention(AttentionBackend):
    """A backend whose plain layers are one launch in decode steps of few requests."""

    def forward_unrotated(
        self, unrotated: Unrotated, value: torch.Tensor, layer_id: int, layer: AttentionLayer = PLAIN
    ) -> torch.Tensor:
        inputs, cache = self._planned, self.kv_cache
        slots = cache.slots(layer_id)
        options = layer.window, layer.sinks, layer.kept_blocks, layer.chunk
        is_plain = all(option is None for option in options)
        if not (is_plain and inputs.is_uniform_decode and can_decode(unrotated, value, slots)):
            return super().forward_unrotated(unrotated, value, layer_id, layer)
        where = inputs.slot_mapping, inputs.block_table, inputs.seq_lens_tensor
        scale = self.mixers[layer_id].scale
        return decode_attention(unrotated, value, slots, *where, cache.page_size, scale)
