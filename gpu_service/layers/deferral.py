"""Expert deferral: of each token's experts those of lowest router weight are added one MoE layer late.

The idea is that of KTransformers ("KTransformers: Unleashing the Full Potential of CPU/GPU Hybrid Inference
for MoE Models", SOSP 2025), here decided per token. With the sum over a token's experts in layer l divided by
router weight into `now_l(x)` and `late_l(x)`, layer l adds `now_l(x_l) + late_p(x_p)` to the residual stream,
p being the MoE layer before it. The last MoE layer has no late part, so nothing is left out. While the device
computes attention and router of a layer, expert servers compute the late part of the layer before.

Which experts are late follows from router weights alone. Experts on the device compute their late part at
once, and it is added as late as that of servers: an answer does not depend on where experts are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.models.config import ModelConfig
from moebius.models.layers.layer import routed

# A layer's own request and late part, and the late part of the layer before.
MIN_SLOTS = 3

# Adds an answer `[T, H]` to a partial sum `[T, H]` (None: zeros), in place where that is float32.
Collect = Callable[[torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class DeferralRule:
    """Which experts of a model are late; filled by `deferral_rule`."""

    count: int  # of each token, experts per layer
    layers: frozenset[int]  # those that have a late part

    def begin(self) -> Deferral:
        """Returns what one step keeps between its layers."""
        return Deferral(self)


class Deferral:
    """The late part that is under way in one step. A step that is run again begins a new one."""

    def __init__(self, rule: DeferralRule) -> None:
        self._rule = rule
        self._late: Collect | None = None

    def split(
        self, layer: int, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the layer's choices int32 `[T, K]` without late ones, and only these; -1 elsewhere.

        None: the layer has no late part. topk_weights float32 `[T, K]`.
        """
        if layer not in self._rule.layers:
            return None
        late = late_choices(topk_ids, topk_weights, self._rule.count)
        return topk_ids.masked_fill(late, -1), topk_ids.masked_fill(~late, -1)

    def defer(self, late: Collect) -> None:
        """`late` adds a layer's late part: what the next MoE layer gets from `take`."""
        assert self._late is None, "a layer did not take the late part of the one before"
        self._late = late

    def take(self, partial: torch.Tensor | None) -> torch.Tensor | None:
        """Returns `partial` `[T, H]` with the late part of the layer before, if it has one.

        To be called before the layer's own answer is collected: clients answer in the order of submission.
        """
        late, self._late = self._late, None
        return partial if late is None else late(partial)

    def settle(self) -> None:
        """Collects the late part that is under way now; it is still added by the next MoE layer.

        For callers whose experts are replaced between two layers.
        """
        if self._late is not None:
            answer = self._late(None)
            self._late = lambda partial: answer if partial is None else add_late(partial, answer)


def late_choices(topk_ids: torch.Tensor, topk_weights: torch.Tensor, count: int) -> torch.Tensor:
    """Returns bool `[T, K]`: the `count` choices of lowest weight of each row; of equal weights, smaller ids
    first.

    The order in which a router lists its choices does not matter. -1 is never late.
    """
    mine, other = topk_weights.unsqueeze(2), topk_weights.unsqueeze(1)
    ties = (other == mine) & (topk_ids.unsqueeze(1) < topk_ids.unsqueeze(2))
    rank = ((other < mine) | ties).sum(dim=2)
    return (rank < count) & (topk_ids >= 0)


def add_late(partial: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Returns float32 `[T, H]` on the partial sum's device; in place where that is float32."""
    return partial.float().add_(answer.to(partial.device))


def deferral_rule(config: MoebiusConfig, model: ModelConfig) -> DeferralRule | None:
    """Returns what `defer_experts` asks for; None: nothing.

    Raises UserError where answers can not be added late.
    """
    count, num_stages = config.experts.defer_experts, config.parallel.pipeline_parallel_size
    if count == 0:
        return None
    layers = [layer for layer in model.moe_layer_ids if layer < model.num_decoder_layers]
    if not layers:
        raise UserError(f"defer_experts: {count} is not allowed: the model has no routed experts; allowed: 0")
    top_k = routed(model.layers)[layers[0]].router.top_k
    if count >= top_k:
        raise UserError(
            f"defer_experts: {count} is not allowed: {model.model_type} chooses {top_k} experts per token, "
            f"one of which at least is not late; allowed: 0 to {top_k - 1}"
        )
    reason = _unsupported(model)
    if reason:
        raise UserError(
            f"defer_experts: {count} is not supported for {model.model_type}, {reason}; allowed: 0"
        )
    if num_stages > 1:
        raise UserError(
            f"defer_experts: {count} is not supported with pipeline_parallel_size {num_stages}: a late "
            "answer would have to reach another stage; allowed: 0, or pipeline_parallel_size 1"
        )
    if config.experts.expert_transport == "mailbox" and config.experts.mailbox_slots < MIN_SLOTS:
        raise UserError(
            f"defer_experts: {count} is not supported with mailbox_slots {config.experts.mailbox_slots}: "
            f"{MIN_SLOTS} requests are under way at once; allowed: 0, or mailbox_slots {MIN_SLOTS} or more"
        )
    return DeferralRule(count, frozenset(layers[:-1]))


def _unsupported(model: ModelConfig) -> str:
    """Why no late answer can be added to this model's stream; empty: it can."""
    reasons = (layer.late_refusal for layer in model.layers)
    return next((reason for reason in reasons if reason), "")
