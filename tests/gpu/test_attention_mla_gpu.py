"""Invariant: on a GPU, latent attention by FlashInfer = Triton = torch = plain attention, also replayed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gpu_service.attention.mla.base import MlaAttentionBackend
from gpu_service.attention.registry import MLA_BACKENDS
from gpu_service.cache.fp8 import E4M3
from gpu_service.ops.latent import absorb_query, project_values
from tests.helpers.attention_cases import Shape, as_capturable, refill
from tests.helpers.gpu_capture import capture
from tests.helpers.mla_cases import (
    DEEPSEEK,
    LAYER,
    TINY,
    MlaCase,
    make_mla_case,
    naive_mla,
    run_absorbed,
    run_non_absorbed,
)
from tests.tolerances import MLA_BFLOAT16, MLA_FLOAT32

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
SHAPES: dict[str, Shape] = {
    "one long decode": [(3000, 1)],
    "decodes": [(0, 1), (15, 1), (64, 1), (700, 1), (2500, 1)],
    "first chunks": [(0, 300), (0, 2), (0, 129)],
    "later chunk": [(1000, 20)],
    "mixture": [(900, 1), (0, 70), (33, 65), (3, 1)],
}


def backend_for(case: MlaCase, name: str) -> MlaAttentionBackend:
    """Returns the backend by name; skips where it cannot serve the case, and says why."""
    entry = MLA_BACKENDS[name]
    reason = entry.missing(case.cache.device) or entry.load().unsupported(case.dimensions, case.cache)
    if reason:
        pytest.skip(reason)
    backend: MlaAttentionBackend = entry.load()(case.dimensions, case.cache)
    return backend


@pytest.mark.parametrize("backend", ["flashinfer", "triton", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("storage", [None, E4M3])
def test_every_backend_is_plain_attention(shape: str, storage: torch.dtype | None, backend: str) -> None:
    case = make_mla_case(DEEPSEEK, SHAPES[shape], 64, BF16, storage, "cuda")
    case.cache.scales[LAYER] = 0.5 if storage else 1.0
    attention = backend_for(case, backend)
    expected = naive_mla(case)
    attention.plan(case.inputs)
    output = run_non_absorbed(case, attention) if attention.non_absorbed else run_absorbed(case, attention)
    torch.testing.assert_close(output.double(), expected, rtol=MLA_BFLOAT16, atol=MLA_BFLOAT16)


@pytest.mark.parametrize("shape", SHAPES)
def test_sizes_that_flashinfer_lacks(shape: str) -> None:
    case = make_mla_case(TINY, SHAPES[shape], 4, torch.float32, None, "cuda")
    expected = naive_mla(case)
    output = run_absorbed(case, backend_for(case, "triton"))
    torch.testing.assert_close(output.double(), expected, rtol=MLA_FLOAT32, atol=MLA_FLOAT32)


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_replays_are_eager_steps(backend: str) -> None:
    cases = [
        make_mla_case(DEEPSEEK, shape, 64, BF16, None, "cuda")
        for shape in ([(5, 1), (2500, 1), (0, 1), (64, 1)], [(1, 1), (63, 1), (3000, 1), (0, 1)])
    ]
    largest = max(cases, key=lambda case: case.cache.num_pages)
    attention = backend_for(largest, backend)
    empty = make_mla_case(DEEPSEEK, [(0, 1)] * 4, 64, BF16, None, "cuda")
    static = as_capturable(empty.inputs)
    static = replace(static, block_table=torch.zeros(4, 60, dtype=torch.int32, device="cuda"))
    attention.plan_capture(static)

    def rows_of(case: MlaCase) -> tuple[torch.Tensor, ...]:
        query = absorb_query(case.query_nope, case.key_weight).contiguous()
        return query, case.query_rope, case.latent, case.key_rope

    rows: list[Any] = [tensor.clone() for tensor in rows_of(empty)]
    graph, output = capture(lambda: attention.forward(*rows, LAYER))
    for case in cases:
        expected = naive_mla(case)
        largest.cache.pages(LAYER)[: case.cache.num_pages] = case.fresh_cache().pages(LAYER)
        for target, source in zip(rows, rows_of(case), strict=True):
            target.copy_(source)
        attention.plan_replay(refill(static, case.inputs))
        graph.replay()
        projected = project_values(output, case.value_weight)
        torch.testing.assert_close(projected.double(), expected, rtol=MLA_BFLOAT16, atol=MLA_BFLOAT16)
