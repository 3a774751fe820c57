"""What experts that are streamed and fetched take of a GPU's memory: their ring, and their slots."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from app.planning.hardware import Hardware
from app.planning.memory import Residency, num_servers, packed_formats
from moebius.config import MoebiusConfig
from moebius.errors import UserError

if TYPE_CHECKING:
    from app.planning.planner import Planner


def steps_fetch(config: MoebiusConfig) -> bool:
    """Returns whether an engine on GPUs whose memory has room for it copies experts in decode steps."""
    from gpu_service.experts.fetching.make import fetches

    is_streaming = config.gpu.prefill_experts != "cpu" and config.experts.expert_transport == "mailbox"
    return is_streaming and fetches(config, "cuda")


def ring_bytes(planner: Planner, rank: int, residency: Residency, hardware: Hardware) -> tuple[int, int]:
    """Returns the bytes of a rank's ring, and of slots that its decode steps fetch to.

    Raises UserError for a division of experts that cannot be, and for a ring that is too small.
    """
    from gpu_service.experts.fetching.make import plan_fetching
    from gpu_service.experts.streaming.make import StoredFormats, ring_of, served_parts

    passed = planner.geometry.passed_layers
    layers = [layer for layer in planner.forecast.ranks[rank].moe_layers if layer in passed]
    dtype = planner.config.experts.expert_dtype
    stored = {
        layer: StoredFormats(*packed_formats(planner.stored[layer], dtype), planner.stored[layer].has_bias)
        for layer in layers
    }
    group = math.lcm(*(found.group for found in planner.stored.values()))
    resident = {layer: range(len(residency.resident[layer])) for layer in layers}
    # As the servers that will be started divide them.
    count = num_servers(planner.config, hardware.sockets)
    experts = planner.config.experts.model_copy(update={"split_count": count})
    divided = planner.config.model_copy(update={"experts": experts})
    try:
        parts = served_parts(divided, planner.geometry, stored, group, resident)
    except ValueError as error:
        raise UserError(str(error)) from error
    memory = hardware.rank_bytes(len(planner.forecast.ranks))[rank]
    layout = ring_of(parts, planner.config.parallel.tensor_parallel_size, memory)
    if layout is None:
        return 0, 0
    fetch = plan_fetching(divided, planner.geometry, parts, "cuda", memory)
    return layout.nbytes, 0 if fetch is None else fetch.nbytes
