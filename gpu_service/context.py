"""What a forward pass may touch besides weights and activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gpu_service.attention.base import AttentionBackend
from gpu_service.batch import ForwardInputs
from gpu_service.cache.kv_cache import KVCache

if TYPE_CHECKING:
    from gpu_service.experts.client import ExpertClient


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Filled by the engine, once per step, after `attention.plan(inputs)`."""

    inputs: ForwardInputs
    kv_cache: KVCache
    attention: AttentionBackend
    # None only for models without MoE layers.
    experts: ExpertClient | None
    # bool [T]: False for rows that only pad a batch to the size of a captured graph; they choose no experts.
    # None: all rows are a request's.
    valid_rows: torch.Tensor | None = None
