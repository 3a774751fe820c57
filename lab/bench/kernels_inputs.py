"""What `moebius bench kernels` measures with: shapes, a working set beyond the caches, routing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from moebius.errors import UserError
from moebius.kernels import Isa, supported_isas


@dataclass(frozen=True)
class ExpertShape:
    """The routed experts of one layer; filled by `parse_shape`."""

    name: str
    hidden_size: int
    # Rows of gate and up.
    intermediate_size: int
    num_experts: int
    top_k: int

    def operations(self, pairs: int) -> int:
        """Returns multiplications and additions when `pairs` (row, expert) pairs are computed: gate, up and
        down.
        """
        return 2 * 3 * self.hidden_size * self.intermediate_size * pairs


SHAPES = {
    shape.name: shape
    for shape in (
        ExpertShape("qwen3-30b-a3b", 2048, 768, 128, 8),
        ExpertShape("qwen3-next-80b", 2048, 512, 512, 10),
        ExpertShape("glm-4.7", 5120, 1536, 160, 8),
        ExpertShape("deepseek-v3", 7168, 2048, 256, 8),
        ExpertShape("minimax-m2", 3072, 1536, 256, 8),
    )
}


def parse_shape(text: str) -> ExpertShape:
    """Returns a shape by its name, or HxIxExK: hidden size, intermediate size, experts, experts per row.

    Raises:
        UserError: neither of the two, or more experts per row than there are.
    """
    if text in SHAPES:
        return SHAPES[text]
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise UserError(
            f"--shape: {text!r} is not allowed; allowed: {', '.join(SHAPES)}, or HxIxExK with hidden size, "
            "intermediate size, experts and experts per row, e.g. 2048x768x128x8"
        )
    hidden_size, intermediate_size, num_experts, top_k = map(int, text.split("x"))
    if top_k > num_experts:
        raise UserError(
            f"--shape: {text!r} has {top_k} experts per row of {num_experts}; it cannot exceed them"
        )
    return ExpertShape(text, hidden_size, intermediate_size, num_experts, top_k)


def parse_shapes(text: str) -> list[ExpertShape]:
    """Returns comma-separated shapes, or "all" for every named one. Raises UserError."""
    return list(SHAPES.values()) if text == "all" else [parse_shape(part) for part in text.split(",")]


def parse_isa(text: str) -> Isa:
    """A level that this machine can run, or "auto". Raises UserError."""
    allowed = ("auto", *supported_isas())
    if text not in allowed:
        raise UserError(f"--isa: {text!r} is not allowed here; allowed: {', '.join(allowed)}")
    return cast(Isa, text)


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
        """Returns what a reader of the figures has to know; empty when nothing."""
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
    """All experts that fit, and enough layers that CACHES last-level caches could not hold them.

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


@dataclass(frozen=True)
class Routing:
    """One call's choice; filled by `uniform` and `exact`."""

    topk_ids: NDArray[np.int32]  # [rows, top_k] int32; -1 chooses nothing.
    topk_weights: NDArray[np.float32]  # [rows, top_k] float32, each row's sum is 1.
    distinct_experts: int  # Experts that at least one row chose.
    pairs: int  # (row, expert) pairs to compute.

    @property
    def rows(self) -> int:
        return len(self.topk_ids)


def uniform(rows: int, num_experts: int, top_k: int, random: np.random.Generator) -> Routing:
    """Every row chooses `top_k` distinct experts, all equally likely, independently of other rows."""
    keys = random.random((rows, num_experts), dtype=np.float32)
    ids = (
        np.argpartition(keys, top_k - 1, axis=1)[:, :top_k]
        if top_k < num_experts
        else np.argsort(keys, axis=1)
    )
    return _routing(ids.astype(np.int32), random)


def exact(rows_per_expert: int, num_experts: int, top_k: int, random: np.random.Generator) -> Routing:
    """Returns as many rows as give each expert exactly `rows_per_expert` of them, `top_k` distinct experts a
    row.

    Experts are dealt out in turn, so two of one row never meet; where the last row would have too many, it
    chooses fewer.
    """
    pairs = rows_per_expert * num_experts
    rows = -(-pairs // top_k)
    dealt = np.full(rows * top_k, -1, dtype=np.int32)
    dealt[:pairs] = np.tile(random.permutation(num_experts).astype(np.int32), rows_per_expert)
    return _routing(random.permutation(dealt.reshape(rows, top_k), axis=0), random)


def _routing(ids: NDArray[np.int32], random: np.random.Generator) -> Routing:
    weights = random.random(ids.shape, dtype=np.float32) + np.float32(0.1)
    weights /= weights.sum(axis=1, keepdims=True)
    chosen = ids[ids >= 0]
    return Routing(np.ascontiguousarray(ids), weights, len(np.unique(chosen)), len(chosen))
