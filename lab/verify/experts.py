"""One layer's experts as the reference and as they are served, and what their outputs differ by.

A sum says what a layer costs, but hides one wrong expert of many among the right ones, and blames it on
all that its tokens chose. So every expert is also asked alone, with rows of tokens that chose it; one that
no token chose gets rows of others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from expert_service.host import make_engine
from expert_service.loader import load_experts, plan_load
from expert_service.placement import place_process
from gpu_service.experts.client import (
    ExpertClient,
    ExpertClientStats,
    ExpertComputeFailed,
    Ticket,
    add_to,
    checked_inputs,
)
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.experts.resident.experts import ResidentExperts, Share
from gpu_service.verify.errors import relative_error, rounded_to
from gpu_service.verify.probe import spread
from lab.verify.report import ExpertError
from lab.verify.staged_model import Routed
from moebius.config import MoebiusConfig
from moebius.experts.slices import ExpertDtype, SliceRequest, plan_slice
from moebius.kernels import ExpertEngine, FloatArray
from moebius.models.geometry import MoeGeometry


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
        self._plan = plan_load(
            geometry, config.model.model, config.experts.expert_dtype, config.model.expert_checkpoint
        )
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
        """Returns packed formats of gate and up, and of down."""
        return self._plan.gate_up_formats[layer], self._plan.down_formats[layer]

    def rounded_to(self, layer: int) -> ExpertDtype:
        """Returns what the layer's weights are rounded to."""
        stored = (self._plan.experts[layer, expert] for expert in range(self.geometry.num_experts))
        return rounded_to(self._config.expert_dtype, stored)

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        """Keeps the routed rows; the work is done by `collect`."""
        if layer not in self._layers:
            return self._others.submit(layer, hidden_states, topk_ids, topk_weights)
        parts = checked_inputs(self.geometry, layer, hidden_states, topk_ids, topk_weights, self._dtype)
        return Ticket(layer, *parts)

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        """Returns float32 `[T, H]`: the partial sums of all servers, added in their order."""
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
        """Returns layers computed here."""
        return ExpertClientStats(calls=self._calls)

    def close(self) -> None:
        """Frees the layer that is held."""
        self._engines = []
        self._held = None


def _array(rows: torch.Tensor) -> FloatArray:
    """Returns rows as kernels take them: bfloat16 as its bits."""
    if rows.dtype == torch.bfloat16:
        return rows.view(torch.uint16).numpy()
    array: FloatArray = rows.numpy()
    return array


