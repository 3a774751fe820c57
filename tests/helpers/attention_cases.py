"""Steps for attention backends: any mixture of requests over any geometry, with a naive answer to compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from gpu_service.attention.base import PLAIN, AttentionBackend, AttentionLayer
from gpu_service.cache.kv_cache import KVCache
from gpu_service.core.step import ForwardInputs
from moebius.models.config import ModelConfig
from moebius.models.layers.gqa import Window
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.router import RouterConfig
from tests.helpers.layer_values import common_sizes

# (earlier tokens, new tokens) of each request.
Shape = list[tuple[int, int]]
LAYER = 1

MIXTURES: dict[str, Shape] = {
    "one decode": [(9, 1)],
    "first token": [(0, 1)],
    "decodes": [(2, 1), (60, 1), (7, 1), (0, 1), (33, 1)],
    "first chunk": [(0, 7)],
    "first chunks": [(0, 7), (0, 3), (0, 21)],
    "later chunk": [(5, 6)],
    "mixture": [(9, 1), (0, 5), (6, 3), (3, 1), (40, 1), (4, 40)],
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a case is made of."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    dtype: torch.dtype = torch.float32
    storage_dtype: torch.dtype | None = None
    device: str = "cpu"
    # Columns of the block table beyond what is needed.
    spare_pages: int = 1
    # Of every layer.
    window: int | None = None
    sinks: bool = False
    # Tokens of a block; each row and KV head sees some of those before its own; 0: all of them.
    block_size: int = 0
    chunk: int | None = None

    def config(self, **attention: Any) -> ModelConfig:
        """A model of these heads; nothing else of it matters. `attention`: further fields of `GQA`."""
        common = common_sizes(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_model_len=4096,
        )
        window = None if self.window is None else Window(self.window)
        mixer = common.gqa(
            RopeConfig(1e4, self.head_dim), **({"sight": window, "has_sinks": self.sinks} | attention)
        )
        return common.model(mixer, common.moe(RouterConfig(4, 2, "softmax"), 3))


@dataclass
class Case:
    """A cache that holds all earlier tokens, and one step; filled by `make_case`."""

    geometry: Geometry
    cache: KVCache
    inputs: ForwardInputs
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layer: AttentionLayer = PLAIN

    def fresh_cache(self) -> KVCache:
        """Returns a copy of the cache as it was before the step."""
        other = KVCache(
            self.geometry.config().layers,
            self.cache.num_pages,
            self.cache.page_size,
            self.cache.dtype,
            self.cache.device,
            self.cache.storage_dtype,
        )
        for layer in range(self.cache.num_layers):
            other.pages(layer).view(torch.uint8).copy_(self.cache.pages(layer).view(torch.uint8))
        other.key_scales, other.value_scales = list(self.cache.key_scales), list(self.cache.value_scales)
        return other


class ScatteredPages(NamedTuple):
    """Where requests' tokens lie; filled by `scattered_pages`."""

    # Pages of a cache that has them all, page 0 included.
    num_pages: int
    # int32 `[R, most pages of a request and the spare ones]`.
    table: torch.Tensor
    # Slots of all earlier and of all new tokens, int64, request after request.
    earlier: torch.Tensor
    new: torch.Tensor


