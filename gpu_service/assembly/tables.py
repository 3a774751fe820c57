"""Where tables of embeddings are: in RAM, or in the checkpoint's files (`embedding_tables`)."""

from __future__ import annotations

import structlog
import torch

from gpu_service.core.parallel import ParallelContext
from gpu_service.loader.load import plan_weights
from moebius.checkpoint.errors import CheckpointError
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.models.config import ModelConfig
from moebius.models.weights import has_tables

_log = structlog.get_logger(__name__)
_GIB = 2**30


def with_tables(
    config: MoebiusConfig,
    model: ModelConfig,
    ranks: list[ParallelContext],
    device: torch.device,
    free_bytes: int,
) -> MoebiusConfig:
    """Returns the settings with what `embedding_tables: auto` becomes for these ranks of one host.

    `free_bytes`: of RAM, for all that the ranks hold. Raises UserError for tables on disk beside a GPU.
    """
    chosen = config.model.embedding_tables
    if chosen == "ram" or not has_tables(model):
        return config
    if device.type != "cpu":
        if chosen == "disk":
            raise UserError("embedding_tables: disk is for engines on a CPU; allowed beside a GPU: auto, ram")
        return _with(config, "ram")
    if chosen == "disk":
        return config
    in_ram, on_disk = _with(config, "ram"), _with(config, "disk")
    held = [plan_weights(in_ram.model, model, rank, device) for rank in ranks]
    tables = sum(rank.table_bytes for rank in held)
    others = sum(rank.device_bytes for rank in held) - tables + _cache_bytes(config)
    if tables + others <= free_bytes:
        return in_ram
    sizes = {"tables_gib": round(tables / _GIB, 2), "room_gib": round((free_bytes - others) / _GIB, 2)}
    try:
        for rank in ranks:
            plan_weights(on_disk.model, model, rank, device)
    except CheckpointError as error:
        _log.warning("tables of n-grams are larger than RAM has room for", **sizes, error=str(error))
        return in_ram
    _log.info("tables of n-grams stay on disk: RAM has no room for them (embedding_tables)", **sizes)
    return on_disk


def _cache_bytes(config: MoebiusConfig) -> int:
    """Returns about the bytes of the KV cache on a CPU."""
    gib = config.gpu.kv_cache_gib
    return int((1.0 if gib is None else gib) * _GIB)


def _with(config: MoebiusConfig, chosen: str) -> MoebiusConfig:
    model = config.model.model_copy(update={"embedding_tables": chosen})
    return config.model_copy(update={"model": model})
