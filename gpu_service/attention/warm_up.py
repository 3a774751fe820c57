"""Every kind of step once, on the dummy page: what attention compiles or loads is there before any request.

A kernel that is first loaded while another one waits for an expert server could wait for that one's end;
one that is first compiled in service would stall everybody for a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from gpu_service.attention.base import AttentionBackend, AttentionLayer
from gpu_service.attention.compressed.base import CompressedAttentionBackend, Compression
from gpu_service.attention.mla.base import MlaAttentionBackend
from gpu_service.attention.registry import Attention
from gpu_service.core.step import ForwardInputs
from gpu_service.ops.rope import RopeTable
from moebius.models.layers.gqa import GQA

# Tiles hold 16, 64 or 128 rows, a query times the heads of its group; these reach all of them.
_CHUNKS = (2, 8, 128)
# From this number of tokens on a decode is divided over several programs by every backend.
_LONG = 4096


def warm_up_steps(capacity: int) -> list[list[tuple[int, int]]]:
    """Returns (earlier tokens, new tokens) of each request of each step, for sequences up to `capacity`
    tokens.
    """
    long = min(_LONG, capacity - 1)
    chunks = [chunk for chunk in _CHUNKS if chunk < capacity]
    steps = [[(0, 1)], [(0, 1)] * 3, [(long, 1)], [(long, 1), (0, 1)]]
    for chunk in chunks:
        before = min(_LONG, capacity - chunk)
        steps += [[(0, chunk)], [(0, chunk)] * 2, [(before, chunk)], [(0, 1), (before, chunk), (0, chunk)]]
    return steps


def kinds_of_layers(
    mixers: Sequence[GQA], dtype: torch.dtype, device: torch.device
) -> list[tuple[int, GQA, AttentionLayer]]:
    """Returns a layer of the cache, its mixer and options, for each combination of the model; sinks
    are zero.
    """
    kinds: dict[tuple[Any, ...], tuple[int, GQA]] = {}
    for layer, mixer in enumerate(mixers):
        heads = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.blocks
        kinds.setdefault((*heads, mixer.sight, mixer.has_sinks), (layer, mixer))

    def sinks(mixer: GQA) -> torch.Tensor | None:
        return torch.zeros(mixer.num_heads, dtype=dtype, device=device) if mixer.has_sinks else None

    return [
        (layer, mixer, AttentionLayer(mixer.window, sinks(mixer), chunk=mixer.chunk))
        for layer, mixer in kinds.values()
    ]


@torch.inference_mode()
def warm_up_attention(attention: Attention, capacity: int) -> None:
    """Plans and computes the steps above; call it with the forward's stream current.

    All requests' pages are the dummy page, so that nothing is read or written that belongs to anyone.
    """
    cache = attention.kv_cache if isinstance(attention, AttentionBackend) else attention.cache
    columns = -(-capacity // cache.page_size)
    for step in warm_up_steps(capacity):
        inputs = _dummy_inputs(step, columns, cache.device)
        num_rows = inputs.query_start_loc[-1]
        if isinstance(attention, CompressedAttentionBackend):
            _attend_compressed(attention, inputs)
            continue
        attention.plan(inputs)
        if isinstance(attention, MlaAttentionBackend):
            _attend_latents(attention, num_rows)
        else:
            _attend(attention, num_rows)


def _attend(attention: AttentionBackend, num_rows: int) -> None:
    """Queries, keys and values are parts of wider rows, as a fused projection leaves them."""
    cache = attention.kv_cache
    for layer_id, shape, layer in kinds_of_layers(attention.mixers, cache.dtype, cache.device):
        value_begin = shape.num_heads + shape.num_kv_heads
        heads = value_begin + shape.num_kv_heads
        rows = torch.zeros(num_rows, heads, shape.head_dim, dtype=cache.dtype, device=cache.device)
        parts = rows[:, : shape.num_heads], rows[:, shape.num_heads : value_begin], rows[:, value_begin:]
        indexer = shape.blocks
        if indexer is not None:
            queries = indexer.shared_heads or shape.num_kv_heads
            kept = attention.choose_blocks(rows.new_zeros(num_rows, queries, indexer.head_dim), 0)
            chosen = layer._replace(kept_blocks=kept, block_size=indexer.block_size)
            attention.forward(*parts, layer_id, chosen)
        attention.forward(*parts, layer_id, layer)


def _attend_latents(attention: MlaAttentionBackend, num_rows: int) -> None:
    """Attends in the form that the planned step takes in a model."""
    cache, sizes = attention.cache, attention.dimensions

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(num_rows, *shape, dtype=cache.dtype, device=cache.device)

    selection, index = None, sizes.index
    if attention.selects and index is not None:
        weights = zeros(index.num_heads).float()
        selection = attention.select(zeros(index.num_heads, index.head_dim), weights, 0)
    query = zeros(sizes.num_heads, sizes.nope_dim + sizes.rope_dim)
    latent, key_rope = zeros(sizes.latent_dim), zeros(sizes.rope_dim)
    if attention.non_absorbed:
        value = zeros(sizes.num_heads, sizes.value_dim)
        attention.forward_non_absorbed(query, query, value, latent, key_rope, 0)
    else:
        query_latent = zeros(sizes.num_heads, sizes.latent_dim)
        sinks = torch.zeros(sizes.num_heads, device=cache.device) if sizes.has_sinks else None
        rows = query_latent, query[..., sizes.nope_dim :], latent, key_rope
        attention.forward(*rows, 0, selection, sinks)


def _attend_compressed(attention: CompressedAttentionBackend, inputs: ForwardInputs) -> None:
    """One layer of each kind; the latest tokens are of slots of this step only."""
    cache, sizes = attention.cache, attention.dimensions
    num_rows, requests = inputs.query_start_loc[-1], len(inputs.seq_lens)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=cache.dtype, device=cache.device)

    slots = torch.arange(requests, device=cache.device)
    attention.plan(replace(inputs, state_reads=slots, state_writes=slots + requests))
    kinds = {(rate, layer in sizes.sparse_layers): layer for layer, rate in enumerate(sizes.rates)}
    for (rate, is_sparse), layer in kinds.items():
        selection, pages = None, [cache.pages(layer)] if rate else []
        if is_sparse:
            pages.append(cache.index_pages(layer))
        for entries in [] if sizes.projects_keys else pages:
            size, parts = entries.shape[2], 1 + is_sparse
            rotary = torch.zeros(num_rows, 1, 2, dtype=cache.dtype, device=cache.device)
            offsets = torch.zeros(rate, parts * size, device=cache.device)
            how = Compression(rate, offsets, zeros(size), 1e-6, RopeTable(rotary, rotary, True))
            row, kept = 2 * parts * size, parts * rate - 1
            attention.compress(zeros(num_rows, row), zeros(2 * requests, kept, row), entries, how)
        if is_sparse and attention.selects:
            weights = zeros(num_rows, sizes.index_num_heads).float()
            query = zeros(num_rows, sizes.index_num_heads, sizes.index_head_dim)
            selection = attention.select(query, weights, layer)
        window = zeros(2 * requests, sizes.window - 1, sizes.head_dim)
        query, keys = zeros(num_rows, sizes.num_heads, sizes.head_dim), zeros(num_rows, sizes.head_dim)
        sinks = torch.zeros(sizes.num_heads, device=cache.device)
        attention.attend(query, keys, window, layer, sinks, selection)


def _dummy_inputs(step: list[tuple[int, int]], columns: int, device: torch.device) -> ForwardInputs:
    starts = list(accumulate((new for _, new in step), initial=0))
    seq_lens = [old + new for old, new in step]
    zeros = torch.zeros(starts[-1], dtype=torch.int64, device=device)
    return ForwardInputs(
        input_ids=zeros,
        positions=torch.cat([torch.arange(old, old + new) for old, new in step]).to(device),
        slot_mapping=zeros,
        block_table=torch.zeros((len(step), columns), dtype=torch.int32, device=device),
        query_start_loc=starts,
        seq_lens=seq_lens,
        logits_indices=zeros[:0],
        query_start_loc_tensor=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens_tensor=torch.tensor(seq_lens, dtype=torch.int32, device=device),
    )
