"""The mixture-of-experts block: it routes, and lets someone else compute the routed experts."""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.context import ForwardContext
from gpu_service.layers.mlp import GatedMLP
from gpu_service.layers.router import Router
from gpu_service.model_config import MoeConfig
from gpu_service.parallel.context import SOLO, ParallelContext


class MoE(nn.Module):
    """Route, submit, compute the shared experts meanwhile, collect, add.

    Holds no routed expert's weights. The routing weights already carry the family's scaling factor, so
    what `collect` returns is final.
    """

    def __init__(
        self,
        layer_id: int,
        hidden_size: int,
        config: MoeConfig,
        activation: str,
        *,
        dtype: torch.dtype,
        parallel: ParallelContext = SOLO,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.gate = Router(hidden_size, config.router, dtype=dtype)
        shared_size = config.shared_intermediate_size
        self.shared_experts = (
            GatedMLP(hidden_size, shared_size, activation, dtype=dtype, parallel=parallel, reduce=False)
            if shared_size
            else None
        )
        self._group = parallel.tensor_group

    def forward(self, hidden_states: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """`[T, H]` to a new `[T, H]` in the same dtype; the sum is taken in float32."""
        experts = context.experts
        if experts is None:
            raise RuntimeError(f"layer {self.layer_id} routes to experts, but the context has no client")
        topk_weights, topk_ids = self.gate(hidden_states)
        if context.valid_rows is not None:
            topk_ids = torch.where(context.valid_rows.unsqueeze(1), topk_ids, -1)
        ticket = experts.submit(self.layer_id, hidden_states, topk_ids, topk_weights)
        shared = None if self.shared_experts is None else self.shared_experts(hidden_states, context).float()
        # Every rank's answer has its own rows only, and its shared experts their own neurons only.
        return self._group.all_reduce(experts.collect(ticket, shared)).to(hidden_states.dtype)
