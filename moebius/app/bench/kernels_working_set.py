"""How many experts and layers a benchmark holds, so that memory and not a cache answers."""

from __future__ import annotations

from dataclasses import dataclass

from moebius.app.bench.kernels_shapes import ExpertShape
from moebius.errors import UserError

# With random routing, weights still cached from calls before are at most one part in this many.
CACHES = 16
MAX_LAYERS = 128


@dataclass(frozen=True)
class WorkingSet:
    """Filled by `plan_working_set`."""

    expert_bytes: int
    num_experts: int
    num_layers: int
    # The model's experts per layer; more than num_experts when they do not fit the memory.
    model_experts: int
    cache_bytes: int

    @property
    def nbytes(self) -> int:
        return self.expert_bytes * self.num_experts * self.num_layers

    @property
    def cached_share(self) -> float:
        """The largest share of touched weights that a cache can still hold from earlier calls."""
        return min(1.0, self.cache_bytes / self.nbytes)

    @property
    def note(self) -> str:
        """What a reader of the figures has to know; empty when nothing."""
        notes = []
        if self.num_experts != self.model_experts:
            notes.append(f"{self.num_experts} of {self.model_experts} experts")
        if self.cached_share > 1 / CACHES:
            notes.append(f"up to {self.cached_share:.0%} of the weights may come from the cache")
        return ", ".join(notes)


def plan_working_set(
    shape: ExpertShape,
    expert_bytes: int,
    cache_bytes: int,
    memory_bytes: int,
    experts: int = 0,
    layers: int = 0,
) -> WorkingSet:
    """All experts that fit, and so many layers that CACHES last-level caches could not hold them.

    Args:
        shape: the layer.
        expert_bytes: packed size of one expert.
        cache_bytes: size of the last-level caches.
        memory_bytes: what packed weights may take.
        experts: experts per layer; 0: those of the model, or as many as fit.
        layers: 0: as many as are needed and fit.

    Raises:
        UserError: not even twice the experts of one row fit, or more is asked for than fits.
    """
    fit = memory_bytes // expert_bytes
    smallest = min(2 * shape.top_k, shape.num_experts)
    wanted = min(experts or shape.num_experts, shape.num_experts)
    if experts and not shape.top_k <= experts <= shape.num_experts:
        raise UserError(
            f"--experts: {experts} is not allowed for {shape.name}; "
            f"allowed: {shape.top_k} to {shape.num_experts}"
        )
    count = wanted if experts else min(wanted, fit)
    if count * max(layers, 1) > fit or count < min(smallest, wanted):
        needed = max(count, min(smallest, wanted)) * max(layers, 1) * expert_bytes
        raise UserError(
            f"--memory: {shape.name} needs {needed / 2**30:.2f} GiB for {max(count, smallest)} experts in "
            f"{max(layers, 1)} layers, but {memory_bytes / 2**30:.2f} GiB are allowed"
        )
    needed_layers = -(-CACHES * cache_bytes // (count * expert_bytes))
    chosen = layers or max(1, min(needed_layers, fit // count, MAX_LAYERS))
    return WorkingSet(expert_bytes, count, chosen, shape.num_experts, cache_bytes)