def scattered_pages(
    shape: Shape, page_size: int, spare_pages: int, generator: torch.Generator
) -> ScatteredPages:
    """Returns pages of each request in a random order."""
    counts = [-(-(old + new) // page_size) for old, new in shape]
    order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    table = torch.zeros(len(shape), max(counts) + spare_pages, dtype=torch.int32)
    earlier, later = [], []
    for row, (old, new) in enumerate(shape):
        pages = torch.tensor([order.pop() for _ in range(counts[row])])
        table[row, : counts[row]] = pages
        positions = torch.arange(old + new)
        slots = pages[positions // page_size] * page_size + positions % page_size
        earlier.append(slots[:old])
        later.append(slots[old:])
    return ScatteredPages(sum(counts) + 1, table, torch.cat(earlier), torch.cat(later))


def make_case(geometry: Geometry, shape: Shape, seed: int = 0) -> Case:
    """Returns random keys, values and queries; pages of each request scattered over the pool."""
    generator = torch.Generator().manual_seed(seed)
    page_size, device = geometry.page_size, geometry.device
    pages = scattered_pages(shape, page_size, geometry.spare_pages, generator)
    cache = KVCache(
        geometry.config().layers, pages.num_pages, page_size, geometry.dtype, device, geometry.storage_dtype
    )

    def random(rows: int, heads: int) -> torch.Tensor:
        values = torch.randn(rows, heads, geometry.head_dim, generator=generator)
        return values.to(device, geometry.dtype)

    kv_heads, total = geometry.num_kv_heads, len(pages.new)
    keys, values = random(len(pages.earlier), kv_heads), random(len(pages.earlier), kv_heads)
    cache.append(LAYER, keys, values, pages.earlier.to(device))
    inputs = make_inputs(shape, pages.table.to(device), pages.new.to(device))
    sinks = 3 * random(geometry.num_heads, 1)[:, 0, 0] if geometry.sinks else None
    return Case(
        geometry,
        cache,
        inputs,
        random(total, geometry.num_heads),
        random(total, kv_heads),
        random(total, kv_heads),
        AttentionLayer(geometry.window, sinks, *_random_blocks(geometry, inputs, generator), geometry.chunk),
    )


def _random_blocks(
    geometry: Geometry, inputs: ForwardInputs, generator: torch.Generator
) -> tuple[torch.Tensor | None, int]:
    """Returns a third of the blocks before a row's own, and its own."""
    if not geometry.block_size:
        return None, 0
    num_blocks = -(-max(inputs.seq_lens) // geometry.block_size)
    shape = inputs.positions.shape[0], geometry.num_kv_heads, num_blocks
    chosen = (torch.rand(shape, generator=generator) < 0.3).to(geometry.device)
    block = torch.arange(num_blocks, device=geometry.device)
    own = (inputs.positions // geometry.block_size)[:, None, None]
    return (chosen & (block < own)) | (block == own), geometry.block_size


def make_inputs(shape: Shape, table: torch.Tensor, slots: torch.Tensor) -> ForwardInputs:
    """Returns the step's tensors next to its lists."""
    starts = [0]
    for _, new in shape:
        starts.append(starts[-1] + new)
    lengths = [old + new for old, new in shape]
    device = table.device
    return ForwardInputs(
        input_ids=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        positions=torch.cat([torch.arange(old, old + new) for old, new in shape]).to(device),
        slot_mapping=slots,
        block_table=table,
        query_start_loc=starts,
        seq_lens=lengths,
        logits_indices=torch.arange(starts[-1], device=device),
        query_start_loc_tensor=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens_tensor=torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def run(case: Case, backend: AttentionBackend) -> torch.Tensor:
    """Plans and computes the step."""
    backend.plan(case.inputs)
    return backend.forward(case.query, case.key, case.value, LAYER, case.layer)


def naive(case: Case) -> torch.Tensor:
    """Returns one request at a time in float64, from what the cache holds after the step; float64 `[T, H *
    D]`.
    """
    cache = case.fresh_cache()
    cache.append(LAYER, case.key, case.value, case.inputs.slot_mapping)
    geometry, inputs = case.geometry, case.inputs
    key = cache.keys(LAYER).double().flatten(0, 1) * cache.key_scales[LAYER]
    value = cache.values(LAYER).double().flatten(0, 1) * cache.value_scales[LAYER]
    group = geometry.num_heads // geometry.num_kv_heads
    outputs = []
    for request, (begin, end) in enumerate(pairwise(inputs.query_start_loc)):
        positions = torch.arange(inputs.seq_lens[request], device=key.device)
        pages = inputs.block_table[request].long()[positions // geometry.page_size]
        slots = pages * geometry.page_size + positions % geometry.page_size
        keys = key[slots].repeat_interleave(group, 1)
        values = value[slots].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", case.query[begin:end].double(), keys)
        scores *= geometry.head_dim**-0.5
        hidden = positions[None, :] > positions[-(end - begin) :, None]
        if case.layer.window is not None and inputs.visible_ends is not None:
            hidden = positions[None, :] >= inputs.visible_ends[begin:end, None]
        if case.layer.window is not None:
            hidden |= positions[None, :] <= positions[-(end - begin) :, None] - case.layer.window
        if case.layer.chunk is not None:
            chunk = positions // case.layer.chunk
            hidden |= chunk[None, :] != chunk[-(end - begin) :, None]
        scores = scores.masked_fill(hidden, float("-inf"))
        if case.layer.kept_blocks is not None:
            kept = case.layer.kept_blocks[begin:end][..., positions // case.layer.block_size]
            by_head = kept.repeat_interleave(group, 1).transpose(0, 1)
            scores = scores.masked_fill(~by_head, float("-inf"))
        if case.layer.sinks is not None:
            sinks = case.layer.sinks.double()[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat([sinks, scores], -1)
        weights = scores.softmax(-1)[..., -len(positions) :]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
    return torch.cat(outputs)


def as_capturable(inputs: ForwardInputs) -> ForwardInputs:
    """The step with every tensor copied, as a graph's own memory would be."""
    names = ("slot_mapping", "block_table", "seq_lens_tensor", "query_start_loc_tensor")
    return replace(inputs, **{name: getattr(inputs, name).clone() for name in names})


def refill(static: ForwardInputs, inputs: ForwardInputs) -> ForwardInputs:
    """Puts another step of as many requests into a graph's tensors; the lists are new."""
    for name in ("slot_mapping", "seq_lens_tensor", "query_start_loc_tensor"):
        getattr(static, name).copy_(getattr(inputs, name))
    static.block_table.zero_()
    static.block_table[:, : inputs.block_table.shape[1]] = inputs.block_table
    return replace(static, seq_lens=inputs.seq_lens, query_start_loc=inputs.query_start_loc)
