"""Which part of the routed experts one server holds."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from moebius.checkpoint.moe_config import MoeGeometry
from moebius.checkpoint.split import equal_shares, split_bounds
from moebius.config import MoebiusConfig, PlacementConfig
from moebius.errors import UserError
from moebius.expert_dtype import ExpertDtype

# Bounds of the intermediate dimension are multiples of the widest vector (16 float32), so that no server
# computes padding; models too narrow for that are divided anyhow.
INTERMEDIATE_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class SliceRequest:
    """What to load; filled from the configuration or from a `LoadRequest`."""

    model_path: str
    split: Literal["tensor", "expert"] = "tensor"
    split_index: int = 0
    split_count: int = 1
    # Relative share of each server; empty: equal.
    split_shares: tuple[int, ...] = ()
    # "keep": the checkpoint's own format, layer by layer.
    weight_dtype: ExpertDtype = "keep"
    # None: the checkpoint's own.
    top_k: int | None = None
    # What is resident on GPUs is nobody's here.
    placement: PlacementConfig = field(default_factory=PlacementConfig)

    @staticmethod
    def from_config(config: MoebiusConfig) -> SliceRequest:
        """The settings of `moebius expert`."""
        experts = config.experts
        return SliceRequest(
            model_path=config.model.model,
            split=experts.expert_split,
            split_index=experts.split_index,
            split_count=experts.split_count,
            split_shares=experts.split_shares,
            weight_dtype=experts.expert_dtype,
            top_k=config.model.top_k,
            placement=config.placement,
        )


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """Experts [expert_begin, expert_end), of each the neurons [intermediate_begin, intermediate_end)."""

    expert_begin: int
    expert_end: int
    intermediate_begin: int
    intermediate_end: int

    @property
    def num_experts(self) -> int:
        """Experts held here."""
        return self.expert_end - self.expert_begin

    @property
    def intermediate_size(self) -> int:
        """Neurons of each expert held here."""
        return self.intermediate_end - self.intermediate_begin

    def held(self, resident: Collection[int]) -> tuple[int, ...]:
        """Ids of a layer's experts that are held here while `resident` ones are on GPUs, ascending."""
        return tuple(expert for expert in range(self.expert_begin, self.expert_end) if expert not in resident)


def plan_slice(model: MoeGeometry, request: SliceRequest, group: int = 1) -> ExpertSlice:
    """The slice of `request.split_index`; `group` neurons share scales and stay together.

    Raises ValueError naming the setting.
    """
    if request.split_count < 1 or not 0 <= request.split_index < request.split_count:
        raise ValueError(
            f"split_index is {request.split_index}, split_count {request.split_count}; "
            "allowed: 0 <= split_index < split_count"
        )
    shares = equal_shares(request.split_count, request.split_shares)
    if request.split == "expert":
        begin, end = split_bounds(model.num_experts, shares)[request.split_index]
        return ExpertSlice(begin, end, 0, model.moe_intermediate_size)
    begin, end = split_bounds(model.moe_intermediate_size, shares, _multiple(model, len(shares), group))[
        request.split_index
    ]
    return ExpertSlice(0, model.num_experts, begin, end)


def _multiple(model: MoeGeometry, servers: int, group: int) -> int:
    """Where neurons may be divided. Raises ValueError when groups would have to be cut."""
    size = model.moe_intermediate_size
    if group > 1 and servers > 1 and size // group < servers:
        raise ValueError(
            f"split_count is {servers}, but the {size} neurons of an expert are quantised in groups of "
            f"{group} that can not be divided: allowed are at most {max(1, size // group)} servers, "
            "or expert_split 'expert'"
        )
    wanted = math.lcm(INTERMEDIATE_MULTIPLE, group)
    return wanted if size // wanted >= servers else group


def rank_neurons(size: int, group: int, packed: str | None, rank: int, count: int) -> tuple[int, int]:
    """Neurons `[begin, end)` that a tensor-parallel rank holds of a resident expert of `size` neurons.

    `group` neurons share scales and stay together, also those of `packed`, the format it is requantised to.
    Raises UserError when there are more ranks than groups.
    """
    if count == 1:
        return 0, size
    if packed == "int4_g32":
        group = math.lcm(group, 32)
    if size // group < count:
        raise UserError(
            f"tensor_parallel_size is {count}, but the {size} neurons of an expert are quantised in "
            f"groups of {group} that stay whole: at most {max(1, size // group)} ranks are possible"
        )
    wanted = math.lcm(INTERMEDIATE_MULTIPLE, group)
    return split_bounds(size, (1,) * count, wanted if size // wanted >= count else group)[rank]
