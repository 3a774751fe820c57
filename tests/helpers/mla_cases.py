"""Steps for backends of latent attention, with plain attention over written-out keys as the answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from gpu_service.attention.mla.base import (
    IndexDimensions,
    MlaAttentionBackend,
    MlaDimensions,
    up_project,
)
from gpu_service.cache.kv_cache import MlaCache
from gpu_service.core.step import ForwardInputs
from gpu_service.ops.latent import absorb_query, project_values
from tests.helpers.attention_cases import Shape, make_inputs, scattered_pages
from tests.helpers.layer_values import latent_layers

LAYER = 1
TINY = MlaDimensions(num_heads=5, latent_dim=24, nope_dim=12, rope_dim=8, value_dim=20, softmax_scale=0.25)
DEEPSEEK = MlaDimensions(
    16, latent_dim=512, nope_dim=128, rope_dim=64, value_dim=128, softmax_scale=192**-0.5
)
# With an indexer: far fewer tokens than the cases have.
TINY_SPARSE = replace(TINY, index=IndexDimensions(num_heads=7, head_dim=10, top_k=6))
DEEPSEEK_SPARSE = replace(DEEPSEEK, index=IndexDimensions(num_heads=64, head_dim=128, top_k=256))


@dataclass
class MlaCase:
    """A cache that holds all earlier latents, one step, and a layer's projections; filled by the maker."""

    dimensions: MlaDimensions
    cache: MlaCache
    inputs: ForwardInputs
    query_nope: torch.Tensor
    query_rope: torch.Tensor
    latent: torch.Tensor
    key_rope: torch.Tensor
    key_weight: torch.Tensor
    value_weight: torch.Tensor
    # The indexer's query and weights of heads for each row, float32 where it says so; empty: there is none.
    index_query: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    head_weights: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    sinks: torch.Tensor | None = None  # float32 `[num_heads]` where the dimensions say so.

    @property
    def weight(self) -> torch.Tensor:
        """Both projections as a checkpoint holds them, `[H, nope_dim + value_dim, latent_dim]`."""
        return torch.cat((self.key_weight, self.value_weight), dim=1)

    def fresh_cache(self) -> MlaCache:
        """Returns a copy of the cache as it was before the step."""
        cache = self.cache
        other = _make_cache(
            self.dimensions, cache.num_pages, cache.page_size, cache.dtype, cache.device, cache.storage_dtype
        )
        for layer in range(cache.num_layers):
            other.pages(layer).view(torch.uint8).copy_(cache.pages(layer).view(torch.uint8))
        if cache.index_keys is not None and other.index_keys is not None:
            other.index_keys.pages(0).copy_(cache.index_keys.pages(0))
        other.scales = list(cache.scales)
        return other


def _make_cache(
    d: MlaDimensions,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    storage_dtype: torch.dtype | None,
) -> MlaCache:
    index = () if d.index is None else (d.index.head_dim,)
    layers = latent_layers(2, d.latent_dim, d.rope_dim, index)
    return MlaCache(layers, num_pages, page_size, dtype, device, storage_dtype)


def make_mla_case(
    dimensions: MlaDimensions,
    shape: Shape,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    storage_dtype: torch.dtype | None = None,
    device: str = "cpu",
    spare_pages: int = 1,
) -> MlaCase:
    """Returns random latents, queries and projections; pages scattered over the pool.

    Of sparse attention, the cache has the step's index keys as well.
    """
    generator = torch.Generator().manual_seed(len(shape))
    d, pages = dimensions, scattered_pages(shape, page_size, spare_pages, generator)
    cache = _make_cache(d, pages.num_pages, page_size, dtype, device, storage_dtype)

    def random(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*sizes, generator=generator) * scale).to(device, dtype)

    earlier, total = pages.earlier.to(device), len(pages.new)
    cache.append(LAYER, random(len(earlier), d.latent_dim), random(len(earlier), d.rope_dim), earlier)
    case = MlaCase(
        dimensions,
        cache,
        make_inputs(shape, pages.table.to(device), pages.new.to(device)),
        random(total, d.num_heads, d.nope_dim),
        random(total, d.num_heads, d.rope_dim),
        random(total, d.latent_dim),
        random(total, d.rope_dim),
        random(d.num_heads, d.nope_dim, d.latent_dim, scale=d.latent_dim**-0.5),
        random(d.num_heads, d.value_dim, d.latent_dim, scale=d.latent_dim**-0.5),
    )
    if d.index is not None and cache.index_keys is not None:
        keys = cache.index_keys.pages(0)
        keys.copy_(random(*keys.shape))
        case.index_query = random(total, d.index.num_heads, d.index.head_dim)
        case.head_weights = random(total, d.index.num_heads).float()
    if d.has_sinks:
        case.sinks = random(d.num_heads).float()
    return case


