"""The model that drafts tokens for the one that is served: its bytes before it is loaded, and loading it."""

from __future__ import annotations

import torch

from gpu_service.core.parallel import SOLO
from gpu_service.device import TORCH_DTYPES
from gpu_service.experts.resident.make import make_resident_experts, resident_bytes
from gpu_service.loader.load import dense_form, load_weights, plan_weights
from gpu_service.models.compose import build_model
from gpu_service.speculation.draft_model import DraftModel
from moebius.config import MoebiusConfig, PlacementConfig
from moebius.models.config import ModelConfig
from moebius.models.geometry import MoeGeometry


def draft_model_bytes(config: MoebiusConfig, model: ModelConfig, device: torch.device) -> int:
    """Returns the bytes of its weights on a rank's device, from headers alone; 0: there is none.

    Raises as `load_draft_model`.
    """
    small = model.small_model
    if small is None:
        return 0
    own = _settings(config, small.directory)
    held = plan_weights(own.model, small.config, SOLO, device).device_bytes
    if not small.config.moe_layer_ids:
        return held
    dtype = TORCH_DTYPES[small.config.dtype]
    return held + resident_bytes(own, MoeGeometry.of(small.config), dtype)


def load_draft_model(config: MoebiusConfig, model: ModelConfig, device: torch.device) -> DraftModel | None:
    """Returns it whole, its routed experts on the device, on every rank; None: there is none.

    Raises CheckpointError naming tensors, UserError for experts that can not be kept as settings say.
    """
    small = model.small_model
    if small is None:
        return None
    own = _settings(config, small.directory)
    loaded = build_model(small.config, device=device)
    load_weights(loaded, small.directory, dense_form(own.model, device))
    if not small.config.moe_layer_ids:
        return DraftModel(loaded, None)
    geometry, dtype = MoeGeometry.of(small.config), TORCH_DTYPES[small.config.dtype]
    return DraftModel(loaded, make_resident_experts(own, geometry, device, dtype))


def _settings(config: MoebiusConfig, directory: str) -> MoebiusConfig:
    """Returns the settings as they are for a model of this directory, all of whose experts are resident."""
    model = config.model.model_copy(update={"model": directory, "expert_checkpoint": ""})
    return config.model_copy(update={"model": model, "placement": PlacementConfig(gpu_experts_ratio=1.0)})
