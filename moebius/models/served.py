"""The model as the settings have it served: what they change of a checkpoint, and ask for besides."""

from __future__ import annotations

from moebius.checkpoint.errors import CheckpointError
from moebius.config import GpuConfig, MoebiusConfig
from moebius.errors import UserError, brief
from moebius.models.config import ModelConfig, ModelConfigError, ModelOverrides
from moebius.models.eagle3 import is_head
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry, read_model_config


def with_method(config: MoebiusConfig, method: str) -> MoebiusConfig:
    """Returns the same settings with another `speculative_method`."""
    return config.model_copy(update={"gpu": config.gpu.model_copy(update={"speculative_method": method})})


def with_dense_form(config: MoebiusConfig, form: str) -> MoebiusConfig:
    """Returns the same settings with other `dense_weights`."""
    return config.model_copy(update={"model": config.model.model_copy(update={"dense_weights": form})})


def with_drafts(config: MoebiusConfig) -> MoebiusConfig:
    """Returns the same settings, `speculative_method` auto decided without a look at memory: what
    `speculative_model` is, where one is named, else off.

    Layers of multi-token prediction take memory of engine and expert servers, so `auto` has them only where
    both are planned together (`app.planning.drafts`), which leaves `mtp` or `off` in the settings.
    """
    if config.gpu.speculative_method != "auto":
        return config
    if config.gpu.speculative_model:
        return with_method(config, "eagle3" if is_head(config.gpu.speculative_model) else "draft_model")
    return with_method(config, "off")


def with_own_layers(config: MoebiusConfig) -> tuple[MoebiusConfig | None, str]:
    """Returns the settings in which `speculative_method` auto is mtp, and why they cannot be served; None:
    nothing is to be decided, or the model has no such layers.

    By configuration and names of tensors; whether there is memory for them is not asked.
    """
    gpu = config.gpu
    if gpu.speculative_method != "auto" or gpu.speculative_model or not _promises_layers(config):
        return None, ""
    drafting = with_method(config, "mtp")
    if config.parallel.pipeline_parallel_size > 1:
        return drafting, "pipeline stages do not draft"
    if config.experts.expert_addresses:
        return drafting, "expert servers that others start may not hold the layers' experts"
    try:
        read_served_model(drafting)
    except (ModelConfigError, CheckpointError) as error:
        return drafting, brief(error)
    return drafting, ""


def _promises_layers(config: MoebiusConfig) -> bool:
    try:
        model = read_served_model(with_method(config, "off"))
    except (ModelConfigError, CheckpointError, UserError):
        return False  # Whatever is wrong, reading the model without its layers says.
    return model.num_mtp_layers > 0


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
