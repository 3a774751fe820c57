"""Experts as expert servers hold and compute them, in this process and one layer at a time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from expert_service.host import make_engine
from expert_service.load_plan import plan_load
from expert_service.loader import load_experts
from expert_service.placement import place_process
from gpu_service.experts.client import (
    ExpertClient,
    ExpertClientStats,
    ExpertComputeFailed,
    Ticket,
    add_to,
    make_ticket,
)
from gpu_service.verify.errors import rounded_to
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.config import MoebiusConfig
from moebius.expert_dtype import ExpertDtype
from moebius.expert_slices import SliceRequest, plan_slice
from moebius.kernels import ExpertEngine, FloatArray


class PackedExperts(ExpertClient):
    """Packs a layer at its first use, as `config.experts` says, and frees it when another one is asked for.

    Layers other than `layers` are `others`' business.
    """

    def __init__(
        self,
        config: MoebiusConfig,
        geometry: MoeGeometry,
        dtype: torch.dtype,
        layers: Collection[int],
        others: ExpertClient,
    ) -> None:
        """`dtype` of the rows. Raises CheckpointError and ValueError as an expert server does at start."""
        self.geometry = geometry
        self._config = config.experts
        self._dtype = dtype
        self._layers = frozenset(layers)
        self._others = others
        self._plan = plan_load(geometry, config.model.model, config.experts.expert_dtype)
        request = SliceRequest.from_config(config)
        self._parts = [
            plan_slice(geometry, replace(request, split_index=index), self._plan.group)
            for index in range(request.split_count)
        ]
        self._placement = place_process(config.experts)
        self._held: int | None = None
        self._engines: list[ExpertEngine] = []
        self._calls = 0
        # By layer, what rounding cost its weights: root of the squared error over the squared weights.
        self.weight_errors: dict[int, float] = {}

    def formats(self, layer: int) -> tuple[str, str]:
        """Packed formats of gate and up, and of down."""
        return self._plan.gate_up_formats[layer], self._plan.down_formats[layer]

    def rounded_to(self, layer: int) -> ExpertDtype:
        """What the layer's weights are rounded to."""
        stored = (self._plan.experts[layer, expert] for expert in range(self.geometry.num_experts))
        return rounded_to(self._config.expert_dtype, stored)

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        """See `ExpertClient.submit`; the work is done by `collect`."""
        if layer not in self._layers:
            return self._others.submit(layer, hidden_states, topk_ids, topk_weights)
        return make_ticket(self.geometry, layer, hidden_states, topk_ids, topk_weights, self._dtype)

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        """See `ExpertClient.collect`: servers' shares are added in their order."""
        if ticket.layer not in self._layers:
            return self._others.collect(ticket, partial)
        self._hold(ticket.layer)
        rows = _array(ticket.hidden_states)
        ids, weights = ticket.topk_ids.numpy(), ticket.topk_weights.numpy()
        output = torch.zeros(ticket.hidden_states.shape, dtype=torch.float32)
        try:
            for engine in self._engines:
                output += torch.from_numpy(engine.forward(ticket.layer, rows, ids, weights))
        except ValueError as error:
            raise ExpertComputeFailed(str(error)) from error
        self._calls += 1
        return add_to(partial, output)

    def _hold(self, layer: int) -> None:
        if self._held == layer:
            return
        self.close()
        model = replace(self._plan.model, moe_layers=(layer,))
        plan = replace(self._plan, checkpoint=replace(self._plan.checkpoint, model=model))
        for part in self._parts:
            engine = make_engine(plan, part, self._placement, self._config.batch_invariant_experts)
            for done in load_experts(engine, plan, part, lambda: False, self._placement.num_threads):
                self.weight_errors[layer] = max(self.weight_errors.get(layer, 0.0), done.relative_error)
            if self._config.calibrate_kernels:
                engine.calibrate()
            self._engines.append(engine)
        self._held = layer

    def wait_ready(self, timeout_s: float) -> None:
        """Always ready."""

    def recover(self, timeout_s: float) -> None:
        """Nothing can be lost."""

    def stats(self) -> ExpertClientStats:
        """Layers computed here."""
        return ExpertClientStats(calls=self._calls)

    def close(self) -> None:
        """Frees the layer that is held."""
        self._engines = []
        self._held = None


def _array(rows: torch.Tensor) -> FloatArray:
    """As kernels take rows: bfloat16 as its bits."""
    if rows.dtype == torch.bfloat16:
        return rows.view(torch.uint16).numpy()
    array: FloatArray = rows.numpy()
    return array
