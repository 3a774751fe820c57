"""Guards what a MoE block asks of clients with late experts, in which order, and where answers are added."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gpu_service.layers.context import ForwardContext
from gpu_service.layers.deferral import DeferralRule, late_choices
from gpu_service.layers.moe import MoE
from moebius.models.layers.router import RouterConfig
from tests.helpers.layer_values import composition, moe_value

HIDDEN, COUNT = 12, 1
ROUTER = RouterConfig(6, 3, "softmax")
LAYERS = (3, 5)


class QueuedExperts:
    """Expert e of layer l answers (e + 1) * l times its rows; tickets are answered in order only."""

    is_device_driven = True
    call_log = None

    def __init__(self) -> None:
        self.events: list[str] = []
        self._tickets: deque[tuple[Any, ...]] = deque()

    def submit(self, *given: Any) -> Any:
        """layer, rows, ids, weights."""
        self.events.append(f"submit {given[0]}")
        self._tickets.append(given)
        return given

    def collect(self, ticket: Any, partial: torch.Tensor | None = None) -> torch.Tensor:
        """Adds as clients do, in place."""
        assert ticket is self._tickets.popleft(), "not in the order of submission"
        self.events.append(f"collect {ticket[0]}")
        answer = answered(*ticket)
        return answer if partial is None else partial.add_(answer)


def answered(layer: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns float32 `[T, H]`."""
    return rows.float() * (weights * (ids + 1) * layer).sum(dim=1, keepdim=True)


def block(layer: int, shared: int, latent: int) -> MoE:
    """With weights drawn at random."""
    made = MoE(moe_value(ROUTER, 5, shared, latent_size=latent), layer, composition(HIDDEN)).to_empty(
        device="cpu"
    )
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


@torch.inference_mode()
@pytest.mark.parametrize("shared", [0, 7])
@pytest.mark.parametrize("latent", [0, 4])
def test_the_late_part_is_added_by_the_next_block(shared: int, latent: int) -> None:
    """It is projected by its own layer, collected before the next layer's own answer, and added once."""
    experts, rows = QueuedExperts(), torch.randn(2, 4, HIDDEN)
    inputs, unused = cast(Any, SimpleNamespace(valid_rows=None)), cast(Any, None)
    deferral = DeferralRule(COUNT, frozenset({LAYERS[0]})).begin()
    late_context = ForwardContext(inputs, unused, unused, cast(Any, experts), deferral=deferral)
    plain_context = ForwardContext(inputs, unused, unused, cast(Any, experts))
    first, last = (block(layer, shared, latent) for layer in LAYERS)
    weights, ids = first.gate(rows[0], inputs)
    late = late_choices(ids, weights, COUNT)
    given = rows[0] if first.fc1_latent_proj is None else first.fc1_latent_proj(rows[0])
    part = answered(LAYERS[0], given, ids.masked_fill(~late, -1), weights)
    part = part if first.fc2_latent_proj is None else first.fc2_latent_proj(part)
    plain = first(rows[0], plain_context), last(rows[1], plain_context)
    experts.events.clear()
    found = first(rows[0], late_context), last(rows[1], late_context)
    torch.testing.assert_close(found[0], plain[0] - part, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(found[1], plain[1] + part, rtol=1e-5, atol=1e-3)
    one, two = LAYERS
    assert experts.events == [
        *(f"submit {one}", f"submit {one}", f"collect {one}"),
        *(f"submit {two}", f"collect {one}", f"collect {two}"),
    ]


@torch.inference_mode()
def test_a_settled_part_is_added_as_late() -> None:
    """Collected before the next layer begins, as `moebius verify` needs it, added by that layer."""
    experts, rows = QueuedExperts(), torch.randn(2, 4, HIDDEN)
    inputs, unused = cast(Any, SimpleNamespace(valid_rows=None)), cast(Any, None)
    blocks = [block(layer, 0, 0) for layer in LAYERS]
    outputs = []
    for settles in (False, True):
        deferral = DeferralRule(COUNT, frozenset({LAYERS[0]})).begin()
        context = ForwardContext(inputs, unused, unused, cast(Any, experts), deferral=deferral)
        experts.events.clear()
        blocks[0](rows[0], context)
        if settles:
            deferral.settle()
            assert experts.events[-1] == f"collect {LAYERS[0]}"
        outputs.append(blocks[1](rows[1], context))
        # Nothing is left for a third layer.
        assert deferral.take(None) is None
    torch.testing.assert_close(*outputs)
