"""The model as the settings have it served: what they change of a checkpoint, and ask for besides."""

from __future__ import annotations

import structlog

from moebius.checkpoint.errors import CheckpointError
from moebius.config import MoebiusConfig
from moebius.errors import UserError, brief
from moebius.models.config import ModelConfig, ModelConfigError, ModelOverrides
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry, read_model_config

_log = structlog.get_logger(__name__)


def with_drafts(config: MoebiusConfig) -> MoebiusConfig:
    """The same settings, `speculative_method` auto decided: mtp where the checkpoint has layers of
    multi-token prediction that can be served, else off."""
    if config.gpu.speculative_method != "auto":
        return config
    method = "mtp" if _has_heads(config) else "off"
    return config.model_copy(update={"gpu": config.gpu.model_copy(update={"speculative_method": method})})


def _has_heads(config: MoebiusConfig) -> bool:
    if config.parallel.pipeline_parallel_size > 1:
        return False
    try:
        read_geometry(config.model.model, config.model.experts_per_token, mtp_heads=1)
    except (ModelConfigError, CheckpointError) as error:
        # Whatever else may be wrong, reading the model without its heads says.
        _log.info("speculative_method auto: no draft tokens", reason=brief(error))
        return False
    return True


def read_served_model(config: MoebiusConfig) -> ModelConfig:
    """Returns the configuration of the model, as an engine of these settings reads it.

    Raises ModelConfigError or CheckpointError, and UserError for a head without its method or without a head.
    """
    chosen = config.model
    overrides = ModelOverrides(
        chosen.experts_per_token,
        chosen.max_model_len,
        chosen.dtype,
        chosen.language_model_only,
        with_drafts(config).gpu.mtp_heads,
        _draft_model(config),
    )
    return read_model_config(chosen.model, overrides)


def _draft_model(config: MoebiusConfig) -> str:
    gpu = config.gpu
    needs_head = "eagle3" in gpu.speculative_method
    if gpu.speculative_model and not needs_head:
        raise UserError(
            f"speculative_model: {gpu.speculative_model!r} is not read by speculative_method "
            f"{gpu.speculative_method}; allowed: speculative_method eagle3 or ngram+eagle3, or no such model"
        )
    if needs_head and not gpu.speculative_model:
        raise UserError(
            f"speculative_method: {gpu.speculative_method} needs speculative_model, the directory of an "
            "EAGLE-3 head for this model, or its name on the hub"
        )
    return gpu.speculative_model


def read_served_geometry(config: MoebiusConfig) -> MoeGeometry:
    """Returns the geometry of its routed experts: what expert servers hold, and engines ask for.

    Raises ModelConfigError.
    """
    heads = with_drafts(config).gpu.mtp_heads
    return read_geometry(config.model.model, config.model.experts_per_token, heads)
