"""Invariant: the torch backend is causal attention, whatever the mix of chunks, decodes and pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from gpu_service.attention.registry import make_attention
from gpu_service.cache.kv_cache import KVCache, page_bytes
from gpu_service.core.step import ForwardInputs
from gpu_service.device import TORCH_DTYPES
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.router import RouterConfig
from tests.helpers.layer_values import common_sizes
from tests.tolerances import ATTENTION_BFLOAT16, LOGITS_FLOAT32_SELF

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 8, 4
_COMMON = common_sizes(model_type="glm4_moe", num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
CONFIG = _COMMON.model(_COMMON.gqa(RopeConfig(1e4, DIM)), _COMMON.moe(RouterConfig(4, 2, "softmax"), 3))


@dataclass
class Case:
    """Keys and values of whole requests, and how many of their last tokens are queries of this step."""

    cache: KVCache
    inputs: ForwardInputs
    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def _slots(pages: list[int], length: int) -> torch.Tensor:
    return torch.tensor([pages[p // PAGE] * PAGE + p % PAGE for p in range(length)])


def make_case(shape: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> Case:
    """`shape`: (earlier tokens, new tokens) per request. Earlier ones are put into the cache here."""
    torch.manual_seed(len(shape))
    counts = [-(-(old + new) // PAGE) for old, new in shape]
    cache = KVCache(CONFIG.layers, sum(counts) + 1, PAGE, dtype)
    order = (torch.randperm(sum(counts)) + 1).tolist()
    table = torch.zeros(len(shape), max(counts) + 1, dtype=torch.int32)
    keys, values, new_slots, starts = [], [], [], [0]
    for row, (old, new) in enumerate(shape):
        pages = [order.pop() for _ in range(counts[row])]
        table[row, : counts[row]] = torch.tensor(pages)
        key, value = (torch.randn(old + new, KV_HEADS, DIM).to(dtype) for _ in "kv")
        slots = _slots(pages, old + new)
        cache.slots(1)[slots[:old], :KV_HEADS] = key[:old]
        cache.slots(1)[slots[:old], KV_HEADS:] = value[:old]
        keys.append(key)
        values.append(value)
        new_slots.append(slots[old:])
        starts.append(starts[-1] + new)
    inputs = ForwardInputs(
        input_ids=torch.zeros(starts[-1], dtype=torch.int64),
        positions=torch.cat([torch.arange(old, old + new) for old, new in shape]),
        slot_mapping=torch.cat(new_slots),
        block_table=table,
        query_start_loc=starts,
        seq_lens=[old + new for old, new in shape],
        logits_indices=torch.arange(starts[-1]),
        query_start_loc_tensor=torch.tensor(starts, dtype=torch.int32),
        seq_lens_tensor=torch.tensor([old + new for old, new in shape], dtype=torch.int32),
    )
    return Case(cache, inputs, torch.randn(starts[-1], HEADS, DIM).to(dtype), keys, values)


def run(case: Case) -> torch.Tensor:
    attention = make_attention(CONFIG.layers, case.cache, "cpu")
    attention.plan(case.inputs)
    starts, lens = case.inputs.query_start_loc, case.inputs.seq_lens
    new = [end - begin for begin, end in pairwise(starts)]
    key = torch.cat([k[n - c :] for k, n, c in zip(case.keys, lens, new, strict=True)])
    value = torch.cat([v[n - c :] for v, n, c in zip(case.values, lens, new, strict=True)])
    return attention.forward(case.query, key, value, layer_id=1)


def naive(case: Case) -> torch.Tensor:
    """Returns one row, one head at a time, in float64."""
    rows = []
    for request, begin in enumerate(case.inputs.query_start_loc[:-1]):
        for row in range(begin, case.inputs.query_start_loc[request + 1]):
            seen = int(case.inputs.positions[row]) + 1
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                key = case.keys[request][:seen, kv_head].double()
                value = case.values[request][:seen, kv_head].double()
                scores = key @ case.query[row, head].double() / math.sqrt(DIM)
                rows.append(scores.softmax(0) @ value)
    return torch.stack(rows).view(-1, HEADS * DIM)


CASES = {
    "one decode": [(9, 1)],
    "decode of a first token": [(0, 1)],
    "decodes of one length class": [(8, 1), (9, 1), (11, 1)],
    "decodes of very different lengths": [(2, 1), (60, 1), (7, 1), (0, 1), (33, 1)],
    "first chunk": [(0, 7)],
    "later chunk": [(5, 6)],
    "mixture": [(9, 1), (0, 5), (6, 3), (3, 1), (40, 1), (4, 4)],
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_float32_is_exact_attention(name: str) -> None:
    case = make_case(CASES[name])
    torch.testing.assert_close(run(case), naive(case).float(), rtol=0, atol=LOGITS_FLOAT32_SELF)


@pytest.mark.parametrize("name", ["decodes of very different lengths", "mixture"])
def test_bfloat16_is_close(name: str) -> None:
    case = make_case(CASES[name], torch.bfloat16)
    output = run(case)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), naive(case), rtol=0, atol=ATTENTION_BFLOAT16)


def test_new_keys_and_values_are_in_the_cache_of_that_layer_only() -> None:
    case = make_case([(5, 6)])
    run(case)
    slots = case.inputs.slot_mapping
    assert torch.equal(case.cache.keys(1).reshape(-1, KV_HEADS, DIM)[slots], case.keys[0][5:])
    assert torch.equal(case.cache.values(1).reshape(-1, KV_HEADS, DIM)[slots], case.values[0][5:])
    assert not case.cache.pages(0).any()


def test_a_later_step_never_sees_an_earlier_ones_gather() -> None:
    """The gather's memory is kept between steps of different sizes."""
    case = make_case([(60, 1), (3, 1)])
    expected = naive(case).float()
    attention = make_attention(CONFIG.layers, case.cache, "cpu")
    for row in (1, 0, 1):
        inputs = replace(
            case.inputs,
            block_table=case.inputs.block_table[row : row + 1],
            slot_mapping=case.inputs.slot_mapping[row : row + 1],
            query_start_loc=[0, 1],
            seq_lens=[case.inputs.seq_lens[row]],
        )
        attention.plan(inputs)
        new = (tensors[row][-1:] for tensors in (case.keys, case.values))
        output = attention.forward(case.query[row : row + 1], *new, layer_id=1)
        torch.testing.assert_close(output[0], expected[row], rtol=0, atol=LOGITS_FLOAT32_SELF)


