"""Where what lies: routed experts as stored and as packed, what GPUs hold of them, parts of the RAM."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moebius.checkpoint.expert_layouts import EXPERT_TENSOR_LAYOUTS, LAYER_PREFIXES
from moebius.checkpoint.index import NUMPY_DTYPES, has_weights
from moebius.checkpoint.matrix_finder import MatrixFinder
from moebius.checkpoint.quantisation import read_schemes
from moebius.checkpoint.stored_arrays import count_elements
from moebius.checkpoint.weight_schemes import PLAIN, WeightScheme
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.experts.placement import keeps_residents, left_out, make_placement
from moebius.experts.rank_division import chosen_split, rank_residents
from moebius.experts.slices import REQUANTISED, ExpertSlice, SliceRequest, plan_slice, rank_intermediate_range
from moebius.kernels.weight_formats import (
    PackedExpertLayout,
    expert_layout,
    gate_up_format,
    ordered_format,
    split_gate_up,
)
from moebius.mailbox.plan import mailbox_geometry
from moebius.models.expert_checkpoint import ExpertCheckpoint
from moebius.models.geometry import MoeGeometry
from moebius.models.registry import family_of

# kernels/moe/arena.cc: a layer's experts lie in whole pages, huge ones from half of one on.
_SMALL_PAGE, _HUGE_PAGE = 4096, 2 * 2**20
# kernels/moe/weight_segment.h
_LOAD_RECORD = 512 * 2**10


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """One layer's experts, taken to be like its first one; filled by `stored_experts`."""

    # Packed formats that hold them exactly; "": none does.
    gate_up: str
    down: str
    has_bias: bool
    group: int  # Intermediate channels may be divided at multiples of this.
    nbytes: int  # Of one expert, as stored.
    is_gated: bool = True


def stored_experts(
    directory: str | Path, geometry: MoeGeometry, expert_checkpoint: str = ""
) -> dict[int, StoredExperts]:
    """Returns the stored formats of experts by MoE layer, from headers; without files of weights, what
    `config.json` says that they will be.

    `expert_checkpoint`: where they lie apart from the rest of the model; empty: they do not.

    Raises CheckpointError naming what is missing or not supported.
    """
    place = expert_checkpoint or directory
    if not has_weights(place):
        return {layer: _declared(place, geometry, layer) for layer in geometry.moe_layers}
    checkpoint = ExpertCheckpoint.open(str(directory), geometry, expert_checkpoint)
    found = {layer: checkpoint.expert(layer, 0) for layer in geometry.moe_layers}
    return {
        layer: StoredExperts(
            *expert.formats,
            expert.has_bias,
            expert.intermediate_multiple,
            expert.nbytes,
            geometry.is_gated,
        )
        for layer, expert in found.items()
    }


def _declared(directory: str | Path, geometry: MoeGeometry, layer: int) -> StoredExperts:
    layout = EXPERT_TENSOR_LAYOUTS[family_of(geometry.model_type).names.layouts[0]]
    finder = MatrixFinder({}, Path(directory), read_schemes(directory))
    up, down = (
        finder.declared(f"{LAYER_PREFIXES[0]}{layer}.{template.name.format(expert=0)}")
        for template in (layout.up, layout.down)
    )
    schemes = {"gate": up, "up": up, "down": down}
    size = sum(_declared_bytes(schemes[name], *shape, geometry) for name, shape in geometry.matrices.items())
    rows = [role.out_step for role in up.roles if role.out_step and role.role != "scales"]
    columns = [role.in_step for role in down.roles if role.in_step]
    gate_up = _declared_format(up, geometry)
    return StoredExperts(
        ordered_format(gate_up) if up.reorders else gate_up,
        _declared_format(down, geometry),
        geometry.has_bias,
        math.lcm(*rows, *columns),
        size,
        geometry.is_gated,
    )


def _declared_format(scheme: WeightScheme, geometry: MoeGeometry) -> str:
    """Returns the format with scales in bfloat16: in float16, which only headers tell, they take as many
    bytes.
    """
    return geometry.dtype if scheme is PLAIN else scheme.packed_format.format(scale="")


