"""Invariant: on a GPU, sparse attention reads the tokens with the highest index scores, also replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_service.attention.mla.base import MlaAttentionBackend
from gpu_service.attention.mla.triton_backend import TritonMlaAttention
from gpu_service.attention.registry import MLA_BACKENDS, choose_backend
from gpu_service.ops.latent import absorb_query, project_values
from tests.helpers.attention_cases import Shape, as_capturable, refill
from tests.helpers.gpu_capture import capture
from tests.helpers.mla_cases import (
    DEEPSEEK_SPARSE,
    LAYER,
    MlaCase,
    make_mla_case,
    naive_mla,
    naive_scores,
    run_absorbed,
)
from tests.tolerances import INDEX_SCORES_BFLOAT16, MLA_BFLOAT16

pytestmark = pytest.mark.gpu
TOP_K = 256
SHAPES: dict[str, Shape] = {
    "decodes": [(0, 1), (255, 1), (256, 1), (700, 1), (3000, 1)],
    "chunks": [(0, 300), (1000, 20), (0, 40)],
}


def make(shape: Shape) -> MlaCase:
    return make_mla_case(DEEPSEEK_SPARSE, shape, 64, torch.bfloat16, None, "cuda")


def checked(case: MlaCase, selection: torch.Tensor) -> list[list[int]]:
    """Returns as many tokens as allowed, ascending, none of them worse than one left out by more than
    rounding.
    """
    rows = []
    for row, scores in zip(selection.tolist(), naive_scores(case), strict=True):
        chosen = [position for position in row if position >= 0]
        assert chosen == sorted(set(chosen))
        assert row[len(chosen) :] == [-1] * (TOP_K - len(chosen))
        assert len(chosen) == min(TOP_K, len(scores))
        lowest = scores.sort(descending=True).values[len(chosen) - 1]
        assert scores[chosen].min() >= lowest - INDEX_SCORES_BFLOAT16
        rows.append(chosen)
    return rows


@pytest.mark.parametrize("name", ["triton", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_to_the_chosen_tokens(shape: str, name: str) -> None:
    case = make(SHAPES[shape])
    backend: MlaAttentionBackend = MLA_BACKENDS[name].load()(case.dimensions, case.cache)
    backend.plan(case.inputs)
    assert backend.selects
    chosen = checked(case, backend.select(case.index_query, case.head_weights, 0))
    expected = naive_mla(case, chosen)
    output = run_absorbed(case, backend)
    torch.testing.assert_close(output.double(), expected, rtol=MLA_BFLOAT16, atol=MLA_BFLOAT16)


def test_many_heads_of_a_row_share_what_they_read() -> None:
    """Rows enough for programs of 64 heads, after earlier tokens and from the first on."""
    sizes = replace(DEEPSEEK_SPARSE, num_heads=128)
    case = make_mla_case(sizes, [(1000, 150), (0, 300)], 64, torch.bfloat16, None, "cuda")
    backend = TritonMlaAttention(sizes, case.cache)
    backend.plan(case.inputs)
    chosen = checked(case, backend.select(case.index_query, case.head_weights, 0))
    expected, output = naive_mla(case, chosen), run_absorbed(case, backend)
    torch.testing.assert_close(output.double(), expected, rtol=MLA_BFLOAT16, atol=MLA_BFLOAT16)


def test_equal_scores_go_to_the_earliest_tokens() -> None:
    case = make([(3000, 1)])
    case.index_query.zero_()
    backend = choose_backend(MLA_BACKENDS, case.dimensions, case.cache, torch.device("cuda"))
    assert isinstance(backend, TritonMlaAttention)
    backend.plan(case.inputs)
    assert backend.select(case.index_query, case.head_weights, 0)[0].tolist() == list(range(TOP_K))


def test_replays_choose_again() -> None:
    """A graph that was captured on the dummy page, with sequences of one token, chooses for each replay."""
    case = make([(1, 1), (63, 1), (3000, 1)])
    attention = TritonMlaAttention(DEEPSEEK_SPARSE, case.cache)
    static = as_capturable(make([(0, 1)] * 3).inputs)
    static.slot_mapping.zero_()
    static = replace(static, block_table=torch.zeros(3, 60, dtype=torch.int32, device="cuda"))
    attention.plan_capture(static)
    query, choices = absorb_query(case.query_nope, case.key_weight).contiguous(), []

    def step() -> torch.Tensor:
        choices.append(attention.select(case.index_query, case.head_weights, 0))
        return attention.forward(query, case.query_rope, case.latent, case.key_rope, LAYER, choices[-1])

    graph, output = capture(step)
    for again in range(2):
        if again:
            case.index_query.neg_()
        attention.plan_replay(refill(static, case.inputs))
        graph.replay()
        expected = naive_mla(case, checked(case, choices[-1]))
        projected = project_values(output, case.value_weight)
        torch.testing.assert_close(projected.double(), expected, rtol=MLA_BFLOAT16, atol=MLA_BFLOAT16)
