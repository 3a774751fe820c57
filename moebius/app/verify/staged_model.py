"""A model's dense part, one pipeline stage after another in the same process: only one is in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpu_service.assembly.kv_memory import cache_shape
from gpu_service.attention.registry import make_attention
from gpu_service.cache.state_cache import make_states
from gpu_service.engine.step import ForwardContext
from gpu_service.experts.client import ExpertClient
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.loader.load import load_weights
from gpu_service.memory.plan import StepSize
from gpu_service.memory.profile import profile_inputs, with_dummy_states
from gpu_service.model_config import ModelConfig, ModelOverrides
from gpu_service.models.common import CausalLM
from gpu_service.models.registry import build_model
from gpu_service.parallel.context import ParallelContext, SoloCollectives
from gpu_service.parallel.partition import check_divisible, stage_layers
from moebius.config import GpuConfig, MoebiusConfig
from moebius.errors import ConfigError


class _HandOver(SoloCollectives):
    """Where a stage leaves its hidden states, and where the next one finds them."""

    def __init__(self) -> None:
        self.hidden_states: torch.Tensor | None = None

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """See the base class; a copy."""
        self.hidden_states = tensor.clone()

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """See the base class."""
        assert self.hidden_states is not None
        return tensor.copy_(self.hidden_states)


@dataclass(frozen=True)
class StagedModel:
    """Filled by `open`."""

    directory: Path
    config: ModelConfig
    gpu: GpuConfig
    device: torch.device
    # As many as can be: mostly one layer each.
    num_stages: int

    @staticmethod
    def open(config: MoebiusConfig, directory: Path, device: torch.device) -> StagedModel:
        """Reads config.json only, with the settings of `config`. Raises ModelConfigError."""
        chosen = config.model
        overrides = ModelOverrides(chosen.top_k, chosen.max_model_len, chosen.dtype, language_model_only=True)
        model = ModelConfig.from_dir(directory, overrides)
        return StagedModel(directory, model, config.gpu, device, _most_stages(model))

    def layers(self, stage: int) -> range:
        """Decoder layers of a stage, by their index in the checkpoint."""
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
    ) -> torch.Tensor:
        """From the hidden states `[T, H]` of the stage before (None: the first) to those behind this one.

        `token_ids` int64 `[T]` are one request's. Behind the last stage: after the final norm.
        """
        shape = cache_shape(self.of.gpu, self.model.rank_config, self.of.device)
        tokens = token_ids.shape[0]
        cache = shape.make(1 + -(-tokens // shape.page_size))
        attention = make_attention(shape.config, cache, self.of.device, self.of.gpu.attention_backend)
        step = profile_inputs(StepSize(tokens, tokens), cache, self.of.config.vocab_size)
        inputs = replace(step, input_ids=token_ids.to(self.of.device))
        states = make_states(shape.config, 2, shape.dtype, self.of.device)
        if states is not None:
            inputs = with_dummy_states(inputs, states)
        attention.plan(inputs)
        self.hand_over.hidden_states = hidden_states
        context = ForwardContext(inputs, cache, attention, experts, resident=resident, states=states)
        answer = self.model(context)
        if self.model.parallel.is_last_stage:
            normed: torch.Tensor = answer
            return normed
        assert self.hand_over.hidden_states is not None
        return self.hand_over.hidden_states


def _most_stages(config: ModelConfig) -> int:
    """A layer each, or more where layers depend on what an earlier one chose."""
    for count in range(config.num_layers, 1, -1):
        try:
            check_divisible(config, ParallelContext(num_stages=count))
        except ConfigError:
            continue
        return count
    return 1