def _declared_bytes(scheme: WeightScheme, rows: int, columns: int, geometry: MoeGeometry) -> int:
    if scheme is PLAIN:
        return rows * columns * (4 if geometry.dtype == "float32" else 2)
    total = 0
    for role in scheme.roles:
        # Scales of float8 are published in float32, those of narrower codes in 16 bits.
        dtype = "BF16" if "BF16" in role.dtypes and scheme.code != "float8" else role.dtypes[0]
        height = 1 if role.role == "group_index" else count_elements(rows, role.out_step)
        width = 1 if role.role == "channel" else count_elements(columns, role.in_step)
        if role.role not in ("tensor", "tensor_reciprocal"):
            total += height * width * NUMPY_DTYPES[dtype].itemsize
    return total


def packed_expert(
    stored: StoredExperts, hidden_size: int, channels: int, expert_dtype: str, widest: str = "float32"
) -> PackedExpertLayout:
    """Returns how `channels` intermediate channels of an expert are packed; the rest as `packed_formats`."""
    formats = packed_formats(stored, expert_dtype, widest)
    return expert_layout(*formats, hidden_size, channels, stored.has_bias, stored.is_gated)


def packed_formats(stored: StoredExperts, expert_dtype: str, widest: str = "float32") -> tuple[str, str]:
    """Returns the packed formats of gate and up, and of down.

    `widest` "bfloat16" is that of a GPU that computes in it. Raises UserError when `expert_dtype` is "keep"
    and no packed format is the stored one.
    """
    target = REQUANTISED.get(expert_dtype)
    formats = (target, target) if target else (stored.gate_up, stored.down)
    if not all(formats):
        raise UserError(
            "expert_dtype keep: no packed format holds these experts exactly; allowed: "
            + ", ".join(REQUANTISED)
        )
    if target is None:
        gate, up, down = (
            widest if name == "float32" else name for name in (*split_gate_up(formats[0]), formats[1])
        )
        return gate_up_format(gate, up), down
    return formats


