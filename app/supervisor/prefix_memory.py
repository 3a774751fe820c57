"""RAM for prefixes of engines that run on this host, where `kv_offload_gib` is auto."""

from __future__ import annotations

import structlog

from app.planning.prefixes import with_prefix_room
from app.supervisor.placement import find_gpus, runs_on_gpus
from app.supervisor.shortages import missing_bytes
from moebius.config import MoebiusConfig
from moebius.models.geometry import MoeGeometry
from moebius.models.served import read_served_geometry
from moebius.process.limits import available_memory

_log = structlog.get_logger(__name__)


def with_prefix_memory(config: MoebiusConfig, given: MoebiusConfig, model: MoeGeometry) -> MoebiusConfig:
    """Returns the settings with what `kv_offload_gib` auto becomes, from the memory that is free before
    experts are loaded. Arguments as of `shortages.needs_of`.
    """
    if config.gpu.kv_offload_gib != "auto":
        return config
    on_gpu = runs_on_gpus(config, find_gpus()) and config.gpu.prefix_caching
    free = available_memory() if on_gpu else 0
    # Each host has an equal part of them.
    experts = missing_bytes(given, config, model) // config.parallel.rank_hosts if on_gpu else 0
    config = with_prefix_room(config, on_gpu, free, experts)
    if on_gpu:
        _log.info(
            "RAM for prefixes is chosen by what is free beside experts",
            kv_offload_gib=config.gpu.kv_offload_gib,
            free_gib=round(free / 2**30, 1),
            experts_gib=round(experts / 2**30, 1),
        )
    return config


def with_prefix_memory_of_engine(config: MoebiusConfig) -> MoebiusConfig:
    """Returns the same for an engine, or ranks of it, whose expert servers others start on this host, where a
    mailbox is; others are elsewhere.

    Raises CheckpointError for a model that is not known.
    """
    if config.gpu.kv_offload_gib != "auto":
        return config
    experts = config.experts
    is_here = experts.expert_transport == "mailbox" and experts.mailbox
    update = {"expert_servers": experts.split_count if is_here else 0}
    planned = config.model_copy(update={"experts": experts.model_copy(update=update)})
    found = with_prefix_memory(planned, config, read_served_geometry(config))
    return config.model_copy(update={"gpu": found.gpu})
