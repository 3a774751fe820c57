"""How a token's experts are chosen and weighed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from moebius.models.layers.weights import Weight, Weights, WeightType

ScoreFunction = Literal["softmax", "sigmoid", "sqrt_softplus", "sparse_mixer", "none"]
GroupScore = Literal["max", "top2_sum"]
RouterPost = Literal["none", "renormalize", "softmax", "sigmoid", "sigmoid_renormalize"]


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One point of the router space that all families share; see `ops.router.route`."""

    num_experts: int
    top_k: int
    score: ScoreFunction
    # A bias added to the scores for the selection only; the weights stay unbiased.
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2_sum"
    post: RouterPost = "none"  # What becomes of the scores of the chosen, which then weigh them.
    # Added to the sum before dividing by it (GLM and DeepSeek: 1e-20).
    renormalize_epsilon: float = 0.0
    scale: float = 1.0
    float32_gate: bool = False  # Whether the gate matmul runs in float32 whatever the model's dtype.
    gate_bias: bool = False  # Whether the gate adds a bias to its logits.
    # The logits become `logit_softcap * tanh(logits / logit_softcap)` before they are scored; 0: they do not.
    logit_softcap: float = 0.0
    # Whether a checkpoint may have no correction bias, which then is zero.
    correction_bias_may_be_missing: bool = False
    # Of the score "sparse_mixer": how far below the best, relative to the larger of both, a logit counts.
    mixer_width: float = 0.0
    # Whether the checkpoint stores the correction bias as one row of a matrix.
    correction_bias_is_row: bool = False
    # Whether what an expert weighs is multiplied by a learned factor of its own, last.
    expert_scales: bool = False
    # Whether what an expert reads is multiplied by its weight, not what it answers; with one expert a token.
    weighs_inputs: bool = False
    # Choices after the experts' that have no weights: their answer is what they are given.
    num_zero_experts: int = 0

    @property
    def num_choices(self) -> int:
        """What the gate scores: experts with weights, and those without."""
        return self.num_experts + self.num_zero_experts

    def weights(self, hidden_size: int, hashed_tokens: int = 0) -> Weights:
        """Yields what checkpoints store of a router; the correction bias is always float32.

        With a float32 gate, weights of 16 bits are widened once, at load. `hashed_tokens`: the size of the
        vocabulary where a token's id chooses its experts, else 0.
        """
        choices = self.num_choices
        dtype: WeightType = "float32" if self.float32_gate else "activation"
        yield Weight("weight", (choices, hidden_size), dtype)
        if self.gate_bias:
            yield Weight("bias", (choices,), dtype)
        if hashed_tokens:
            yield Weight("tid2eid", (hashed_tokens, self.top_k), "int32")
        elif self.correction_bias:
            shape = (1, choices) if self.correction_bias_is_row else (choices,)
            may_miss = self.correction_bias_may_be_missing
            yield Weight("e_score_correction_bias", shape, "float32", may_be_missing=may_miss)
        if self.expert_scales:
            yield Weight("expert_scales", (self.num_experts,), "float32")


@dataclass(frozen=True, slots=True)
class ExpertKindsConfig:
    """Experts of two kinds and widths, of which a token's id says between which it chooses (ERNIE 4.5 VL).

    So that all that computes experts knows one width, what `Experts`, `MoeGeometry` and all after the
    router call an expert is a part of one, `part_size` channels wide: an expert's answer is the sum of its
    parts'. The parts of an expert follow one another, those of the second kind all others.
    """

    num_experts: int  # Of either kind.
    top_k: int  # Experts that a token chooses, of its kind.
    widths: tuple[int, int]  # Intermediate sizes of an expert of either kind.
    tokens: tuple[int, ...]  # Ids that choose among the second kind; all others choose among the first.

    def weights(self, hidden_size: int) -> Weights:
        """Yields what checkpoints store of the two gates, which lie `[H, E]`."""
        for name in ("weight", "weight_1"):
            yield Weight(name, (hidden_size, self.num_experts), "float32")
        yield Weight("e_score_correction_bias", (2, self.num_experts), "float32")

    @property
    def part_size(self) -> int:
        """Intermediate size of a part."""
        return math.gcd(*self.widths)

    @property
    def num_parts(self) -> tuple[int, int]:
        """Parts of an expert of either kind."""
        first, second = self.widths
        return first // self.part_size, second // self.part_size

    @property
    def total_parts(self) -> int:
        """The number of parts of all experts of both kinds."""
        return self.num_experts * sum(self.num_parts)

    @property
    def most_parts(self) -> int:
        """That a token is computed by."""
        return self.top_k * max(self.num_parts)

    def stored_place(self, part: int) -> tuple[int, int, int]:
        """The place of a part: its expert's number in the checkpoint, its first channel, and the expert's
        width."""
        first, second = self.num_parts
        place, of_first = part, self.num_experts * first
        if part < of_first:
            return place // first, place % first * self.part_size, self.widths[0]
        place -= of_first
        return self.num_experts + place // second, place % second * self.part_size, self.widths[1]
