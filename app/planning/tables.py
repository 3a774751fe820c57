"""Where a plan has tables of n-grams: in RAM, or on disk where RAM has no room for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.planning.hardware import Hardware
from app.planning.memory import RAM, Residency, total_bytes
from moebius.checkpoint.errors import CheckpointError
from moebius.config import MoebiusConfig

if TYPE_CHECKING:
    from app.planning.planner import Planner


def tables_part(config: MoebiusConfig) -> str:
    """Returns the name of what tables take of RAM."""
    return "kept rows of n-grams" if config.model.embedding_tables == "disk" else "table of n-grams"


def with_tables(planner: Planner, hardware: Hardware, residency: Residency) -> Planner:
    """Returns the planner with what `embedding_tables: auto` becomes; a GPU reads tables in RAM."""
    chosen = planner.config.model
    has_tables = any(rank.table_bytes for rank in planner.forecast.ranks)
    if planner.on_gpu or not has_tables or chosen.embedding_tables != "auto":
        return planner
    parts = planner.ram_parts(hardware, residency, planner.cpu_kv())
    fits = total_bytes(list(parts), RAM) <= hardware.ram_bytes

    def with_choice(choice: str) -> Planner:
        model = chosen.model_copy(update={"embedding_tables": choice})
        return planner.with_settings(planner.config.model_copy(update={"model": model}))

    if fits:
        return with_choice("ram")
    from gpu_service.assembly.forecast import Forecast

    other = with_choice("disk")
    try:
        other.forecast = Forecast(other.config, on_gpu=False)
    except CheckpointError:  # their rows do not lie in files one after the other
        return with_choice("ram")
    return other
