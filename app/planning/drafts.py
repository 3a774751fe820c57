"""What `speculative_method` auto becomes: mtp where the model's layer is served and has room, or off.

A layer of multi-token prediction that does not pay rests, and an engine that rests is promised 0.98 of its
speed without drafts (decision 36). Memory is held to the same: the layer may take so much that steps without
draft tokens become slower by 2 % at most, and nothing that requests can notice otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from app.planning.capacity import CapacityPlan, Wish
from app.planning.completeness import refuse_incomplete
from app.planning.dense import with_dense_choice
from gpu_service.memory.contexts import LONG_CONTEXTS
from moebius.config import MoebiusConfig
from moebius.errors import UserError, brief
from moebius.models.served import with_method, with_own_layers

# By how much experts that no GPU holds may become more. They are what a step waits for.
_MORE_OUTSIDE = 0.02


@dataclass(frozen=True, slots=True)
class Room:
    """What a plan leaves to requests and to the model's own experts; filled by `room_of`."""

    # Of the model's own layers, those that GPUs do not hold.
    experts_outside: int
    kv_tokens: int
    num_seqs: int
    has_cold_experts: bool


def room_of(plan: CapacityPlan, own_layers: Iterable[int]) -> Room:
    """Returns what a plan leaves; `own_layers`: the model's MoE layers without those that draft."""
    residency = plan.residency
    return Room(
        sum(residency.num_experts - len(residency.resident[layer]) for layer in own_layers),
        plan.kv.tokens,
        int(plan.settings["max_num_seqs"]),
        plan.cold is not None,
    )


def why_not(plain: Room, drafting: Room, wished_tokens: int) -> str:
    """Returns what a layer that drafts would take too much of; empty: it has room.

    `plain`, `drafting`: without and with the layer; `wished_tokens`: of KV cache, which plans keep room for.
    """
    if drafting.has_cold_experts:
        return "RAM does not hold all experts, so the layer's would be read from disk"
    kept = _kept_tokens(plain.kv_tokens, wished_tokens)
    if drafting.kv_tokens < kept:
        return f"the KV cache would have {drafting.kv_tokens} tokens, fewer than the {kept} it keeps room for"
    if drafting.num_seqs < plain.num_seqs:
        return f"steps would have {drafting.num_seqs} outputs instead of {plain.num_seqs}"
    if drafting.experts_outside > plain.experts_outside * (1.0 + _MORE_OUTSIDE):
        return (
            f"{drafting.experts_outside} experts would be outside of GPUs instead of {plain.experts_outside}"
        )
    return ""


def _kept_tokens(tokens: int, wished: int) -> int:
    """Returns how many tokens of a KV cache are not to be lost: those of the longest kind of request that a
    plan keeps room for and this one has; all, where it has fewer than were wished.
    """
    return max((kept for kept in (*LONG_CONTEXTS, wished) if kept <= tokens), default=tokens)


def decided_drafts(
    config: MoebiusConfig, plan: Callable[[MoebiusConfig], CapacityPlan], wish: Wish
) -> tuple[MoebiusConfig, str]:
    """Returns the settings with `speculative_method` mtp or off where the model has layers of multi-token
    prediction and the method is auto, and why it is off; else the settings as they are, and an empty reason.

    `plan`: of other settings on the same hardware, raising what `Planner` does. Raises nothing itself: what
    is wrong without the layers is refused by whatever reads the settings next.
    """
    drafting, reason = with_own_layers(config)
    if drafting is None:
        return config, ""
    plain = with_method(config, "off")
    reason = reason or _refusal(plain, drafting, plan, wish)
    return (plain, reason) if reason else (drafting, "")


def _refusal(
    plain: MoebiusConfig,
    drafting: MoebiusConfig,
    plan: Callable[[MoebiusConfig], CapacityPlan],
    wish: Wish,
) -> str:
    try:
        without = plan(plain)
    except (UserError, ValueError) as error:
        return f"the model cannot be served without the layer, either: {brief(error)}"
    if without.settings["pipeline_parallel_size"] != "1":
        return "pipeline stages do not draft"
    try:
        refuse_incomplete(drafting)
        # The layer may not be why dense weights are kept as they are stored, which many rows notice.
        found = plan(with_dense_choice(drafting, without.dense))
    except (UserError, ValueError) as error:
        return brief(error)
    own = without.residency.by_layer
    context, concurrency = wish.tokens(without.context)
    return why_not(room_of(without, own), room_of(found, own), context * concurrency)
