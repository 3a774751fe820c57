"""What follows the mixer in a layer: an MLP, or routed experts beside ones that are always active."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

from moebius.models.errors import ModelConfigError
from moebius.models.layers.norms import Norm
from moebius.models.layers.ranks import Cut, Even, Segments, even_shard
from moebius.models.layers.router import ExpertKindsConfig, RouterConfig
from moebius.models.layers.weights import Weight, Weights, fused, linear, matrix_elements, under

_MIXED_CHOICES = "whose router does not choose among experts with weights alone"


class FeedForward(ABC):
    """Base of frozen values; sizes are of the whole model, or of a rank after `on_rank`."""

    __slots__ = ()

    @property
    def late_refusal(self) -> str:
        """Returns why what experts answer can not be added a layer late; empty: it can."""
        return ""

    @abstractmethod
    def on_rank(self, rank: int, num_ranks: int) -> Self:
        """Returns the part of one of `num_ranks` tensor-parallel ranks."""

    @property
    @abstractmethod
    def intermediate_sizes(self) -> tuple[int, ...]:
        """Widths that ranks share."""

    @abstractmethod
    def row_bytes(self, activation_bytes: int) -> int:
        """Returns the bytes of one token that live at once, without products of experts."""

    @abstractmethod
    def weights(self, hidden_size: int) -> Weights:
        """Yields what checkpoints store of it, without routed experts, which servers hold; of the whole
        model's value, which ranks then cut.
        """

    def weight_elements(self, hidden_size: int) -> int:
        """Returns the number of elements of the matrices that a token meets, chosen experts' included."""
        return matrix_elements(self.weights(hidden_size))


