"""Whether a checkpoint has every tensor that services read, before a plan is made of its headers."""

from __future__ import annotations

from moebius.checkpoint.index import has_weights
from moebius.config import MoebiusConfig
from moebius.models.served import read_served_geometry, read_served_model


def refuse_incomplete(config: MoebiusConfig) -> None:
    """Checks what services prove of their tensors before they read one, in their words, where there are any.

    Raises CheckpointError or ModelConfigError.
    """
    directory = config.model.model
    if not has_weights(directory):
        return
    from expert_service.loader import plan_load
    from gpu_service.loader.load import check_weights

    geometry = read_served_geometry(config)
    if geometry.moe_layers:
        experts = config.model.expert_checkpoint
        plan_load(geometry, directory, config.experts.expert_dtype, experts)
    check_weights(read_served_model(config), directory)
