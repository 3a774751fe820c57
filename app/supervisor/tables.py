"""Where tables of n-grams of a model that `serve` starts are: in RAM beside packed experts, or on disk."""

from __future__ import annotations

from app.supervisor.placement import find_gpus, runs_on_gpus
from app.supervisor.shortages import missing_bytes
from moebius.config import MoebiusConfig
from moebius.models.geometry import MoeGeometry
from moebius.models.served import read_served_model
from moebius.models.weights import has_tables
from moebius.process.limits import available_memory


def with_tables(config: MoebiusConfig, given: MoebiusConfig, model: MoeGeometry) -> MoebiusConfig:
    """Returns the settings with what `embedding_tables: auto` becomes: only here is known what expert servers
    will take beside an engine. Arguments as of `shortages.needs_of`.
    """
    if config.model.embedding_tables != "auto" or not has_tables(read_served_model(config)):
        return config
    import torch  # here: most models have no tables

    from gpu_service.assembly import tables
    from gpu_service.core.parallel import ParallelContext

    ranks = [ParallelContext.place(config.parallel, rank) for rank in range(config.parallel.num_ranks)]
    device = torch.device("meta" if runs_on_gpus(config, find_gpus()) else "cpu")
    free = available_memory() - missing_bytes(given, config, model)
    return tables.with_tables(config, read_served_model(config), ranks, device, free)
