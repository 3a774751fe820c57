"""Expert clients that a device would drive: nothing raises, failures are known once a step has ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from gpu_service.experts.client import (
    ExpertClient,
    ExpertClientStats,
    ExpertComputeFailed,
    ExpertUnavailable,
    Ticket,
)
from gpu_service.layers.context import ForwardContext
from moebius.models.read import read_geometry
from tests.helpers.engine_harness import FlakyExperts
from tests.helpers.fake_model import FakeModel
from tests.helpers.torch_experts import TorchExperts

Failure = ExpertUnavailable | ExpertComputeFailed


class DoomedExperts(FlakyExperts):
    """`fails_at(n)`: what goes wrong in the n-th step begun; all later ones are garbage until `recover`."""

    is_device_driven = True

    def __init__(self, fails_at: Callable[[int], Failure | None] = lambda step: None) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.steps = 0
        self._failure: Failure | None = None

    def begin_step(self) -> None:
        """Counts the step."""
        self.steps += 1
        self._failure = self._failure or self.fails_at(self.steps)

    def failure(self) -> Failure | None:
        """Sticky until `recover`."""
        return self._failure

    def recover(self, timeout_s: float) -> None:
        """Also forgets the failure, unless recovering is to fail."""
        super().recover(timeout_s)
        self._failure = None


class DoomedModel(FakeModel):
    """Garbage wherever its experts have failed: other tokens, and other KV after them."""

    def __init__(self, experts: DoomedExperts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, context: ForwardContext) -> torch.Tensor:
        hidden_states = super().forward(context)
        return hidden_states if self.experts.failure() is None else hidden_states.flip(1) + 12345


class DenseExperts(ExpertClient):
    """All experts of a tiny model for every row, unchosen ones times zero: no look at any value.

    So its work can be recorded. Rows without experts (-1) get zero. `weights` become the device's.
    """

    is_device_driven = True

    def __init__(self, directory: Path, num_experts: int, device: torch.device | str = "cpu") -> None:
        self.geometry = read_geometry(directory)
        self._tensors = TorchExperts(directory)
        self._num_experts = num_experts
        self._device = torch.device(device)
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.submitted_ids: list[torch.Tensor] = []

    def begin_step(self) -> None:
        """There is no sleeping process to wake."""

    def failure(self) -> Failure | None:
        """Nothing fails."""
        return None

    def recover(self, timeout_s: float) -> None:
        """Nothing was lost."""

    def stats(self) -> ExpertClientStats:
        """Nothing is counted."""
        return ExpertClientStats()

    def wait_ready(self, timeout_s: float) -> None:
        """Ready at once."""

    def close(self) -> None:
        """Nothing is held."""

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        """See `ExpertClient.submit`; the work is done by `collect`."""
        self.submitted_ids.append(topk_ids)
        return Ticket(layer, hidden_states, topk_ids, topk_weights)

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        gate, up, down = self._layer(ticket.layer)
        x = ticket.hidden_states.float()
        inner = functional.silu(torch.einsum("th,eih->tei", x, gate)) * torch.einsum("th,eih->tei", x, up)
        answers = torch.einsum("tei,ehi->teh", inner, down)
        experts = torch.arange(self._num_experts, device=x.device, dtype=torch.int32)
        chosen = (ticket.topk_ids.unsqueeze(2) == experts) * ticket.topk_weights.unsqueeze(2)
        answer = torch.einsum("tke,teh->th", chosen, answers)
        return answer if partial is None else partial.add_(answer)

    def _layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if layer not in self._layers:
            stem = f"model.layers.{layer}.mlp.experts."
            of_experts = [self._matrices(stem, expert) for expert in range(self._num_experts)]
            gate, up, down = (torch.stack(part).to(self._device) for part in zip(*of_experts, strict=True))
            self._layers[layer] = (gate, up, down)
        return self._layers[layer]

    def _matrices(self, stem: str, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gate, up and down of an expert, which may be a part of a stored one."""
        stored, first, _ = self.geometry.stored_place(expert)
        gate, up, down = self._tensors.matrices(stem, stored)
        part = slice(first, first + self.geometry.moe_intermediate_size)
        return gate[part], up[part], down[:, part]


class DoomedDenseExperts(DenseExperts):
    """From a step that fails on, every answer is noise until `recover`; a flag in memory says so.

    So a recorded step finds out as a captured one does on a GPU.
    """

    def __init__(self, directory: Path, num_experts: int) -> None:
        super().__init__(directory, num_experts)
        self.lost_at: set[int] = set()
        self.steps = 0
        self.recoveries = 0
        self._lost = torch.zeros((), dtype=torch.bool)

    def begin_step(self) -> None:
        """Counts the step."""
        self.steps += 1
        if self.steps in self.lost_at:
            self._lost.fill_(True)

    def failure(self) -> Failure | None:
        """Sticky until `recover`."""
        return ExpertUnavailable(0, "killed") if bool(self._lost) else None

    def recover(self, timeout_s: float) -> None:
        """The server is back at once."""
        self.recoveries += 1
        self._lost.fill_(False)

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        answer = super().collect(ticket)
        answer = torch.where(self._lost, answer.flip(1) * 3 + 1, answer)
        return answer if partial is None else partial.add_(answer)
