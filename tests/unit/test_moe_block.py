"""Invariant: the MoE block hands experts their work before its own, adds both, and owns no expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from gpu_service.context import ForwardContext
from gpu_service.layers.moe import MoE
from gpu_service.model_config import ModelConfigError, MoeConfig, RouterConfig
from gpu_service.models.registry import build_model
from tests.unit.test_paged_attention import CONFIG

HIDDEN = 12
ROUTER = RouterConfig(6, 2, "sigmoid", correction_bias=True, scale=2.5, float32_gate=True)


class RecordingExperts:
    """Answers with ones; notes the order of events and what was submitted."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.submitted: tuple[Any, ...] = ()

    def submit(self, *arguments: Any) -> str:
        self.events.append("submit")
        self.submitted = arguments
        return "ticket"

    def collect(self, ticket: str, partial: torch.Tensor | None = None) -> torch.Tensor:
        assert ticket == "ticket"
        self.events.append("collect")
        ones = torch.ones_like(self.submitted[1], dtype=torch.float32)
        return ones if partial is None else partial.add_(ones)


def _context(experts: RecordingExperts | None) -> ForwardContext:
    unused = cast(Any, None)
    return ForwardContext(inputs=unused, kv_cache=unused, attention=unused, experts=cast(Any, experts))


def _block(shared: int, dtype: torch.dtype) -> MoE:
    block = MoE(3, HIDDEN, MoeConfig(ROUTER, 5, shared, frozenset({3})), "silu", dtype=dtype)
    block.to_empty(device="cpu")
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    return block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_experts_run_between_submit_and_collect(dtype: torch.dtype) -> None:
    events: list[str] = []
    experts, block = RecordingExperts(events), _block(7, dtype)
    assert block.shared_experts is not None
    block.shared_experts.register_forward_pre_hook(lambda *_: events.append("shared"))
    x = torch.randn(4, HIDDEN, dtype=dtype)
    output = block(x, _context(experts))
    assert events == ["submit", "shared", "collect"]
    assert output.dtype == dtype
    expected = block.shared_experts(x, _context(None)).float() + 1
    torch.testing.assert_close(output, expected.to(dtype), rtol=0, atol=0)


def test_what_is_submitted_is_the_client_contract() -> None:
    experts, block = RecordingExperts([]), _block(0, torch.bfloat16)
    x = torch.randn(4, HIDDEN, dtype=torch.bfloat16)
    output = block(x, _context(experts))
    layer, hidden_states, topk_ids, topk_weights = experts.submitted
    assert layer == 3
    assert torch.equal(hidden_states, x)
    assert (topk_ids.shape, topk_ids.dtype) == ((4, 2), torch.int32)
    assert (topk_weights.shape, topk_weights.dtype) == ((4, 2), torch.float32)
    assert torch.equal(output, torch.ones_like(x))


def test_the_gate_runs_in_float32_where_the_family_demands_it() -> None:
    assert _block(0, torch.bfloat16).gate.weight.dtype == torch.float32
    plain = MoeConfig(replace(ROUTER, float32_gate=False), 5, 0, frozenset({3}))
    assert MoE(3, HIDDEN, plain, "silu", dtype=torch.bfloat16).gate.weight.dtype == torch.bfloat16


def test_a_context_without_experts_is_refused() -> None:
    with pytest.raises(RuntimeError, match="layer 3 routes to experts"):
        _block(0, torch.float32)(torch.randn(1, HIDDEN), _context(None))


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelConfigError, match=r"'mamba' is not supported; known: glm4_moe, qwen3_moe"):
        build_model(replace(CONFIG, model_type="mamba"))


def test_building_allocates_nothing() -> None:
    model = build_model(CONFIG)
    assert all(parameter.is_meta for parameter in model.parameters())
