"""Invariant: the MoE block hands experts their work before its own, adds both, and owns no expert."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gpu_service.experts.client import ExpertCall
from gpu_service.experts.resident.experts import Share
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.moe import MoE, MoEWithOwnNorms
from gpu_service.models.compose import build_model
from moebius.models.config import ModelConfigError
from moebius.models.layers.ffn import NormedMoE
from moebius.models.layers.norms import RMSNorm
from moebius.models.layers.router import RouterConfig
from moebius.models.registry import family_of
from tests.helpers.layer_values import composition, moe_value
from tests.unit.gpu_service.attention.test_torch_reference import CONFIG

HIDDEN = 12
ROUTER = RouterConfig(6, 2, "sigmoid", correction_bias=True, scale=2.5, float32_gate=True)


class RecordingExperts:
    """Answers with ones; notes the order of events and what was submitted."""

    call_log: list[ExpertCall] | None = None
    is_device_driven = False

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
    unused, inputs = cast(Any, None), cast(Any, SimpleNamespace(valid_rows=None))
    return ForwardContext(inputs=inputs, kv_cache=unused, attention=unused, experts=cast(Any, experts))


def _block(shared: int, dtype: torch.dtype) -> MoE:
    block = MoE(moe_value(ROUTER, 5, shared), 3, composition(HIDDEN, dtype))
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
    assert output.dtype == torch.float32
    expected = block.shared_experts(x, _context(None)).float() + 1
    torch.testing.assert_close(output, expected.float(), rtol=0, atol=0)


def test_calls_are_noted_while_a_profile_runs() -> None:
    """Layer, rows and three times in their order; numbers stay the same. A device's calls are no host's."""
    experts, block, x = RecordingExperts([]), _block(7, torch.float32), torch.randn(4, HIDDEN)
    expected = block(x, _context(experts))
    experts.call_log = []
    before = time.monotonic_ns()
    assert torch.equal(block(x, _context(experts)), expected)
    after = time.monotonic_ns()
    (call,) = experts.call_log
    assert (call.layer_id, call.rows) == (3, 4)
    assert before <= call.submitted_ns <= call.collecting_ns <= call.collected_ns <= after
    experts.is_device_driven = True
    block(x, _context(experts))
    assert len(experts.call_log) == 1


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


class RecordingResidents:
    """Holds even ids; answers with twos; notes the order of events."""

    def __init__(self, events: list[str], share: Share) -> None:
        self.events = events
        self._share = share
        self.computed: tuple[Any, ...] = ()

    def share(self, layer: int) -> Share:
        assert layer == 3
        return self._share

    def cpu_ids(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        self.events.append("cpu_ids")
        return torch.where(ids % 2 == 0, -1, ids)

    def forward(self, layer: int, *inputs: torch.Tensor) -> torch.Tensor:
        self.events.append("resident")
        self.computed = inputs
        twos = torch.full_like(inputs[0], 2, dtype=torch.float32)
        return twos if inputs[3] is None else inputs[3].float() + twos


@pytest.mark.parametrize("shared", [0, 7])
def test_resident_experts_run_between_submit_and_collect(shared: int) -> None:
    """Servers are asked for the others only; all parts are added in float32."""
    events: list[str] = []
    experts, resident = RecordingExperts(events), RecordingResidents(events, Share.SOME)
    block, x = _block(shared, torch.bfloat16), torch.randn(4, HIDDEN, dtype=torch.bfloat16)
    output = block(x, replace(_context(experts), resident=cast(Any, resident)))
    assert events == ["cpu_ids", "submit", "resident", "collect"]
    asked, kept = experts.submitted[2], resident.computed[1]
    assert torch.equal(asked, torch.where(kept % 2 == 0, -1, kept))
    assert bool((kept >= 0).all())
    base = block.shared_experts(x, _context(None)).float() if block.shared_experts is not None else 0.0
    torch.testing.assert_close(output, (base + torch.full(x.shape, 3.0)).float(), rtol=0, atol=0)


def test_a_layer_wholly_resident_submits_nothing_and_one_without_does_nothing_else() -> None:
    """No client is needed for the first; the second launches nothing for resident experts."""
    x = torch.randn(4, HIDDEN)
    events: list[str] = []
    whole = RecordingResidents(events, Share.ALL)
    output = _block(0, torch.float32)(x, replace(_context(None), resident=cast(Any, whole)))
    assert events == ["resident"]
    assert torch.equal(output, torch.full_like(x, 2))
    none, experts = RecordingResidents([], Share.NONE), RecordingExperts([])
    output = _block(0, torch.float32)(x, replace(_context(experts), resident=cast(Any, none)))
    assert none.events == []
    assert torch.equal(output, torch.ones_like(x))


def test_padding_chooses_no_experts_and_is_recorded_as_none() -> None:
    """Rows that only fill a graph's batch have the id -1 everywhere."""
    seen: list[torch.Tensor] = []

    class Recorder:
        def record(self, layer: int, ids: torch.Tensor) -> None:
            assert layer == 3
            seen.append(ids)

    experts, resident = RecordingExperts([]), RecordingResidents([], Share.SOME)
    valid = torch.tensor([True, False, True, False])
    context = replace(
        _context(experts),
        inputs=cast(Any, SimpleNamespace(valid_rows=valid)),
        resident=cast(Any, resident),
        recorder=cast(Any, Recorder()),
    )
    _block(0, torch.float32)(torch.randn(4, HIDDEN), context)
    for ids in (seen[0], experts.submitted[2], resident.computed[1]):
        assert bool((ids[~valid] == -1).all())
    assert bool((seen[0][valid] >= 0).all())


