"""What the engine's ranks have in RAM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.planning.capacity import KvPool
from app.planning.hardware import Hardware
from app.planning.memory import ENGINE_BYTES, GPU_ENGINE_BYTES, RAM, Component, Residency
from app.planning.prefixes import prefix_bytes
from app.planning.tables import tables_part

if TYPE_CHECKING:
    from app.planning.planner import Planner


def engine_parts(planner: Planner, hardware: Hardware, residency: Residency, kv: KvPool) -> list[Component]:
    """Returns the parts of all ranks; on a CPU their weights and caches are RAM, too."""
    config, engine = planner.config, list[Component]()
    for rank in planner.forecast.ranks:
        of = f"engine {rank.rank}: " if len(planner.forecast.ranks) > 1 else "engine: "
        if not planner.on_gpu:
            held = planner.held(rank.rank, residency)
            parts = {
                "dense weights": rank.dense_bytes - rank.table_bytes,
                "dense weights packed as float32": 0 if hardware.multiplies_bfloat16 else rank.widened_bytes,
                "packed head": rank.packed_head_bytes,
                "draft model": rank.drafting_bytes,
                "vision tower": planner.forecast.vision_bytes,
                "resident experts": held.count * held.bytes_each,
                "KV cache": kv.pages * rank.page_bytes,
                "states of requests": rank.state_bytes,
                "activations": rank.activation_bytes,
            }
            engine += [Component(RAM, of + name, size) for name, size in parts.items() if size]
        others = {tables_part(config): rank.table_bytes, "evicted prefixes": prefix_bytes(config)}
        engine += [Component(RAM, of + name, size) for name, size in others.items() if size]
        process = GPU_ENGINE_BYTES if planner.on_gpu else ENGINE_BYTES
        engine.append(Component(RAM, of + "process", process))
        engine.append(Component(RAM, of + "a tensor while loading", rank.largest_tensor_bytes))
    return engine
