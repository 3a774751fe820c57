"""How many outputs a step has where no setting says it: as many as leave the rest of the memory its work.

Every output of a model with recurrent layers holds states, and those that prefixes end in are kept, too:
what 64 of them take may be more than all that experts could have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from app.planning.hardware import Hardware
from app.planning.memory import (
    Residency,
    all_resident,
    chosen_residency,
    has_placement,
    nothing_resident,
)
from moebius.config import DEFAULT_NUM_SEQS

if TYPE_CHECKING:
    from app.planning.capacity import CapacityPlan, Wish
    from app.planning.planner import Planner

# Of the memory for states, experts and cache, states take at most this part, where not all experts fit.
STATES_PART = 4


def plan_with_num_seqs(
    planner: Planner, hardware: Hardware, wish: Wish | None, fill: bool, explain: bool
) -> CapacityPlan:
    """Returns the plan with the number of outputs of `with_num_seqs`, which it names where an engine with the
    plan's experts would by itself choose more.

    Beside its experts that may have room for one long request instead of four, and then for more outputs.
    """
    chosen = with_num_seqs(planner, hardware, wish, fill)
    plan, count = chosen.plan(hardware, wish, fill, explain), chosen.config.gpu.num_seqs
    if not planner.on_gpu or plan.max_num_seqs is not None:
        return plan
    chooses_more = _engine_num_seqs(planner, hardware, plan.residency) > count
    return replace(plan, max_num_seqs=count) if chooses_more else plan


def with_num_seqs(planner: Planner, hardware: Hardware, wish: Wish | None, fill: bool) -> Planner:
    """Returns the same with a number of outputs: what an engine would choose, or, where `fill` puts experts
    on GPUs, fewer, beside which the KV cache holds what is wished.

    Fewer are chosen for experts and cache alone, so an engine has to be given the number:
    `Planner.seqs_beside_experts`.
    """
    if not planner.on_gpu:
        return planner.with_gpu(max_num_seqs=planner.forecast.shared_num_seqs(planner.config))
    most = _engine_num_seqs(planner, hardware, chosen_residency(planner.config, planner.geometry))
    chosen = planner.with_gpu(max_num_seqs=most)
    if not fill or has_placement(planner.config) or not planner.geometry.moe_layers:
        return chosen
    # An engine whose GPUs hold all experts chooses more.
    more = _engine_num_seqs(planner, hardware, all_resident(planner.config, planner.geometry))
    if more > max(most, DEFAULT_NUM_SEQS):
        wider = planner.with_gpu(max_num_seqs=more)
        if _holds_everything(wider, hardware, wish):
            return wider
        chosen.seqs_beside_experts = most
        return chosen
    count = _beside_experts(planner, hardware, wish, most)
    if count == most:
        return chosen
    fewer = planner.with_gpu(max_num_seqs=count)
    fewer.seqs_beside_experts = count
    return fewer


def _engine_num_seqs(planner: Planner, hardware: Hardware, residency: Residency) -> int:
    """Returns as many as an engine on such GPUs, with these experts, would choose."""
    held = planner.all_held(residency, hardware)
    return planner.forecast.num_seqs(planner.config, hardware.rank_bytes(len(held)), held)


def _holds_everything(planner: Planner, hardware: Hardware, wish: Wish | None) -> bool:
    """Returns whether all experts fit GPUs beside the planner's number of outputs and their KV cache."""
    everything = all_resident(planner.config, planner.geometry)
    needed = planner.wanted_tokens(hardware, wish) * planner.token_bytes()
    return planner.room_bytes(hardware, everything) >= needed


def _beside_experts(planner: Planner, hardware: Hardware, wish: Wish | None, most: int) -> int:
    from gpu_service.assembly.rank_plan import NUM_SEQS

    has_states = planner.forecast.state_bytes(planner.config) > 0
    if not has_states or _holds_everything(planner.with_gpu(max_num_seqs=most), hardware, wish):
        return most
    alone = planner.with_gpu(max_num_seqs=1)
    needed = planner.forecast.state_bytes(alone.config)
    free = alone.room_bytes(hardware, nothing_resident(planner.geometry))
    for count in NUM_SEQS:
        states = planner.forecast.state_bytes(planner.with_gpu(max_num_seqs=count).config)
        if count <= most and states - needed <= free // STATES_PART:
            return count
    return 1