def is_gated(activation: str) -> bool:
    """Returns whether an activation multiplies two projections of its input."""
    return activation != "relu2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense(FeedForward):
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` where the activation has no gate."""

    intermediate_size: int
    activation: str
    limit: float = math.inf  # Where gate and up are clamped; infinite: nowhere.
    alpha: float = 1.702  # The sigmoid's slope, where the activation has one.

    def on_rank(self, rank: int, num_ranks: int) -> Self:
        return replace(self, intermediate_size=even_shard(self.intermediate_size, rank, num_ranks).size)

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        return (self.intermediate_size,)

    def row_bytes(self, activation_bytes: int) -> int:
        return 3 * self.intermediate_size * activation_bytes

    @property
    def is_gated(self) -> bool:
        """Returns whether there are three matrices: gate, up and down, not only the last two."""
        return is_gated(self.activation)

    def weights(self, hidden_size: int, stores_fused: bool = False) -> Weights:
        """Yields what checkpoints store; `stores_fused`: gate and up as one matrix, one after the other."""
        size, cut = self.intermediate_size, Even(self.intermediate_size)
        names = ("gate_proj", "up_proj") if self.is_gated else ("up_proj",)
        parts: dict[str, tuple[int, Cut]] = dict.fromkeys(names, (size, cut))
        if stores_fused:
            parts = {"gate_up_proj": (2 * size, Segments((size, size), size))}
        yield from fused("gate_up_proj", hidden_size, parts)
        yield from linear("down_proj", hidden_size, size, cut=cut, axis=1)


@dataclass(frozen=True, slots=True)
class Experts:
    """What routed experts compute; an activation of kernels/gemm/gemm.h."""

    intermediate_size: int
    activation: str = "silu"
    alpha: float = 1.702  # The sigmoid's slope, and where gate and up are clamped, of those that have it.
    limit: float = 7.0
    has_bias: bool = False

    def matrices(self, input_size: int) -> dict[str, tuple[int, int]]:
        """Returns rows and columns of an expert's matrices; `input_size`: elements that it is given."""
        inner = (self.intermediate_size, input_size)
        gate = {"gate": inner} if is_gated(self.activation) else {}
        return gate | {"up": inner, "down": inner[::-1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed(FeedForward):
    """Base: a router, experts of which it chooses some, and the experts that are always active."""

    router: RouterConfig
    experts: Experts
    shared: Dense | None = None

    def on_rank(self, rank: int, num_ranks: int) -> Self:
        """Routed experts are divided by who holds them."""
        return replace(self, shared=None if self.shared is None else self.shared.on_rank(rank, num_ranks))

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        return () if self.shared is None else (self.shared.intermediate_size,)

    def row_bytes(self, activation_bytes: int) -> int:
        shared = 0 if self.shared is None else self.shared.row_bytes(activation_bytes)
        return shared + 3 * 4 * self.router.num_choices

    def weights(self, hidden_size: int) -> Weights:
        yield from under("gate", self.router.weights(hidden_size))
        if self.shared is not None:
            yield from under("shared_experts", self.shared.weights(hidden_size))

    def weight_elements(self, hidden_size: int) -> int:
        matrices = self.experts.matrices(self.expert_input_size(hidden_size)).values()
        chosen = self.router.top_k * sum(rows * columns for rows, columns in matrices)
        return matrix_elements(self.weights(hidden_size)) + chosen

    @property
    def late_refusal(self) -> str:
        return _MIXED_CHOICES if self.router.num_zero_experts else ""

    def expert_input_size(self, hidden_size: int) -> int:
        """Returns the number of elements that an expert is given of a token."""
        return hidden_size

    def with_top_k(self, top_k: int) -> Self:
        """Returns the same block where a token chooses `top_k` experts."""
        return replace(self, router=replace(self.router, top_k=top_k))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE(Routed):
    """Chosen and always active experts read the same and are added."""

    shared_gate: bool = False  # Whether the always active ones' sum is weighed by a sigmoid of its own.
    shared_fused: bool = False  # Whether the checkpoint stores their gate and up as one matrix.
    output_scale: float = 1.0  # What the sum of all is multiplied by.
    hashed_tokens: int = 0  # Token ids that choose their experts by a table; 0: the router chooses.
    # None: one kind of experts. Else the router counts parts of them.
    kinds: ExpertKindsConfig | None = None

    def weights(self, hidden_size: int) -> Weights:
        kinds, shared = self.kinds, self.shared
        gate = self.router.weights(hidden_size, self.hashed_tokens)
        yield from under("gate", gate if kinds is None else kinds.weights(hidden_size))
        if shared is not None:
            yield from under("shared_experts", shared.weights(hidden_size, self.shared_fused))
        if self.shared_gate:
            yield Weight("shared_expert_gate.weight", (1, hidden_size))

    def with_top_k(self, top_k: int) -> Self:
        if self.kinds is None:
            return replace(self, router=replace(self.router, top_k=top_k))
        kinds = replace(self.kinds, top_k=top_k)
        return replace(self, router=replace(self.router, top_k=kinds.most_parts), kinds=kinds)

    @property
    def late_refusal(self) -> str:
        has_kinds = self.kinds is not None or self.router.num_zero_experts
        return _MIXED_CHOICES if has_kinds else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMoE(MoE):
    """Routed experts work in a space between two projections that all of them share."""

    latent_size: int

    def expert_input_size(self, hidden_size: int) -> int:
        return self.latent_size

    def weights(self, hidden_size: int) -> Weights:
        yield from MoE.weights(self, hidden_size)
        yield from linear("fc1_latent_proj", self.latent_size, hidden_size)
        yield from linear("fc2_latent_proj", hidden_size, self.latent_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormedMoE(Routed):
    """Router and routed experts read the residual stream under norms of their own, and both their sum and
    the always active ones' are normed before they are added.
    """

    norm: Norm
    router_eps: float

    def __post_init__(self) -> None:
        router, shared = self.router, self.shared
        if shared is None or shared.limit != math.inf or router.weighs_inputs or router.num_zero_experts:
            raise ModelConfigError(
                "experts with norms of their own need always active ones that do not clamp, and a "
                "router that weighs what experts with weights answer"
            )

    def weights(self, hidden_size: int) -> Weights:
        yield from Routed.weights(self, hidden_size)
        yield Weight("router_norm.weight", (hidden_size,), "float32")
        for name in ("input_norm", "dense_norm", "output_norm"):
            yield from self.norm.weights(name, hidden_size)

    @property
    def late_refusal(self) -> str:
        return "which norms what experts add: sums of two layers would be normed together"
