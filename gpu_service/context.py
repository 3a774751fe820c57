"""What a forward pass may touch besides weights and activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_service.cache.kv_cache import PagedCache
from gpu_service.cache.state_cache import StateCache
from gpu_service.engine.step import ForwardInputs

if TYPE_CHECKING:
    from gpu_service.attention.registry import Attention
    from gpu_service.expert_recorder import ExpertRecorder
    from gpu_service.experts.client import ExpertClient
    from gpu_service.experts.resident.experts import ResidentExperts


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Filled by the engine, once per step, after `attention.plan(inputs)`."""

    inputs: ForwardInputs
    kv_cache: PagedCache
    attention: Attention
    # None for models without MoE layers, and where every expert is resident.
    experts: ExpertClient | None
    # Experts whose weights are on this device; None: there are none.
    resident: ResidentExperts | None = None
    # None: nothing can be recorded of routing.
    recorder: ExpertRecorder | None = None
    # None: the model has no linear attention.
    states: StateCache | None = None
