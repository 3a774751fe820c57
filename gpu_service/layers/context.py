"""What the layers of a model are given in a step besides hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from gpu_service.attention.registry import Attention
from gpu_service.cache.kv_cache import PagedCache
from gpu_service.cache.state_cache import StateSlots
from gpu_service.core.step import ForwardInputs
from gpu_service.experts.choice_samples import ChoiceSamples
from gpu_service.experts.client import ExpertClient
from gpu_service.experts.recorder import ExpertRecorder
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.streaming.step import StreamedExperts
from gpu_service.layers.deferral import Deferral
from gpu_service.layers.table_files import TableRead


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
    # Experts of the servers that this step computes on the device; None: it streams none.
    streamed: StreamedExperts | None = None
    # None: nothing can be recorded of routing.
    recorder: ExpertRecorder | None = None
    # None: what rows choose is not sampled.
    samples: ChoiceSamples | None = None
    # None: the model has no linear attention.
    states: StateSlots | None = None
    # Of each row the first layer after which it was not finite, int32 [T], by the model. None: it is not
    # needed.
    first_overflow: Tensor | None = None
    # What is under way between two layers; None: every layer adds all that its experts answer.
    deferral: Deferral | None = None
    # The residual stream `[T, H]` at the beginning of each layer that a draft head reads, by the model.
    read_streams: list[Tensor] = field(default_factory=list)
    # Rows of tables that layers have begun to read at the step's begin, by module.
    begun_rows: dict[nn.Module, Tensor | TableRead] = field(default_factory=dict)
    # Called between layers, and wherever a layer's launch takes long: who launches the step has other work.
    between_layers: Callable[[], None] | None = None