class ReferenceExperts(LocalExpertClient):
    """Within `recording`, keeps the last answer of each layer until it is taken."""

    def __init__(
        self, model_path: str, geometry: MoeGeometry, dtype: torch.dtype, expert_checkpoint: str = ""
    ) -> None:
        """`dtype` of the rows, see `LocalExpertClient`."""
        super().__init__(model_path, geometry, dtype, keeps=False, expert_checkpoint=expert_checkpoint)
        self._answers: dict[int, torch.Tensor] = {}
        self._records = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, answers of the served format are kept for comparison."""
        self._records = True
        try:
            yield
        finally:
            self._records = False

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        """The answer float32 `[T, H]`, kept for `take` while recording, added to `partial` if given."""
        answer = super().collect(ticket)
        if self._records:
            self._answers[ticket.layer] = answer.clone()
        return add_to(partial, answer)

    def take(self, layer: int) -> torch.Tensor:
        """Returns the sum float32 `[T, H]` of the last `collect`, which is dropped here."""
        return self._answers.pop(layer)


# Rows that an expert is asked about alone.
ROWS_EACH = 8
# Of them in one call.
_ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class ExpertsFound:
    """Filled by `compare_experts`; None: no expert of the kind is in the layer."""

    cpu_error: float | None
    gpu_error: float | None
    experts: tuple[ExpertError, ...]


@dataclass(frozen=True)
class LayerExperts:
    """Who computes one layer: the reference, servers' experts in this process, those on the GPU."""

    layer: int
    num_experts: int
    reference: ExpertClient
    ours: ExpertClient
    resident: ResidentExperts | None

    @property
    def share(self) -> Share:
        """Returns what of the layer is on the GPU."""
        return Share.NONE if self.resident is None else self.resident.share(self.layer)

    def cpu_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns int32 `[T, K]`, -1 where an expert on the GPU was chosen."""
        if self.share is Share.ALL:
            return torch.full_like(ids, -1)
        return (
            ids
            if self.share is Share.NONE or self.resident is None
            else self.resident.cpu_ids(self.layer, ids)
        )

    def wanted(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the reference's answer, float32 `[T, H]` on the CPU."""
        return _answer(self.reference, self.layer, rows, ids, weights)

    def on_servers(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the sum of our servers' experts among those chosen; as `wanted`."""
        if self.share is Share.ALL:
            return torch.zeros(rows.shape, dtype=torch.float32)
        return _answer(self.ours, self.layer, rows, self.cpu_ids(ids), weights)

    def on_device(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the sum of our experts on the GPU among those chosen; as `wanted`."""
        if self.resident is None or self.share is Share.NONE:
            return torch.zeros(rows.shape, dtype=torch.float32)
        return self.resident.forward(self.layer, rows, ids, weights).cpu()


def compare_experts(experts: LayerExperts, routed: Routed, wanted: torch.Tensor) -> ExpertsFound:
    """`wanted` float32 `[T, H]` is the reference's answer to `routed`; experts on GPUs count separately."""
    rows, ids, weights = routed.hidden_states, routed.topk_ids, routed.topk_weights
    cpu_error = gpu_error = None
    wanted_here = wanted
    if experts.share is not Share.NONE:
        gpu_ids = torch.where(experts.cpu_ids(ids) < 0, ids, torch.full_like(ids, -1))
        wanted_there = experts.wanted(rows, gpu_ids, weights)
        gpu_error = relative_error(experts.on_device(rows, ids, weights), wanted_there)
        wanted_here = wanted - wanted_there
    if experts.share is not Share.ALL:
        cpu_error = relative_error(experts.on_servers(rows, ids, weights), wanted_here)
    return ExpertsFound(cpu_error, gpu_error, tuple(_each_alone(experts, routed)))


def _each_alone(experts: LayerExperts, routed: Routed) -> Iterator[ExpertError]:
    """Yields every expert of the layer, ascending."""
    ids = routed.topk_ids.cpu()
    at_once = max(1, _ROWS_AT_ONCE // ROWS_EACH)
    for begin in range(0, experts.num_experts, at_once):
        chosen = range(begin, min(begin + at_once, experts.num_experts))
        counts = [int((ids == expert).any(1).sum()) for expert in chosen]
        tokens = [_tokens_of(ids, expert) for expert in chosen]
        rows = routed.hidden_states[torch.cat(tokens).to(routed.hidden_states.device)]
        single, weights = _alone(chosen, tokens, ids.shape[1], rows.device)
        wanted = experts.wanted(rows, single, weights)
        found = experts.on_servers(rows, single, weights) + experts.on_device(rows, single, weights)
        sizes = [len(part) for part in tokens]
        parts = zip(chosen, counts, torch.split(found, sizes), torch.split(wanted, sizes), strict=True)
        for expert, count, ours, theirs in parts:
            yield ExpertError(expert, count, relative_error(ours, theirs), gain(ours, theirs))


def _tokens_of(ids: torch.Tensor, expert: int) -> torch.Tensor:
    """Returns the rows of tokens that chose the expert, spread over the text; of any tokens where
    none did.
    """
    own = (ids == expert).any(1).nonzero().flatten().tolist() or range(ids.shape[0])
    return torch.tensor(spread(own, ROWS_EACH))


def _alone(
    chosen: range, tokens: list[torch.Tensor], top_k: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices int32 `[T, K]` of one expert each, in whichever column, and weights float32 `[T, K]`."""
    of_row = torch.tensor([expert for expert, part in zip(chosen, tokens, strict=True) for _ in part])
    row = torch.arange(len(of_row))
    ids = torch.full((len(of_row), top_k), -1, dtype=torch.int32)
    weights = torch.zeros(len(of_row), top_k)
    ids[row, row % top_k] = of_row.int()
    weights[row, row % top_k] = 1.0
    return ids.to(device), weights.to(device)


def gain(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How much of what is wanted is found: the factor on `wanted` that comes nearest to `found`.

    1 when both are zero; infinite when only what is wanted is, or where anything is NaN.
    """
    size = float(wanted.double().square().sum())
    product = float((found.double() * wanted.double()).sum())
    if not math.isfinite(product) or not math.isfinite(size):
        return math.inf
    if size == 0.0:
        return 1.0 if not found.any() else math.inf
    return product / size


def _answer(
    client: ExpertClient, layer: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return client.collect(client.submit(layer, rows, ids, weights)).cpu()


def routing_agreement(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Returns the share of the reference's choices int32 `[T, K]` that ours made, too, in whatever order."""
    return float((reference.unsqueeze(2) == ours.unsqueeze(1)).any(2).double().mean())
