"""The model as the settings have it served: what they change of a checkpoint, and ask for besides."""

from __future__ import annotations

from moebius.config import MoebiusConfig
from moebius.models.config import ModelConfig, ModelOverrides
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry, read_model_config


def read_served_model(config: MoebiusConfig) -> ModelConfig:
    """Returns the configuration of the model, as an engine of these settings reads it.

    Raises ModelConfigError or CheckpointError.
    """
    chosen = config.model
    overrides = ModelOverrides(
        chosen.experts_per_token,
        chosen.max_model_len,
        chosen.dtype,
        chosen.language_model_only,
        config.gpu.mtp_heads,
    )
    return read_model_config(chosen.model, overrides)


def read_served_geometry(config: MoebiusConfig) -> MoeGeometry:
    """Returns the geometry of its routed experts: what expert servers hold, and engines ask for.

    Raises ModelConfigError.
    """
    return read_geometry(config.model.model, config.model.experts_per_token, config.gpu.mtp_heads)
