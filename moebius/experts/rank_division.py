"""Which resident experts, or which channels of each, a tensor-parallel rank has on its GPU.

Functions of settings, sizes and ranks alone: engine and planning divide alike, and ranks exchange nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.experts.slices import INTERMEDIATE_MULTIPLE, REQUANTISED, rank_intermediate_range
from moebius.models.expert_checkpoint import ExpertCheckpoint
from moebius.models.served import read_served_geometry

# Kernels compute 16 channels at a time and read rows of the down projection, which are as long as a rank has
# channels, in pieces of at least this many elements.
LEAST_CHANNELS = 128


def with_expert_split(config: MoebiusConfig) -> MoebiusConfig:
    """Returns the same settings, `gpu_expert_split` auto decided by the checkpoint's experts.

    Raises ModelConfigError or CheckpointError where it has to be read and cannot be.
    """
    parallel = config.parallel
    if parallel.gpu_expert_split != "auto" or parallel.tensor_parallel_size == 1:
        return config
    geometry = read_served_geometry(config)
    if not geometry.moe_layers:
        return config
    checkpoint = ExpertCheckpoint.open(config.model.model, geometry, config.model.expert_checkpoint)
    first = (checkpoint.expert(layer, 0) for layer in geometry.moe_layers)
    group = math.lcm(*(found.intermediate_multiple for found in first))
    return chosen_split(config, geometry.moe_intermediate_size, group)


def chosen_split(config: MoebiusConfig, intermediate_size: int, group: int) -> MoebiusConfig:
    """Returns the settings with `gpu_expert_split` auto decided for experts of this width.

    `group` channels share scales in the checkpoint and stay together. It becomes "expert" where ranks would
    have unequal numbers of channels, numbers that are no multiple of 16, or fewer than `LEAST_CHANNELS`.
    """
    parallel, packed = config.parallel, REQUANTISED.get(config.experts.expert_dtype)
    ranks = parallel.tensor_parallel_size
    if parallel.gpu_expert_split != "auto" or ranks == 1:
        return config
    try:
        bounds = [
            rank_intermediate_range(intermediate_size, group, packed, rank, ranks) for rank in range(ranks)
        ]
        widths = {end - begin for begin, end in bounds}
    except UserError:  # more ranks than groups of channels
        widths = {0}
    narrowest = min(widths)
    is_even = len(widths) == 1 and narrowest % INTERMEDIATE_MULTIPLE == 0
    split = "tensor" if is_even and narrowest >= LEAST_CHANNELS else "expert"
    return config.model_copy(update={"parallel": parallel.model_copy(update={"gpu_expert_split": split})})


def rank_residents(
    resident: Mapping[int, Sequence[int]], rank: int, ranks: int
) -> dict[int, tuple[int, ...]]:
    """Returns the resident experts that one of `ranks` holds where each holds whole ones, by layer.

    Ranks take turns through all layers, so that the numbers of experts of two ranks differ by one at most,
    also within some consecutive layers; a layer with fewer residents than ranks leaves some with none.
    """
    own: dict[int, tuple[int, ...]] = {}
    before = 0
    for layer, experts in sorted(resident.items()):
        own[layer] = tuple(experts[(rank - before) % ranks :: ranks])
        before += len(experts)
    return own