def test_cleared_pages_do_not_pass_on_a_failed_requests_nan() -> None:
    case = make_case([(4, 1), (5, 1)])
    page = int(case.inputs.block_table[0, 1])
    case.cache.pages(1)[page] = float("nan")
    case.cache.zero_pages([page])
    torch.testing.assert_close(run(case), naive(case).float(), rtol=0, atol=LOGITS_FLOAT32_SELF)


def test_contradicting_inputs_are_refused() -> None:
    case = make_case([(5, 6)])
    attention = make_attention(CONFIG.layers, case.cache, "cpu")
    with pytest.raises(ValueError, match="query_start_loc"):
        attention.plan(replace(case.inputs, query_start_loc=[0, 5]))
    with pytest.raises(ValueError, match="99 tokens exceeds its block table of 16"):
        attention.plan(replace(case.inputs, seq_lens=[99]))


def test_cache_size_arithmetic() -> None:
    cache = KVCache(CONFIG.layers, 5, PAGE, torch.bfloat16)
    assert cache.nbytes == 5 * page_bytes(CONFIG.layers, PAGE, torch.bfloat16, TORCH_DTYPES[CONFIG.dtype])
    with pytest.raises(ValueError, match="page 0 is the dummy"):
        KVCache(CONFIG.layers, 1, PAGE, torch.float32)
