"""Layers whose answer from echo servers is known exactly, for clients of any kind and device."""

from __future__ import annotations

import torch

from gpu_service.experts.client import ExpertClient, Ticket
from moebius.models.geometry import MoeGeometry

# Fits `tests.helpers.mailbox.geometry`.
MODEL = MoeGeometry(
    model_type="echo",
    hidden_size=48,
    num_layers=5,
    moe_layers=(0, 1, 2, 3, 4),
    num_experts=32,
    top_k=3,
    moe_intermediate_size=8,
    activation="silu",
    dtype="float32",
)


class Layer:
    """One layer's inputs, whole numbers and quarters, so that every sum is exact in float32 and bfloat16."""

    def __init__(
        self,
        rows: int,
        seed: int = 0,
        layer: int = 3,
        dtype: torch.dtype = torch.float32,
        model: MoeGeometry = MODEL,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layer = layer
        self.hidden_states = torch.empty(rows, model.hidden_size, dtype=dtype, device=device)
        self.topk_ids = torch.empty(rows, model.top_k, dtype=torch.int32, device=device)
        self.topk_weights = torch.empty(rows, model.top_k, device=device)
        self.partial = torch.empty(rows, model.hidden_size, device=device)
        self.redraw(seed)

    def redraw(self, seed: int) -> None:
        """New values in the same memory, as a replayed step finds them."""
        random = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int, target: torch.Tensor) -> torch.Tensor:
            return torch.randint(low, high, target.shape, generator=random)

        self.hidden_states.copy_(draw(-64, 65, self.hidden_states))
        self.topk_ids.copy_(draw(-1, 32, self.topk_ids))
        self.topk_weights.copy_(draw(0, 5, self.topk_weights) / 4)
        self.partial.copy_(draw(-9, 10, self.partial))

    def submit(self, client: ExpertClient) -> Ticket:
        """Returns the ticket."""
        return client.submit(self.layer, self.hidden_states, self.topk_ids, self.topk_weights)

    def run(self, client: ExpertClient) -> torch.Tensor:
        """Returns a copy of `partial` with the answer added."""
        return client.collect(self.submit(client), self.partial.clone())

    def routed(self, num_servers: int) -> torch.Tensor:
        """Returns what the routing adds to every element of a row; float32 `[T, 1]`."""
        pairs = self.topk_weights * (self.topk_ids + 1)
        return pairs.sum(dim=1, keepdim=True) * (self.layer + 1) * num_servers

    def expected(self, num_servers: int) -> torch.Tensor:
        """`partial` and what echo servers of scale 1, 2, 3... must add to it."""
        scale = num_servers * (num_servers + 1) / 2
        return self.partial + scale * self.hidden_states.float() + self.routed(num_servers)
