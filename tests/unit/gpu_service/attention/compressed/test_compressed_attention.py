"""Invariant: compressed attention is its formula, token by token, in every backend and in whatever steps.

The reference of the formula is transformers', by `tests/parity`; here torch and the Triton kernels (in
Triton's interpreter) are compared with loops over single tokens of a whole sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention.compressed.base import (
    CompressedAttentionBackend,
    CompressedDimensions,
    Compression,
)
from gpu_service.attention.compressed.torch_reference import TorchCompressedAttention
from gpu_service.attention.compressed.triton_backend import TritonCompressedAttention
from gpu_service.attention.registry import make_attention
from gpu_service.attention.warm_up import warm_up_attention
from gpu_service.cache.kv_cache import CompressedCache, make_cache, page_bytes
from gpu_service.cache.state_cache import make_states, state_bytes
from gpu_service.core.depths import make_depths
from gpu_service.core.step import ForwardInputs
from gpu_service.device import TORCH_DTYPES
from gpu_service.layers.compressed import StepTables
from gpu_service.layers.decoder import RotaryEmbedding
from gpu_service.ops.rope import RopeTable, apply_rope, rope_table
from moebius.models.config import ModelConfig
from moebius.models.layers.compressed import CompressedAttention
from moebius.models.layers.tensors import CacheTensor
from moebius.models.read import read_model_config
from tests.helpers.layer_values import mixers_of, with_mixers
from tests.helpers.paged_runner import PagedRunner, load_runner
from tests.helpers.tiny_models import make_tiny_model
from tests.tolerances import LOGITS_FLOAT32_SELF, MLA_FLOAT32

BACKENDS = {"torch": TorchCompressedAttention, "triton": TritonCompressedAttention}
EACH = pytest.mark.parametrize("name", sorted(BACKENDS))
HEADS, SIZE, ROTARY, WINDOW, PAGE_SIZE = 3, 12, 4, 5, 4
# Layers with a window only, with overlapping entries and with others; longer and shorter than a page.
RATES = (0, 3, 6)
SPARSE = 1
# Lengths after each step of two requests: chunks, decodes, and a step of both kinds.
STEPS = ((7, 1), (8, 9), (9, 10), (17, 11), (18, 12))


@dataclass(frozen=True)
class World:
    """Two whole sequences' rows, and a backend that is given them step by step."""

    backend: CompressedAttentionBackend
    states: list[torch.Tensor]  # Of each step's slots, one per tensor that is kept.

    @staticmethod
    def make(name: str, top_k: int = 2) -> World:
        config = _config(top_k)
        cache = CompressedCache(config.layers, 24, PAGE_SIZE, torch.float32)
        sizes = CompressedDimensions(HEADS, SIZE, WINDOW, RATES, frozenset({SPARSE}), top_k, 4, 8, SIZE**-0.5)
        return World(BACKENDS[name](sizes, cache), [])


def _config(top_k: int) -> ModelConfig:
    """Returns the values of a tiny checkpoint, with the sizes of this test."""
    tiny = mixers_of(_tiny(), CompressedAttention)
    indexer = next(mixer.indexer for mixer in tiny if mixer.indexer is not None)
    indexer = replace(indexer, head_dim=8, top_k=top_k)
    changes: dict[str, Any] = {"head_dim": SIZE, "scale": SIZE**-0.5, "window": WINDOW}
    layers = zip(tiny[: len(RATES)], RATES, strict=True)
    found = [
        replace(mixer, **changes, rate=rate, indexer=indexer if layer == SPARSE else None)
        for layer, (mixer, rate) in enumerate(layers)
    ]
    return with_mixers(_tiny(), *found)


def _tiny() -> ModelConfig:
    assert _TINY is not None, "filled by the fixture"
    return _TINY


_TINY: ModelConfig | None = None


