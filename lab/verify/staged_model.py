"""A model's dense part, one pipeline stage after another in the same process: only one is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpu_service.assembly.kv_memory import cache_shape
from gpu_service.attention.registry import make_attention
from gpu_service.cache.state_cache import ZERO_SLOT, make_states
from gpu_service.core.parallel import ParallelContext, SoloCollectives
from gpu_service.core.partition import check_divisible, stage_layers
from gpu_service.core.step import ForwardInputs
from gpu_service.experts.client import ExpertClient
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.deferral import Deferral
from gpu_service.layers.moe import MoE
from gpu_service.loader.load import load_weights
from gpu_service.models.common import CausalLM
from gpu_service.models.compose import build_model
from moebius.config import GpuConfig, MoebiusConfig
from moebius.errors import ConfigError, UserError
from moebius.models.config import ModelConfig, ModelOverrides
from moebius.models.read import read_geometry, read_model_config


class _HandOver(SoloCollectives):
    """Where a stage leaves its hidden states, and where the next one finds them."""

    def __init__(self) -> None:
        self.hidden_states: torch.Tensor | None = None

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Keeps a copy of `tensor` for the next stage."""
        self.hidden_states = tensor.clone()

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Fills `tensor` with what the stage before sent."""
        assert self.hidden_states is not None
        return tensor.copy_(self.hidden_states)


@dataclass(frozen=True)
class StagedModel:
    """Filled by `open`."""

    directory: Path
    config: ModelConfig
    gpu: GpuConfig
    device: torch.device
    num_stages: int  # As many as can be: mostly one layer each.

    @staticmethod
    def open(config: MoebiusConfig, directory: Path, device: torch.device) -> StagedModel:
        """Reads config.json only, with the settings of `config`. Raises ModelConfigError."""
        chosen = config.model
        overrides = ModelOverrides(
            chosen.experts_per_token, chosen.max_model_len, chosen.dtype, language_model_only=True
        )
        model = read_model_config(directory, overrides)
        return StagedModel(directory, model, config.gpu, device, _most_stages(model))

    def layers(self, stage: int) -> range:
        """Returns decoder layers of a stage, by their index in the checkpoint."""
        return stage_layers(self.config, self._parallel(stage, _HandOver()))

    def load(self, stage: int) -> LoadedStage:
        """Reads the stage's dense weights. Raises CheckpointError."""
        hand_over = _HandOver()
        parallel = self._parallel(stage, hand_over)
        model = build_model(self.config, device=self.device, parallel=parallel)
        load_weights(model, self.directory)
        return LoadedStage(self, model, hand_over, self.layers(stage))

    def _parallel(self, stage: int, hand_over: _HandOver) -> ParallelContext:
        return ParallelContext(stage=stage, num_stages=self.num_stages, world_group=hand_over)


@dataclass(frozen=True)
class LoadedStage:
    """Filled by `StagedModel.load`; may run any number of models that share its weights."""

    of: StagedModel
    model: CausalLM
    hand_over: _HandOver
    layers: range

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden_states: torch.Tensor | None,
        experts: ExpertClient | None,
        resident: ResidentExperts | None = None,
        deferral: Deferral | None = None,
    ) -> torch.Tensor:
        """Computes this stage from the hidden states `[T, H]` of the one before (None: the first).

        `token_ids` int64 `[T]` are one request's. `deferral` is the same for all stages; None: no expert is
        late. After the last stage: after the final norm.
        """
        return StageSequence(self, token_ids.shape[0], self.of.gpu.attention_backend).step(
            token_ids, hidden_states, experts, resident, deferral
        )


