"""The parts of a plan that lie in the host's memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moebius.app.planning.expert_bytes import StoredExperts, server_bytes
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.expert_slices import ExpertSlice, SliceRequest, plan_slice
from moebius.mailbox_layout import segment_bytes
from moebius.mailbox_plan import mailbox_geometry

RAM = "RAM"
MIB = 2**20
# Resident sizes of processes without weights: interpreters, libraries, tokenizer. An engine with a GPU also
# has the driver's and torch's CUDA libraries and its page-locked buffers.
GATEWAY_BYTES, EXPERT_BYTES, ENGINE_BYTES, GPU_ENGINE_BYTES = 400 * MIB, 100 * MIB, 600 * MIB, 3072 * MIB


@dataclass(frozen=True, slots=True)
class Component:
    """One part of a plan, bytes."""

    # "GPU 0", ..., or "RAM".
    place: str
    part: str
    nbytes: int
    # NUMA node of an expert server where the machine has several; -1: any.
    node: int = -1


@dataclass(frozen=True, slots=True)
class ExpertServer:
    """One expert server; filled by `expert_servers`."""

    index: int
    node: int
    part: ExpertSlice


def num_servers(config: MoebiusConfig, sockets: int) -> int:
    """As `moebius serve` starts them: what is set, else one per NUMA node. Raises UserError."""
    if config.experts.expert_transport == "local":
        raise UserError(
            "expert_transport local is a reference that is not planned for; allowed: mailbox, grpc"
        )
    return len(config.experts.expert_addresses) or config.experts.expert_servers or sockets


def expert_servers(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    stored: Mapping[int, StoredExperts],
    sockets: int,
) -> tuple[ExpertServer, ...]:
    """Every server's slice. Raises UserError for a division that can not be."""
    count = num_servers(config, sockets)
    group = math.lcm(*(layer.group for layer in stored.values()))
    request = replace(SliceRequest.from_config(config), split_count=count)
    try:
        return tuple(
            ExpertServer(
                index,
                index % sockets if sockets > 1 else -1,
                plan_slice(geometry, replace(request, split_index=index), group),
            )
            for index in range(count)
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def ram_components(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    stored: Mapping[int, StoredExperts],
    servers: Sequence[ExpertServer],
    engine: Sequence[Component],
    threads: int,
    resident: Mapping[int, tuple[int, ...]],
) -> tuple[Component, ...]:
    """All of the host's memory while loading, when most is taken.

    `stored`: the layers that servers hold. `engine`: what the engine's ranks have there. `threads`: of all
    servers together, each of which has one source expert mapped while it packs. `resident`: experts by layer
    that are on GPUs.
    """
    found = [*engine, Component(RAM, "gateway process", GATEWAY_BYTES)]
    if not servers or config.experts.expert_addresses:
        return tuple(found)
    dtype = config.experts.expert_dtype
    for server in servers:
        packed = server_bytes(stored, geometry.hidden_size, server.part, dtype, resident)
        found.append(Component(RAM, f"experts of server {server.index}", packed, server.node))
    found.append(Component(RAM, "expert processes", EXPERT_BYTES * len(servers)))
    if config.experts.expert_transport == "mailbox":
        split = config.experts.model_copy(update={"split_count": len(servers)})
        shared = config.model_copy(update={"experts": split})
        found.append(Component(RAM, "mailbox", segment_bytes(mailbox_geometry(shared, geometry))))
    source = max((layer.nbytes for layer in stored.values()), default=0)
    found.append(Component(RAM, "source experts while loading", max(threads, len(servers)) * source))
    return tuple(found)


def total_bytes(components: Sequence[Component], place: str) -> int:
    """Of all parts in a place."""
    return sum(part.nbytes for part in components if part.place == place)