def arena_bytes(nbytes: int) -> int:
    """Returns the memory that an expert server maps for a layer's packed experts."""
    page = _HUGE_PAGE if nbytes >= _HUGE_PAGE // 2 else _SMALL_PAGE
    return -(-nbytes // page) * page


def server_bytes(
    stored: Mapping[int, StoredExperts],
    hidden_size: int,
    part: ExpertSlice,
    expert_dtype: str,
    resident: Mapping[int, Collection[int]] | None = None,
) -> int:
    """Returns packed weights of an expert server that holds `part` of every layer in `stored`; bytes.

    Experts in `resident`, by layer, are on GPUs and not held.
    """
    total = 0
    for layer, found in stored.items():
        packed = packed_expert(found, hidden_size, part.intermediate_size, expert_dtype)
        held = part.held((resident or {}).get(layer, ()))
        total += arena_bytes(len(held) * packed.expert_bytes)
    return total


def segment_bytes(config: MoebiusConfig, geometry: MoeGeometry, count: int) -> list[int]:
    """Returns what the segment of each of `count` expert servers takes in 2 MiB pages
    (kernels/moe/weight_segment.h).

    Raises CheckpointError for a checkpoint that cannot be packed, UserError for a division that cannot be.
    """
    stored = stored_experts(config.model.model, geometry, config.model.expert_checkpoint)
    experts = config.experts.model_copy(update={"expert_servers": count, "expert_addresses": ()})
    shared = config.model_copy(update={"experts": experts})
    dropped, sizes = left_out(config.placement, geometry), []
    for server in expert_servers(shared, geometry, stored, 1):
        layers = [
            packed_expert(
                found, geometry.hidden_size, server.part.intermediate_size, experts.expert_dtype
            ).expert_bytes
            * len(server.part.held(dropped.get(layer, ())))
            for layer, found in stored.items()
        ]
        tables = (
            2 * _SMALL_PAGE + 160 * len(layers) + 32 * server.part.num_experts * len(layers) + _LOAD_RECORD
        )
        sizes.append(sum(-(-nbytes // _HUGE_PAGE) * _HUGE_PAGE for nbytes in (tables + _SMALL_PAGE, *layers)))
    return sizes


def expert_format(
    config: MoebiusConfig, geometry: MoeGeometry, stored: Mapping[int, StoredExperts]
) -> tuple[tuple[str, str] | None, float]:
    """Returns packed formats (gate and up, down) of most layers, and mean bytes of a packed expert."""
    dtype, inner = config.experts.expert_dtype, geometry.moe_intermediate_size
    if not stored:
        return None, 0.0
    formats = [packed_formats(layer, dtype) for layer in stored.values()]
    sizes = [
        packed_expert(layer, geometry.hidden_size, inner, dtype).expert_bytes for layer in stored.values()
    ]
    return max(set(formats), key=formats.count), math.fsum(sizes) / len(sizes)


RAM = "RAM"
# How parts begin that are packed experts; the server's number follows.
EXPERTS_OF_SERVER = "experts of server"
MAILBOX = "mailbox"
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
    node: int = -1  # NUMA node of an expert server where the machine has several; -1: any.


@dataclass(frozen=True, slots=True)
class ExpertServer:
    """One expert server; filled by `expert_servers`."""

    index: int
    node: int
    part: ExpertSlice


def num_servers(config: MoebiusConfig, sockets: int) -> int:
    """Returns the number of expert servers, as `moebius serve` starts them: what is set, else one per NUMA
    node. Raises UserError.
    """
    if config.experts.expert_transport == "local":
        raise UserError(
            "expert_transport local is a reference implementation without a plan; allowed: mailbox, grpc"
        )
    return len(config.experts.expert_addresses) or config.experts.expert_servers or sockets


def expert_servers(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    stored: Mapping[int, StoredExperts],
    sockets: int,
) -> tuple[ExpertServer, ...]:
    """Returns every server's slice. Raises UserError for a division that cannot be."""
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
    """Returns all of the host's memory while loading, when most is taken.

    `stored`: the layers that servers hold. `engine`: what the engine's ranks have there. `threads`: of all
    servers together, each of which has one source expert mapped while it packs. `resident`: experts by layer
    that are on GPUs, which servers hold too where `keeps_residents`.
    """
    found = [*engine, Component(RAM, "gateway process", GATEWAY_BYTES)]
    if not servers or config.experts.expert_addresses:
        return tuple(found)
    dtype = config.experts.expert_dtype
    dropped = None if keeps_residents(config.placement) else resident
    for server in servers:
        packed = server_bytes(stored, geometry.hidden_size, server.part, dtype, dropped)
        found.append(Component(RAM, f"{EXPERTS_OF_SERVER} {server.index}", packed, server.node))
    found.append(Component(RAM, "expert processes", EXPERT_BYTES * len(servers)))
    if config.experts.expert_transport == "mailbox":
        split = config.experts.model_copy(update={"split_count": len(servers)})
        shared = config.model_copy(update={"experts": split})
        found.append(Component(RAM, MAILBOX, mailbox_geometry(shared, geometry).regions().total))
    source = max((layer.nbytes for layer in stored.values()), default=0)
    found.append(Component(RAM, "source experts while loading", max(threads, len(servers)) * source))
    return tuple(found)


def total_bytes(components: Sequence[Component], place: str) -> int:
    """Returns the bytes of all parts in a place."""
    return sum(part.nbytes for part in components if part.place == place)


@dataclass(frozen=True, slots=True)
class Residency:
    """Filled by the functions below."""

    # MoE layer -> ids of resident experts.
    resident: Mapping[int, tuple[int, ...]]
    num_experts: int
    # Whether it was chosen by the planner: the settings that ask `moebius serve` for it are then in `flags`.
    is_filled: bool
    flags: str

    @property
    def by_layer(self) -> dict[int, int]:
        """MoE layer -> number of resident experts."""
        return {layer: len(experts) for layer, experts in self.resident.items()}

    @property
    def count(self) -> int:
        """Resident experts of all layers."""
        return sum(self.by_layer.values())

    @property
    def share(self) -> float:
        """Resident experts over all routed experts, 0 to 1."""
        return self.count / max(1, self.num_experts * len(self.by_layer))

    @property
    def is_everything(self) -> bool:
        """Returns whether all experts are resident, so that no expert server is needed."""
        return all(count == self.num_experts for count in self.by_layer.values())


def has_placement(config: MoebiusConfig) -> bool:
    """Returns whether settings say what is resident."""
    placement = config.placement
    chosen = (placement.gpu_experts, placement.gpu_experts_ratio)
    return bool(placement.gpu_layers) or any(value is not None for value in chosen)


def chosen_residency(config: MoebiusConfig, geometry: MoeGeometry) -> Residency:
    """Returns what `moebius serve` would place. Raises UserError naming a setting."""
    placed = make_placement(config.placement, geometry)
    return Residency(placed.resident, geometry.num_experts, False, "")


def nothing_resident(geometry: MoeGeometry) -> Residency:
    """Returns the residency of a GPU without experts."""
    return Residency(dict.fromkeys(geometry.moe_layers, ()), geometry.num_experts, False, "")


def all_resident(config: MoebiusConfig, geometry: MoeGeometry) -> Residency:
    """Returns the residency of GPUs that hold every expert."""
    return _even(config, geometry, geometry.num_experts)


def filled_residency(
    config: MoebiusConfig, geometry: MoeGeometry, fits: Callable[[Residency], bool]
) -> Residency:
    """Returns the resident experts: as many experts of every MoE layer as fit; none where not even one does.

    `fits` must be monotone: what fits with more experts fits with fewer, but for all of them, beside which
    nothing is streamed.
    """
    everything = all_resident(config, geometry)
    if fits(everything):
        return everything
    low, high = 0, geometry.num_experts - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(_even(config, geometry, middle)) else (low, middle - 1)
    return _even(config, geometry, low)


def _even(config: MoebiusConfig, geometry: MoeGeometry, each: int) -> Residency:
    chosen = config.placement.model_copy(update={"gpu_experts": each})
    flags = f"--gpu-experts {each}" if each else ""
    return Residency(make_placement(chosen, geometry).resident, geometry.num_experts, True, flags)


def with_split(
    config: MoebiusConfig, geometry: MoeGeometry, stored: Mapping[int, StoredExperts]
) -> MoebiusConfig:
    """Returns the settings with `gpu_expert_split` auto decided, as an engine decides it."""
    if not stored:
        return config
    group = math.lcm(*(found.group for found in stored.values()))
    return chosen_split(config, geometry.moe_intermediate_size, group)


def resident_bytes(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    stored: Mapping[int, StoredExperts],
    resident: Mapping[int, Sequence[int]],
    layers: Sequence[int],
    tp_rank: int,
    widest: str,
) -> tuple[int, int]:
    """Returns the experts that are resident on the rank's GPU or, of whole ones, on those of the ranks of its
    stage, and the bytes of what one rank holds of them; `layers` are the rank's MoE layers.
    """
    own, ranks = resident, config.parallel.tensor_parallel_size
    if config.parallel.gpu_expert_split == "expert":
        of_stage = {layer: resident[layer] for layer in layers}
        own, tp_rank, ranks = rank_residents(of_stage, tp_rank, ranks), 0, 1
    total, size, dtype = 0, geometry.moe_intermediate_size, config.experts.expert_dtype
    for layer in layers:
        if own[layer]:
            found = stored[layer]
            begin, end = rank_intermediate_range(size, found.group, REQUANTISED.get(dtype), tp_rank, ranks)
            packed = packed_expert(found, geometry.hidden_size, end - begin, dtype, widest)
            total += len(own[layer]) * packed.expert_bytes
    return sum(len(resident[layer]) for layer in layers), total
