"""Which part of the experts one server holds, as what, and the text that says so to all who work with it.

The same checkpoint and the same settings give the same identity (`expert_identity`) on every host, wherever
the files lie and whenever they were copied: nothing of a path, an inode or a time goes into it.
docs/decisions/0009 says why each part is there, and what finds changes that none of them shows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from moebius.checkpoint.split import block_bounds, equal_shares, split_bounds
from moebius.config import MoebiusConfig, PlacementConfig
from moebius.errors import UserError
from moebius.experts.placement import left_out
from moebius.models.geometry import MoeGeometry
from moebius.models.identity import CHECKPOINT, identity_text

ExpertDtype = Literal["keep", "float32", "bfloat16", "int8", "int4"]
# Packed formats of `expert_dtype`; "keep" takes each layer's own. Widest first.
REQUANTISED: Mapping[str, str] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int4": "int4_g32",
}


def parse_expert_dtype(text: str) -> ExpertDtype:
    """Raises ValueError naming what is allowed."""
    for allowed in get_args(ExpertDtype):
        if text == allowed:
            dtype: ExpertDtype = allowed
            return dtype
    raise ValueError(f"expert_dtype is {text!r}; allowed: {', '.join(get_args(ExpertDtype))}")


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
    # Experts that are resident on GPUs are no server's.
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    # Where routed experts are read; empty: of `model_path`, too.
    expert_checkpoint: str = ""
    # Layers of multi-token prediction that are held, too, at most.
    mtp_heads: int = 0

    @staticmethod
    def from_config(config: MoebiusConfig) -> SliceRequest:
        """Returns the settings of `moebius expert`."""
        experts = config.experts
        return SliceRequest(
            model_path=config.model.model,
            split=experts.expert_split,
            split_index=experts.split_index,
            split_count=experts.split_count,
            split_shares=experts.split_shares,
            weight_dtype=experts.expert_dtype,
            top_k=config.model.experts_per_token,
            placement=config.placement,
            expert_checkpoint=config.model.expert_checkpoint,
            mtp_heads=config.gpu.mtp_heads,
        )


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """Experts [expert_begin, expert_end), and of each its channels [intermediate_begin, intermediate_end)."""

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
        """Intermediate channels of each expert held here."""
        return self.intermediate_end - self.intermediate_begin

    def held(self, resident: Collection[int]) -> tuple[int, ...]:
        """Ids of a layer's experts that are held here while `resident` ones are on GPUs, ascending."""
        elsewhere = frozenset(resident)
        return tuple(
            expert for expert in range(self.expert_begin, self.expert_end) if expert not in elsewhere
        )

    def num_held(self, resident: Collection[int]) -> int:
        """Returns the number of experts that `held` would list."""
        here = range(self.expert_begin, self.expert_end)
        return len(here) - len(frozenset(resident).intersection(here))


def plan_slice(model: MoeGeometry, request: SliceRequest, group: int = 1) -> ExpertSlice:
    """Returns the slice of `request.split_index`; `group` intermediate channels share scales and stay
    together.

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
    begin, end = block_bounds(model.moe_intermediate_size, shares, _multiple(model, len(shares), group))[
        request.split_index
    ]
    return ExpertSlice(0, model.num_experts, begin, end)


def _multiple(model: MoeGeometry, servers: int, group: int) -> int:
    """Returns where intermediate channels may be divided.

    Raises ValueError when groups would have to be cut.
    """
    size = model.moe_intermediate_size
    if group > 1 and servers > 1 and size // group < servers:
        raise ValueError(
            f"split_count is {servers}, but the {size} intermediate channels of an expert are quantised in "
            f"groups of {group} that cannot be divided: allowed are at most {max(1, size // group)} "
            "servers, or expert_split 'expert'"
        )
    wanted = math.lcm(INTERMEDIATE_MULTIPLE, group)
    return wanted if size // wanted >= servers else group


def rank_intermediate_range(
    size: int, group: int, packed: str | None, rank: int, count: int
) -> tuple[int, int]:
    """Returns intermediate channels `[begin, end)` of `size` that a tensor-parallel rank holds of a resident
    expert.

    `group` channels share scales and stay together, also those of `packed`, the format it is requantised to.
    Raises UserError when there are more ranks than groups.
    """
    if count == 1:
        return 0, size
    if packed == "int4_g32":
        group = math.lcm(group, 32)
    if size // group < count:
        raise UserError(
            f"tensor_parallel_size is {count}, but the {size} intermediate channels of an expert are "
            f"quantised in groups of {group} that stay whole: at most {max(1, size // group)} ranks are "
            "possible"
        )
    wanted = math.lcm(INTERMEDIATE_MULTIPLE, group)
    return block_bounds(size, (1,) * count, wanted if size // wanted >= count else group)[rank]


def expert_identity(request: SliceRequest, model: MoeGeometry, fingerprint: str, exact: bool) -> str:
    """Returns lines "name=value" that all servers of one model have in common; `exact`:
    `batch_invariant_experts`.

    The names are those of the settings, so that a difference can be shown to people as it stands.
    Raises ValueError or UserError for settings that do not fit the model.
    """
    shares = equal_shares(request.split_count, request.split_shares)
    lines = {
        CHECKPOINT: fingerprint,
        "expert_split": request.split,
        "split_count": str(request.split_count),
        "split_shares": ",".join(map(str, shares)),
        "expert_dtype": request.weight_dtype,
        "batch_invariant_experts": "yes" if exact else "no",
        "top_k": str(request.top_k or model.top_k),
        "mtp_heads": str(model.mtp_heads),
        "resident_experts": resident_fingerprint(request, model),
    }
    return identity_text(lines)


def resident_fingerprint(request: SliceRequest, model: MoeGeometry) -> str:
    """Returns which experts live on GPUs only, so that no server holds them; "none", or 16 hexadecimal
    digits.
    """
    dropped = left_out(request.placement, model)
    held = [(layer, tuple(experts)) for layer, experts in sorted(dropped.items()) if experts]
    return hashlib.blake2b(repr(held).encode(), digest_size=8).hexdigest() if held else "none"
