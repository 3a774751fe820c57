"""Guards the record of a step: what is declared is what is built, staged and padded."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_service.core import prompt_rows
from gpu_service.core.prompt_rows import as_decode_rows, fit_rows
from gpu_service.core.step import (
    Dummy,
    Feature,
    StepPlan,
    TensorField,
    captured_fields,
    graph_plan,
    graph_rows,
    tensor_fields,
    tensors_of,
    with_tensors,
)
from gpu_service.device.stream import packed_views
from gpu_service.engine.input_builder import InputBuilder
from gpu_service.engine.packed_rows import PackedRows
from tests.helpers.engine_harness import Knobs, build_scheduler, make_request, prompt_of

DUMMIES = {Dummy.SLOT: 8, Dummy.STATE: 3}
PARAMS: list[dict[str, Any]] = [
    {},
    {
        "temperature": 0.9,
        "top_p": 0.5,
        "logprobs": 2,
        "logit_bias": ((3, 1.0),),
        "prompt_logprobs": 1,
        "allowed_token_ids": (1, 2, 9),
        "logprob_token_ids": (7, 8, 9),
    },
    {
        "temperature": 1.0,
        "presence_penalty": 1.0,
        "min_tokens": 3,
        "stop_token_ids": frozenset({5}),
        "bad_words": ((3,), (4, 5)),
    },
]


def plans(has_mrope: bool = False) -> list[StepPlan]:
    """Returns a step of prompts, one of a chunk with decodes, one of decodes only."""
    knobs = Knobs(budget=40)
    scheduler = build_scheduler(knobs)
    builder = InputBuilder(scheduler.limits, knobs.page_size, has_mrope=has_mrope)
    for index, params in enumerate(PARAMS):
        scheduler.add(make_request(f"r{index}", prompt_of(index, 9 + 13 * index), **params))
    built = []
    for _ in range(3):
        batch = scheduler.schedule()
        assert batch is not None
        built.append(builder.build(batch))
    return built


def records(tree: Any) -> list[Any]:
    """Returns the record and all records in it."""
    if isinstance(tree, (list, tuple)):
        return [record for element in tree for record in records(element)]
    if not dataclasses.is_dataclass(tree):
        return []
    inner = [getattr(tree, f.name) for f in dataclasses.fields(tree)]
    return [tree, *(record for element in inner for record in records(element))]


@pytest.mark.parametrize("has_mrope", [False, True])
def test_built_steps_are_as_declared(has_mrope: bool) -> None:
    """Every tensor of every record of a plan has its declared dtype, and one size per axis."""
    seen = set()
    for plan in plans(has_mrope):
        requests = len(plan.seq_lens)
        sizes = {"T": plan.query_start_loc[-1], "R": requests, "R+1": requests + 1}
        for record in records(plan):
            axes: dict[str, int] = dict(sizes) if record is plan else {}
            for name, declared in tensor_fields(type(record)).items():
                tensor = getattr(record, name)
                if tensor is None or declared.on_device:
                    continue
                assert tensor.dtype == declared.dtype, name
                assert tensor.device.type == "cpu"
                seen.add(name)
                letters = declared.shape.split()
                assert len(letters) == tensor.dim(), name
                for letter, size in zip(letters, tensor.shape, strict=True):
                    expected = int(letter) if letter.isdigit() else axes.setdefault(letter, size)
                    assert size == expected, f"{name}: {letter}"
    assert {
        "token_slots",
        "repetition",
        "target_ids",
        "values",
        "truncated",
        "prefixes",
        "scored_ids",
    } <= seen
    assert ("mrope_positions" in seen) == has_mrope


def test_a_staged_plan_has_every_tensor_replaced_and_shares_the_rest() -> None:
    """Tensors are replaced in order, nested ones too; input ids stay with the device."""
    for plan in plans(has_mrope=True):
        leaves = tensors_of(plan)
        staged = with_tensors(plan, [leaf.clone() for leaf in leaves])
        assert [leaf.tolist() for leaf in tensors_of(staged)] == [leaf.tolist() for leaf in leaves]
        for original, record in zip(records(plan), records(staged), strict=True):
            for field in dataclasses.fields(original):
                before, after = getattr(original, field.name), getattr(record, field.name)
                if isinstance(before, Tensor) and field.name != "input_ids":
                    assert after is not before, field.name
        assert staged.query_start_loc is plan.query_start_loc
        assert staged.input_ids is plan.input_ids


@pytest.mark.parametrize("has_mrope", [False, True])
def test_rows_of_a_graph_are_the_plans_then_padding(has_mrope: bool) -> None:
    """Padding is position 0 of the dummy slot in the dummy page with one token of KV, and is not valid."""
    plan = plans(has_mrope)[-1]
    assert plan.is_uniform_decode
    count, size = plan.num_requests, plan.num_requests + 2
    fields = captured_fields({Feature.MROPE} if has_mrope else ())
    rows = graph_rows(fields, size, DUMMIES, plan)
    assert list(rows)[-1] == "block_table", "it is the only one whose width changes"
    assert ("mrope_positions" in rows) == has_mrope
    assert "state_reads" not in rows
    padding = {
        "positions": 0,
        "slot_mapping": 0,
        "seq_lens_tensor": 1,
        "token_slots": 8,
        "sample_slots": 8,
        "sample_positions": 0,
        "block_table": 0,
    }
    for name, value in padding.items():
        assert torch.equal(rows[name][:count], getattr(plan, name)), name
        assert bool((rows[name][count:] == value).all()), name
    assert rows["valid_rows"].tolist() == [True] * count + [False, False]
    exact = graph_rows(fields, count, DUMMIES, plan)
    assert exact["valid_rows"].all()
    assert torch.equal(exact["positions"], plan.positions)
    for expected, rows_of_graph in ((rows, size), (exact, count)):
        packed, width = PackedRows(fields, rows_of_graph, DUMMIES), plan.block_table.shape[1]
        memory = np.full(-(-packed.nbytes(width) // 64) * 64, 255, dtype=np.uint8)
        packed.write(plan, memory)
        written = packed_views(torch.from_numpy(memory), list(expected.values()))
        for name, found in zip(expected, written, strict=True):
            assert torch.equal(found, expected[name]), name
        assert torch.equal(packed.pages(torch.from_numpy(memory).view(torch.int32), width), written[-1])


def test_a_graph_of_padding_is_a_whole_step() -> None:
    """The step has states, too: the zeros are read, and the dummy slot is written."""
    fields = captured_fields(set(Feature))
    step = graph_plan(graph_rows(fields, 3, DUMMIES, num_pages=5), 3, torch.zeros(3, dtype=torch.int64))
    assert step.is_uniform_decode
    assert step.block_table.shape == (3, 5)
    assert step.query_start_loc == step.query_start_loc_tensor.tolist()
    assert step.seq_lens == step.seq_lens_tensor.tolist()
    assert step.state_reads is not None
    assert step.state_writes is not None
    assert (step.state_reads.tolist(), step.state_writes.tolist()) == ([0] * 3, [3] * 3)


def test_a_declaration_is_all_that_staging_and_graphs_need() -> None:
    """A new tensor is staged, captured and padded without a line elsewhere."""

    @dataclass(frozen=True, slots=True)
    class Wider:
        seq_lens: list[int]
        block_table: Annotated[Tensor, TensorField("R P", torch.int32, captured=True)]
        token_types: Annotated[Tensor, TensorField("R", torch.int32, captured=True, padding=7)]

        num_requests = 2

    globals()["Wider"] = Wider
    wider: Any = Wider([1, 1], torch.ones((2, 4), dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32))
    assert [leaf.shape for leaf in tensors_of(wider)] == [(2, 4), (2,)]
    rows = graph_rows(tensor_fields(Wider), 3, DUMMIES, wider)
    assert rows["token_types"].tolist() == [1, 2, 7]


def test_tokens_of_prompts_become_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has its token's place, its request's pages and the tokens up to its own; only rows that sample
    name a slot to write to. Steps whose rows would see too much, or score the prompt, are none.
    """
    scored, mixed, decoding = plans()
    assert not fit_rows(scored)
    assert fit_rows(decoding)
    assert as_decode_rows(decoding, 8) is decoding
    assert mixed.num_requests < mixed.query_start_loc[-1]
    mixed = dataclasses.replace(mixed, prompt_logprobs=[])
    rows, count = as_decode_rows(mixed, 8), mixed.query_start_loc[-1]
    assert rows.is_uniform_decode
    assert rows.num_requests == count == rows.sample_slots.shape[0]
    assert rows.seq_lens == rows.seq_lens_tensor.tolist() == (mixed.positions + 1).tolist()
    owners = [
        owner
        for owner, (begin, end) in enumerate(itertools.pairwise(mixed.query_start_loc))
        for _ in range(begin, end)
    ]
    assert torch.equal(rows.block_table, mixed.block_table[owners])
    sampled = mixed.logits_indices.tolist()
    assert rows.sample_slots[sampled].tolist() == mixed.sample_slots.tolist()
    assert rows.sample_positions[sampled].tolist() == mixed.sample_positions.tolist()
    assert all(slot == 8 for row, slot in enumerate(rows.sample_slots.tolist()) if row not in sampled)
    assert fit_rows(mixed)
    monkeypatch.setattr(prompt_rows, "_MOST_SEEN", 1)
    assert not fit_rows(mixed)