class StageSequence:
    """One request on one stage: its keys, values and states stay from one step to the next."""

    def __init__(self, stage: LoadedStage, num_tokens: int, attention_backend: str) -> None:
        """Allocates a cache of `num_tokens` tokens; `attention_backend` as the setting."""
        model, of = stage.model, stage.of
        shape = cache_shape(of.gpu, model.config, model.rank_layers, of.device)
        self._stage = stage
        self._cache = shape.make(1 + -(-num_tokens // shape.page_size))
        self._attention = make_attention(shape.layers, self._cache, of.device, attention_backend)
        # No slot is both read and written in a step, so that two of them take turns.
        self._states = make_states(shape.layers, 3, shape.dtype, of.device)
        self._state_slots = ZERO_SLOT, 1
        self._num_computed = 0

    def step(
        self,
        token_ids: torch.Tensor,
        hidden_states: torch.Tensor | None,
        experts: ExpertClient | None,
        resident: ResidentExperts | None = None,
        deferral: Deferral | None = None,
    ) -> torch.Tensor:
        """Computes the next tokens, those after the tokens of earlier calls; see `LoadedStage.forward`."""
        stage, inputs = self._stage, self._next_inputs(token_ids)
        self._attention.plan(inputs)
        stage.hand_over.hidden_states = hidden_states
        context = ForwardContext(
            inputs,
            self._cache,
            self._attention,
            experts,
            resident=resident,
            states=self._states,
            deferral=deferral,
        )
        answer = stage.model(context)
        if deferral is not None:
            # The next stage has other experts in memory.
            deferral.settle()
        if stage.model.parallel.is_last_stage:
            normed: torch.Tensor = answer
            return normed
        assert stage.hand_over.hidden_states is not None
        return stage.hand_over.hidden_states

    def _next_inputs(self, token_ids: torch.Tensor) -> ForwardInputs:
        """Returns a step of the next tokens int64 `[T]`, whose keys and values follow in pages 1, 2, ..."""
        device, earlier, tokens = self._stage.of.device, self._num_computed, token_ids.shape[0]
        self._num_computed = end = earlier + tokens
        page_size = self._cache.page_size
        positions = torch.arange(earlier, end, device=device)
        inputs = ForwardInputs(
            input_ids=token_ids.to(device),
            positions=positions,
            slot_mapping=positions + page_size,
            block_table=torch.arange(1, 1 + -(-end // page_size), dtype=torch.int32, device=device)[None],
            query_start_loc=[0, tokens],
            seq_lens=[end],
            logits_indices=positions - earlier,
            query_start_loc_tensor=torch.tensor([0, tokens], dtype=torch.int32, device=device),
            seq_lens_tensor=torch.tensor([end], dtype=torch.int32, device=device),
        )
        if self._states is None:
            return inputs
        read, written = self._state_slots
        self._state_slots = written, 3 - written
        return replace(
            inputs,
            state_reads=torch.tensor([read], device=device),
            state_writes=torch.tensor([written], device=device),
        )


def _most_stages(config: ModelConfig) -> int:
    """A layer each, or more where layers depend on what an earlier one chose."""
    for count in range(config.num_layers, 1, -1):
        try:
            check_divisible(config, ParallelContext(num_stages=count))
        except ConfigError:
            continue
        return count
    return 1


@dataclass(frozen=True)
class Routed:
    """What a router chose, and what its experts are given; filled by `watching`."""

    hidden_states: torch.Tensor  # [T, MoeGeometry.hidden_size]
    topk_ids: torch.Tensor  # int32 [T, K]
    topk_weights: torch.Tensor  # float32 [T, K]


@contextmanager
def watching(
    stage: LoadedStage,
    on_routed: Callable[[int, Routed], None],
    on_layer: Callable[[int, torch.Tensor], None],
) -> Iterator[None]:
    """Within it both are called with the layer's index in the checkpoint.

    `on_routed` before the layer's experts are asked, `on_layer` with the sum `[T, H]` after it.
    """
    hooks = []
    layers: Any = stage.model.model.layers
    for layer, module in zip(stage.layers, layers, strict=True):
        hooks.append(module.register_forward_hook(_on_layer(layer, on_layer)))
        for part in module.modules():
            if isinstance(part, MoE):
                part.on_routed = _on_routed(layer, on_routed)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for part in layers.modules():
            if isinstance(part, MoE):
                part.on_routed = None


def _on_layer(layer: int, call: Callable[[int, torch.Tensor], None]) -> Callable[..., None]:
    def hook(module: nn.Module, given: tuple[Any, ...], stream: Any) -> None:
        call(layer, stream.sum().clone())

    return hook


def _on_routed(
    layer: int, call: Callable[[int, Routed], None]
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    return lambda rows, topk_ids, topk_weights: call(layer, Routed(rows, topk_ids, topk_weights))


def check_same_shape(ours: StagedModel, reference: StagedModel, top_k: int | None) -> None:
    """Raises UserError naming everything that differs, with both values."""
    mine, theirs = _shape(ours, top_k), _shape(reference, top_k)
    differing = [f"{key} {theirs[key]}, not {mine[key]}" for key in mine if mine[key] != theirs[key]]
    if differing:
        raise UserError(
            f"--against {reference.directory}: it has to be the same model in another format, but has "
            + "; ".join(differing)
        )


def _shape(model: StagedModel, top_k: int | None) -> Mapping[str, Any]:
    geometry = read_geometry(model.directory, top_k)
    return {
        "vocab_size": model.config.vocab_size,
        "num_layers": geometry.num_layers,
        "hidden_size": geometry.hidden_size,
        "moe_intermediate_size": geometry.moe_intermediate_size,
        "num_experts": geometry.num_experts,
        "top_k": geometry.top_k,
        "MoE layers": list(geometry.moe_layers),
    }