def run_absorbed(case: MlaCase, backend: MlaAttentionBackend, planned: bool = False) -> torch.Tensor:
    """Returns the step in the latent space; `[T, H, value_dim]`."""
    if not planned:
        backend.plan(case.inputs)
    selection = backend.select(case.index_query, case.head_weights, 0) if backend.selects else None
    query_latent = absorb_query(case.query_nope, case.key_weight)
    rows = query_latent, case.query_rope, case.latent, case.key_rope
    attended = backend.forward(*rows, LAYER, selection, case.sinks)
    return project_values(attended, case.value_weight)


def run_non_absorbed(case: MlaCase, backend: MlaAttentionBackend) -> torch.Tensor:
    """Returns the step with keys written out; `[T, H, value_dim]`."""
    backend.plan(case.inputs)
    assert backend.non_absorbed
    key, value = up_project(case.latent, case.key_rope, case.weight, case.dimensions.nope_dim)
    query = torch.cat((case.query_nope, case.query_rope), dim=-1)
    return backend.forward_non_absorbed(query, key, value, case.latent, case.key_rope, LAYER)


def naive_scores(case: MlaCase) -> list[torch.Tensor]:
    """Returns the naive scores of each row's tokens, itself included, float64."""
    index_keys, rows = case.cache.index_keys, []
    assert index_keys is not None
    for request, (begin, end) in enumerate(pairwise(case.inputs.query_start_loc)):
        keys = index_keys.pages(0)[case.inputs.block_table[request].long()].flatten(0, 1).double()
        for row in range(begin, end):
            length = case.inputs.seq_lens[request] - (end - 1 - row)
            products = (keys[:length] @ case.index_query[row].double().T).relu()
            rows.append(products @ case.head_weights[row].double())
    return rows


def naive_selection(case: MlaCase) -> list[list[int]]:
    """Returns the tokens that each row attends to: the highest scores, then the earliest."""
    index, chosen = case.dimensions.index, []
    assert index is not None
    for row in naive_scores(case):
        scores = row.tolist()
        best = sorted(range(len(scores)), key=lambda position: (-scores[position], position))
        chosen.append(sorted(best[: index.top_k]))
    return chosen


def naive_mla(case: MlaCase, chosen: list[list[int]] | None = None) -> torch.Tensor:
    """Returns plain attention in float64 over keys and values written out from the cache; `[T, H,
    value_dim]`.

    `chosen`: the tokens that each row attends to; None: all.
    """
    cache, inputs, d = case.fresh_cache(), case.inputs, case.dimensions
    cache.append(LAYER, case.latent, case.key_rope, inputs.slot_mapping)
    stored = cache.pages(LAYER).double().flatten(0, 1) * cache.scales[LAYER]
    query = torch.cat((case.query_nope, case.query_rope), dim=-1).double()
    outputs = []
    for request, (begin, end) in enumerate(pairwise(inputs.query_start_loc)):
        positions = torch.arange(inputs.seq_lens[request], device=stored.device)
        pages = inputs.block_table[request].long()[positions // cache.page_size]
        rows = stored[pages * cache.page_size + positions % cache.page_size]
        key, value = up_project(
            rows[:, : d.latent_dim],
            rows[:, d.latent_dim :],
            case.weight.double(),
            d.nope_dim,
        )
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], key) * d.softmax_scale
        hidden = positions[None, :] > positions[-(end - begin) :, None]
        for row in range(begin, end) if chosen is not None else ():
            left_out = set(positions.tolist()) - set(chosen[row])
            hidden[row - begin, list(left_out)] = True
        scores = scores.masked_fill(hidden, float("-inf"))
        if case.sinks is not None:
            sinks = case.sinks.double()[:, None, None].expand(-1, scores.shape[1], -1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : len(positions)]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(outputs)