def test_the_gate_runs_in_float32_where_the_family_demands_it() -> None:
    assert _block(0, torch.bfloat16).gate.weight.dtype == torch.float32
    plain = moe_value(replace(ROUTER, float32_gate=False), 5)
    assert MoE(plain, 3, composition(HIDDEN, torch.bfloat16)).gate.weight.dtype == torch.bfloat16


def test_a_context_without_experts_is_refused() -> None:
    with pytest.raises(RuntimeError, match="layer 3 routes to experts"):
        _block(0, torch.float32)(torch.randn(1, HIDDEN), _context(None))


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelConfigError, match=r"'mamba' is not supported; known: .*glm4_moe.*qwen3_moe"):
        family_of("mamba")


def test_building_allocates_nothing() -> None:
    model = build_model(CONFIG)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["weighed inputs", "own norms"])
def test_who_watches_the_routing_sees_what_experts_are_given(kind: str) -> None:
    """`moebius verify` compares formats on those rows, where they are not the ones that the router reads."""
    seen: list[tuple[torch.Tensor, ...]] = []
    rows, experts = torch.randn(5, HIDDEN), RecordingExperts([])
    if kind == "weighed inputs":
        router = RouterConfig(6, 1, "sigmoid", weighs_inputs=True)
        block = MoE(moe_value(router, 5), 3, composition(HIDDEN))
    else:
        value = moe_value(RouterConfig(6, 2, "softmax"), 5, 7)
        parts = {"router": value.router, "experts": value.experts, "shared": value.shared}
        normed = NormedMoE(**parts, norm=RMSNorm(1e-6), router_eps=1e-6)
        block = MoEWithOwnNorms(normed, 1, composition(HIDDEN))
    block.to_empty(device="cpu")
    for parameter in block.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    block.on_routed = lambda *given: seen.append(given)
    if isinstance(block, MoEWithOwnNorms):
        block.forward_with_residual(rows, rows + 1, _context(experts))
        expected = block.input_norm(rows + 1)
    else:
        block(rows, _context(experts))
        expected = rows * block.gate(rows, _context(None).inputs)[0]
    assert len(seen) == 1
    assert all(torch.equal(a, b) for a, b in zip(seen[0], experts.submitted[1:], strict=True))
    torch.testing.assert_close(seen[0][0], expected)


@pytest.mark.parametrize("shared", [0, 7])
def test_experts_of_a_latent_space_are_given_and_give_its_rows(shared: int) -> None:
    """What they answer is projected before anything is added to it; a comparison gets the same."""
    events: list[str] = []
    block = MoE(moe_value(ROUTER, 5, shared, "relu2", latent_size=4), 3, composition(HIDDEN)).to_empty(
        device="cpu"
    )
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    experts, rows = RecordingExperts(events), torch.randn(5, HIDDEN)
    seen: list[torch.Tensor] = []
    block.on_routed = lambda given, topk_ids, topk_weights: seen.append(given)
    output = block(rows, _context(experts))
    assert block.fc1_latent_proj is not None
    assert block.fc2_latent_proj is not None
    assert experts.submitted[1].shape == (5, 4)
    torch.testing.assert_close(experts.submitted[1], rows @ block.fc1_latent_proj.weight.T)
    assert seen[0] is experts.submitted[1]
    expected = torch.ones(5, 4) @ block.fc2_latent_proj.weight.T
    if block.shared_experts is not None:
        up, down = block.shared_experts.gate_up_proj.weight, block.shared_experts.down_proj.weight
        expected = expected + (rows @ up.T).relu().square() @ down.T
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-4)