@pytest.fixture(scope="module", autouse=True)
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    global _TINY
    directory = tmp_path_factory.mktemp("v4") / "model"
    make_tiny_model("deepseek_v4", directory)
    _TINY = read_model_config(directory)
    return directory


def _step(previous: tuple[int, int], lengths: tuple[int, int], number: int) -> ForwardInputs:
    """Returns both requests' next tokens, in scattered pages; slots alternate, slot 0 is zeros."""
    starts, positions, slots = [0], list[int](), list[int]()
    pages = torch.tensor([[7, 2, 11, 4, 9, 0], [3, 12, 5, 10, 1, 0]], dtype=torch.int32)
    for request, (begin, end) in enumerate(zip(previous, lengths, strict=True)):
        positions += range(begin, end)
        slots += [int(pages[request, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE for p in range(begin, end)]
        starts.append(starts[-1] + end - begin)
    before = [1 + 2 * (number - 1) + request if previous[request] else 0 for request in range(2)]
    return ForwardInputs(
        input_ids=torch.zeros(starts[-1], dtype=torch.int64),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        block_table=pages,
        query_start_loc=starts,
        seq_lens=list(lengths),
        logits_indices=torch.arange(0),
        query_start_loc_tensor=torch.tensor(starts, dtype=torch.int32),
        seq_lens_tensor=torch.tensor(lengths, dtype=torch.int32),
        state_reads=torch.tensor(before),
        state_writes=torch.tensor([1 + 2 * number, 2 + 2 * number]),
    )


def _by_depth(inputs: ForwardInputs) -> ForwardInputs:
    """The same as a step with drafts: every token is a row, whose state the one before wrote."""
    reads, writes, spare = list[int](), list[int](), 2 + 2 * len(STEPS)
    assert inputs.state_reads is not None
    assert inputs.state_writes is not None
    counts = [end - begin for begin, end in itertools.pairwise(inputs.query_start_loc)]
    for request, count in enumerate(counts):
        slots = [*range(spare, spare + count - 1), int(inputs.state_writes[request])]
        reads += [int(inputs.state_reads[request]), *slots[:-1]]
        writes += slots
        spare += count - 1
    rows = sum(counts)
    return replace(
        inputs,
        block_table=inputs.block_table.repeat_interleave(torch.tensor(counts), dim=0),
        query_start_loc=list(range(rows + 1)),
        seq_lens=(inputs.positions + 1).tolist(),
        query_start_loc_tensor=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens_tensor=(inputs.positions + 1).int(),
        state_reads=torch.tensor(reads),
        state_writes=torch.tensor(writes),
        depths=make_depths([place for count in counts for place in range(count)]),
    )


SHAPES = pytest.mark.parametrize("shape", [lambda inputs: inputs, _by_depth], ids=["requests", "drafts"])


def _steps() -> list[tuple[tuple[int, int], ForwardInputs]]:
    found, previous = [], (0, 0)
    for number, lengths in enumerate(STEPS):
        found.append((previous, _step(previous, lengths, number)))
        previous = lengths
    return found


def _rows(whole: torch.Tensor, previous: tuple[int, int], inputs: ForwardInputs) -> torch.Tensor:
    """Returns the rows of a step of `[2, L, ...]`."""
    return torch.cat([whole[r, previous[r] : inputs.seq_lens[r]] for r in range(2)])


def _kept(tokens: int, row: int) -> torch.Tensor:
    """Slots for all steps; NaN where nothing was left, so that reading it would show."""
    kept = torch.full((2 + 2 * len(STEPS) + 16, tokens, row), math.nan)
    kept[0] = 0.0
    return kept


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


FREQUENCIES = torch.tensor([1.0, 0.1])


def naive_entries(rows: torch.Tensor, rate: int, offsets: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Returns the entries of one sequence's rows `[L, row]`, element by element in float64."""
    size, parts = norm.shape[0], offsets.shape[1] // norm.shape[0]
    values, logits = rows.double().chunk(2, dim=1)
    entries = []
    for entry in range(rows.shape[0] // rate):
        weighed = []
        for token in range((entry + 1 - parts) * rate, (entry + 1) * rate):
            if token < 0:
                continue
            # Its part in the own entry is the last one, in the next entry the first.
            part = slice((parts - 1) * size, None) if token >= entry * rate else slice(0, size)
            weighed.append((logits[token, part] + offsets[token % rate, part], values[token, part]))
        weights = torch.stack([logit for logit, _ in weighed]).softmax(0)
        total = (weights * torch.stack([value for _, value in weighed])).sum(0)
        total = total * (total.square().mean() + 1e-3).rsqrt() * norm
        table = rope_table(torch.tensor([entry * rate]), FREQUENCIES, torch.float64, True)
        apply_rope(total[None, None, size - ROTARY :], table)
        entries.append(total)
    return torch.stack(entries) if entries else rows.new_zeros(0, size, dtype=torch.float64)


def naive_attention(
    query: torch.Tensor, keys: torch.Tensor, entries: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Returns one query `[H, D]` over keys `[N, D]` and entries `[E, D]` that are its own."""
    both = torch.cat((keys.double(), entries))
    scores = query.double() @ both.T * SIZE**-0.5
    weights = torch.cat((scores, sinks.double()[:, None]), dim=1).softmax(1)[:, :-1]
    return weights @ both


def _compression(rate: int, parts: int, size: int, positions: torch.Tensor) -> Compression:
    table = rope_table((positions - rate + 1).clamp(min=0), FREQUENCIES, torch.float32, True)
    return Compression(rate, _draw(rate, parts * size, seed=1), 1 + 0.2 * _draw(size, seed=2), 1e-3, table)


@EACH
@SHAPES
@pytest.mark.parametrize("layer", [1, 2])
def test_entries_are_the_formula_whatever_the_steps(
    name: str, layer: int, shape: Callable[[ForwardInputs], ForwardInputs]
) -> None:
    """Those of entries that begin in one step and end in another, too; a step may be run again."""
    backend, rate = World.make(name).backend, RATES[layer]
    parts = 2 if layer == SPARSE else 1
    whole = _draw(2, STEPS[-1][0], 2 * parts * SIZE)
    recent = _kept(parts * rate - 1, whole.shape[2])
    pages = backend.cache.pages(layer)
    for previous, inputs in _steps():
        backend.plan(shape(inputs))
        how = _compression(rate, parts, SIZE, inputs.positions)
        for _ in range(2):
            backend.compress(_rows(whole, previous, inputs), recent, pages, how)
    places = CacheTensor((SIZE,), rate).places(PAGE_SIZE)
    for request, length in enumerate(STEPS[-1]):
        expected = naive_entries(whole[request, :length], rate, how.offsets, how.norm_weight)
        last = torch.arange(len(expected)) * rate + rate - 1
        at = inputs.block_table[request, last // PAGE_SIZE] * places + last % PAGE_SIZE // rate
        found = pages.flatten(0, 1)[at.long()].double()
        torch.testing.assert_close(found, expected, rtol=0, atol=MLA_FLOAT32)


@EACH
@SHAPES
@pytest.mark.parametrize("layer", range(3))
def test_attention_is_the_formula_whatever_the_steps(
    name: str, layer: int, shape: Callable[[ForwardInputs], ForwardInputs]
) -> None:
    """Attention agrees for a window, with entries and without, and for a choice among entries."""
    world = World.make(name)
    backend, cache, rate = world.backend, world.backend.cache, RATES[layer]
    longest = STEPS[-1][0]
    query, keys, sinks = _draw(2, longest, HEADS, SIZE), _draw(2, longest, SIZE, seed=3), _draw(HEADS)
    cache.pages(layer).copy_(_draw(*cache.pages(layer).shape, seed=4))
    window = _kept(WINDOW - 1, SIZE)
    for previous, inputs in _steps():
        backend.plan(shape(inputs))
        selection = _some_selection(inputs) if layer == SPARSE else None
        arguments = _rows(query, previous, inputs), _rows(keys, previous, inputs), window, layer, sinks
        found = backend.attend(*arguments, selection)
        for row, position in enumerate(inputs.positions.tolist()):
            request = int(row >= inputs.query_start_loc[1])
            seen = list(range((position + 1) // rate if rate else 0))
            if selection is not None:
                seen = [entry for entry in selection[row].tolist() if entry >= 0]
            entries = _entries_at(cache, layer, inputs.block_table[request], seen)
            near = keys[request, max(0, position - WINDOW + 1) : position + 1]
            expected = naive_attention(query[request, position], near, entries, sinks)
            torch.testing.assert_close(found[row].double(), expected, rtol=0, atol=MLA_FLOAT32)


def _entries_at(cache: CompressedCache, layer: int, pages: torch.Tensor, entries: list[int]) -> torch.Tensor:
    rate, found = cache.rates[layer], []
    for entry in entries:
        last = entry * rate + rate - 1
        found.append(cache.pages(layer)[int(pages[last // PAGE_SIZE]), last % PAGE_SIZE // rate])
    return torch.stack(found).double() if found else torch.zeros(0, SIZE, dtype=torch.float64)


def _some_selection(inputs: ForwardInputs) -> torch.Tensor:
    """Returns the last two entries up to each row."""
    counts = (inputs.positions + 1) // RATES[SPARSE]
    first = (counts - 2).clamp(min=0)
    chosen = torch.stack((first, first + 1), dim=1)
    return torch.where(chosen < counts[:, None], chosen, -1).to(torch.int32)


@EACH
def test_the_highest_scores_are_chosen(name: str) -> None:
    """Choices are in ascending order, and all of them while there are no more than may be chosen."""
    backend = World.make(name).backend
    keys = backend.cache.index_pages(SPARSE)
    keys.copy_(_draw(*keys.shape))
    heads = 4
    for _, inputs in _steps():
        backend.plan(inputs)
        rows = inputs.query_start_loc[-1]
        query, weights = _draw(rows, heads, 8, seed=5), _draw(rows, heads, seed=6)
        if not backend.selects:
            assert max(inputs.seq_lens) // RATES[SPARSE] <= 2
            continue
        found = backend.select(query, weights, SPARSE).tolist()
        for row, position in enumerate(inputs.positions.tolist()):
            request = int(row >= inputs.query_start_loc[1])
            scores = []
            for entry in range((position + 1) // RATES[SPARSE]):
                last = entry * RATES[SPARSE] + RATES[SPARSE] - 1
                page = int(inputs.block_table[request, last // PAGE_SIZE])
                key = keys[page, last % PAGE_SIZE // RATES[SPARSE]]
                scores.append(float((weights[row] * (query[row] @ key).relu()).sum()))
            best = sorted(sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:2])
            assert found[row] == best + [-1] * (2 - len(best))


def test_models_do_not_see_which_backend_computes(tiny_model: Path) -> None:
    """A prompt in chunks, then a step of a decode with another prompt's chunk, then both decoding."""

    def logits_of(runner: PagedRunner) -> torch.Tensor:
        first, prefill = runner.prefill([3, 17, 100, 5, 99, 42, 42, 8, 50, 23, 61, 2, 110, 77, 31], chunk=6)
        first.tokens += [7, 8, 9]
        second, _ = runner.prefill([10])
        second.tokens += [120, 4, 5]
        mixed = runner.step([(first, 1), (second, 2)])
        return torch.cat([prefill, mixed, runner.step([(first, 1), (second, 1)])])

    expected = logits_of(load_runner(tiny_model))
    runner = load_runner(tiny_model)
    made = runner.attention
    assert isinstance(made, TorchCompressedAttention)
    runner.attention = TritonCompressedAttention(made.dimensions, made.cache)
    torch.testing.assert_close(logits_of(runner), expected, rtol=0, atol=LOGITS_FLOAT32_SELF)


def test_cache_and_states_take_the_bytes_that_are_planned() -> None:
    """Pages of fewer tokens than an entry, and of more; the planner adds these before anything is made."""
    config = replace(_tiny(), dtype="float32")
    for page_size in (1, 4, 16):
        cache = make_cache(config.layers, 5, page_size, torch.float32)
        assert cache.nbytes == 5 * page_bytes(
            config.layers, page_size, torch.float32, TORCH_DTYPES[config.dtype]
        )
    states = make_states(config.layers, 4, torch.float32)
    assert states is not None
    assert states.nbytes == 5 * state_bytes(config.layers, TORCH_DTYPES[config.dtype])


def test_pages_of_failed_requests_are_cleared() -> None:
    """Entries and the indexer's keys: a masked-out NaN would still poison a sum."""
    cache = make_cache(_tiny().layers, 3, 4, torch.float32)
    assert isinstance(cache, CompressedCache)
    tensors = [cache.pages(1), cache.pages(2), cache.index_pages(1)]
    for tensor in tensors:
        tensor.fill_(math.nan)
    cache.zero_pages([2])
    assert all(not tensor[2].any() and tensor[1].isnan().all() for tensor in tensors)


@EACH
def test_warm_up_leaves_what_requests_have(name: str) -> None:
    """Only the dummy page is written; every kind of layer is computed."""
    backend = World.make(name).backend
    for layer in range(3):
        backend.cache.pages(layer).fill_(3.0)
    warm_up_attention(backend, 24)
    for layer in range(3):
        assert (backend.cache.pages(layer)[1:] == 3.0).all()


def test_who_serves_what_is_decided_once() -> None:
    """A cache of entries has backends of its own; eight bits are refused."""
    cache = make_cache(_tiny().layers, 3, 4, torch.float32)
    assert isinstance(make_attention(_tiny().layers, cache, "cpu"), TorchCompressedAttention)
    with pytest.raises(ValueError, match="compressed pages of"):
        make_cache(_tiny().layers, 3, 4, torch.float32, storage_dtype=torch.float8_e4m3fn)


def test_rotation_back_is_the_inverse() -> None:
    """What the table that layers share rotated is, rotated back, as before."""
    from gpu_service.layers.compressed import StepTables
    from gpu_service.layers.decoder import RotaryEmbedding

    rope = mixers_of(_tiny(), CompressedAttention)[0].rope
    rotary = RotaryEmbedding(rope, 64, dtype=torch.float32, device=torch.device("cpu"))
    table: RopeTable = rotary.table(torch.arange(7))
    heads = _draw(7, 2, table.cos.shape[-1])
    turned = apply_rope(heads.clone(), table)
    assert not torch.allclose(turned, heads, atol=1e-2)
    torch.testing.assert_close(apply_rope(turned, StepTables(rotary).inverse(table, True)), heads)


def test_tables_of_a_pass_are_its_own() -> None:
    """A graph is recorded from inputs that the pass before it had, too: each has tables of its own."""
    config = _config(2)
    rope = mixers_of(config, CompressedAttention)[0].rope
    rotary = RotaryEmbedding(rope, config.max_model_len, dtype=torch.float32, device=torch.device("cpu"))
    tables, positions = StepTables(rotary), torch.tensor([8, 5])
    found = []
    for _ in range(2):
        table = rotary.table(positions)
        found.append(tables.of_entries(table, positions, 3))
        assert tables.of_entries(table, positions, 3) is found[-1], "layers of a pass share it"
        positions += 4
    for table, first in zip(found, ([6, 3], [10, 7]), strict=True):
        torch.testing.assert_close(table.cos, rotary.table(torch.tensor(first)).cos)
