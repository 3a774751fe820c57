"""The model as the settings have it served: what they change of a checkpoint, and ask for besides."""

from __future__ import annotations

import structlog

from moebius.checkpoint.errors import CheckpointError
from moebius.config import GpuConfig, MoebiusConfig
from moebius.errors import UserError, brief
from moebius.models.config import ModelConfig, ModelConfigError, ModelOverrides
from moebius.models.eagle3 import is_head
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry, read_model_config

_log = structlog.get_logger(__name__)


def with_drafts(config: MoebiusConfig) -> MoebiusConfig:
    """The same settings, `speculative_method` auto decided: what `speculative_model` is, where one is named;
    mtp where the checkpoint has layers of multi-token prediction that can be served, else off."""
    if config.gpu.speculative_method != "auto":
        return config
    if config.gpu.speculative_model:
        method = "eagle3" if is_head(config.gpu.speculative_model) else "draft_model"
    else:
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

    Raises ModelConfigError or CheckpointError, and UserError for a `speculative_model` that its method does
    not read, or lacks.
    """
    gpu = with_drafts(config).gpu
    chosen = config.model
    overrides = ModelOverrides(
        chosen.experts_per_token,
        chosen.max_model_len,
        chosen.dtype,
        chosen.language_model_only,
        gpu.mtp_heads,
        **_second_model(gpu),
    )
    return read_model_config(chosen.model, overrides)


def _second_model(gpu: GpuConfig) -> dict[str, str]:
    """Returns a field of `ModelOverrides`: what `speculative_model` is to the method."""
    method = gpu.speculative_method
    reads = {"draft_model": "eagle3" in method, "small_model": "draft_model" in method}
    if gpu.speculative_model and not any(reads.values()):
        raise UserError(
            f"speculative_model: {gpu.speculative_model!r} is not read by speculative_method {method}; "
            "allowed: speculative_method auto, draft_model, eagle3, ngram+draft_model or ngram+eagle3, or no "
            "such model"
        )
    if not gpu.speculative_model and any(reads.values()):
        raise UserError(
            f"speculative_method: {method} needs speculative_model, the directory of "
            f"{'an EAGLE-3 head' if reads['draft_model'] else 'a smaller model'} for this model, or its name "
            "on the hub"
        )
    return {field: gpu.speculative_model for field, is_read in reads.items() if is_read}


def read_served_geometry(config: MoebiusConfig) -> MoeGeometry:
    """Returns the geometry of its routed experts: what expert servers hold, and engines ask for.

    Raises ModelConfigError.
    """
    heads = with_drafts(config).gpu.mtp_heads
    return read_geometry(config.model.model, config.model.experts_per_token, heads)
