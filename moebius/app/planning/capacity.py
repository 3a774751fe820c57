"""The plan: every component's bytes, what is resident where, how many tokens fit, and how fast it will be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moebius.app.planning.components import Component, total_bytes
from moebius.app.planning.expert_bytes import StoredExperts, packed_expert, packed_formats
from moebius.app.planning.hardware import Hardware
from moebius.app.planning.residency import Residency
from moebius.app.planning.speed import Speed
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.config import MoebiusConfig

MEASURED_HERE, ASSUMED = "measured on this host", "assumed"
DEFAULT_CONTEXT = 8192
# Kept for KV where nobody says how many streams are wanted.
DEFAULT_CONCURRENCY = 4


@dataclass(frozen=True, slots=True)
class Wish:
    """What the KV cache shall hold; None: DEFAULT_…, as far as there is room. Filled by the command line."""

    context: int | None = None
    concurrency: int | None = None
    # Numbers of streams that decode speed is predicted for.
    streams: tuple[int, ...] = (1, 4, 16, 32)

    @property
    def is_demanded(self) -> bool:
        """Whether a plan that has no room for it is refused."""
        return self.context is not None or self.concurrency is not None

    def tokens(self, max_model_len: int) -> tuple[int, int]:
        """Context and concurrency, the first at most what the model allows."""
        context = self.context or min(DEFAULT_CONTEXT, max_model_len)
        return context, self.concurrency or (1 if self.context else DEFAULT_CONCURRENCY)


@dataclass(frozen=True, slots=True)
class KvPool:
    """Of every rank alike; bytes over all layers of the rank that has least room."""

    pages: int
    page_size: int
    token_bytes: float

    @property
    def tokens(self) -> int:
        """That fit; one page is the dummy."""
        return max(0, self.pages - 1) * self.page_size


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Filled by `Planner.plan`."""

    model: str
    model_type: str
    # What the plan is for: settings that decide it, by name.
    settings: Mapping[str, str]
    hardware: Hardware
    components: tuple[Component, ...]
    # Place -> bytes that may be planned with there.
    budgets: Mapping[str, int]
    residency: Residency
    kv: KvPool
    # Where the times of expert kernels are from: MEASURED_HERE or ASSUMED.
    expert_kernels: str
    # Tokens of each stream that speeds are predicted for.
    context: int
    decode: tuple[Speed, ...]
    prefill: Speed
    # What the reader has to know: what is assumed, what was not read.
    notes: tuple[str, ...]

    @property
    def total(self) -> int:
        """Of all components in all places."""
        return sum(part.nbytes for part in self.components)

    def total_of(self, place: str) -> int:
        """Of the components in one place."""
        return total_bytes(self.components, place)

    @property
    def places(self) -> tuple[str, ...]:
        """GPUs by rank, then RAM."""
        return tuple(dict.fromkeys(part.place for part in self.components))

    @property
    def serve_flags(self) -> str:
        """Options that let `moebius serve` do what was planned, beside those that were given."""
        ranks = self.settings["tensor_parallel_size"]
        parts = [f"--tensor-parallel-size {ranks}"] if ranks != "1" else []
        return " ".join([*parts, self.residency.flags]).strip()


def expert_format(
    config: MoebiusConfig, geometry: MoeGeometry, stored: Mapping[int, StoredExperts]
) -> tuple[tuple[str, str] | None, float]:
    """Packed formats (gate and up, down) of most layers, and mean bytes of a packed expert."""
    dtype, inner = config.experts.expert_dtype, geometry.moe_intermediate_size
    if not stored:
        return None, 0.0
    formats = [packed_formats(layer, dtype) for layer in stored.values()]
    sizes = [
        packed_expert(layer, geometry.hidden_size, inner, dtype).expert_bytes for layer in stored.values()
    ]
    return max(set(formats), key=formats.count), math.fsum(sizes) / len(sizes)
