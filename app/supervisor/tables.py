"""Where tables of n-grams of a model that `serve` starts are: in RAM beside packed experts, or on disk."""

from __future__ import annotations

from pathlib import Path

from app.supervisor.placement import find_gpus, runs_on_gpus
from app.supervisor.shortages import needs_of
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.kernels.weight_segment import segment_path
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
    free = available_memory() - _others_bytes(given, config, model)
    return tables.with_tables(config, read_served_model(config), ranks, device, free)


def _others_bytes(given: MoebiusConfig, config: MoebiusConfig, model: MoeGeometry) -> int:
    """Returns the RAM that will be taken beside engines: by packed experts that are not there yet, evicted
    prefixes and mailboxes; 0 where experts cannot be packed, which their server refuses.
    """
    try:
        needs = needs_of(given, config, model)
    except (UserError, ValueError):
        return 0
    missing = sum(
        max(0, nbytes - _size(Path(segment_path(config.experts.expert_weights_dir, index))))
        for index, nbytes in enumerate(needs.segments)
    )
    return missing + needs.prefixes + needs.mailbox


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
