"""Bytes of routed experts: as a checkpoint stores them, or would, and as servers and GPUs pack them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_checkpoint import ExpertCheckpoint
from moebius.checkpoint.expert_layouts import LAYER_PREFIXES, LAYOUTS
from moebius.checkpoint.index import NUMPY_DTYPES, has_weights
from moebius.checkpoint.matrix_finder import MatrixFinder
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.checkpoint.quantisation import read_schemes
from moebius.checkpoint.rules import FAMILY_RULES
from moebius.checkpoint.stored_arrays import count_elements
from moebius.checkpoint.weight_schemes import PLAIN, WeightScheme
from moebius.errors import UserError
from moebius.expert_dtype import REQUANTISED
from moebius.expert_slices import ExpertSlice
from moebius.packed_layout import ExpertLayout, PanelLayout
from moebius.weight_formats import weight_format

# Families whose experts have biases; others have none, and headers tell where there are any.
BIASED = frozenset({"gpt_oss"})
# kernels/moe/arena.cc: a layer's experts lie in whole pages, huge ones from half of one on.
_SMALL_PAGE, _HUGE_PAGE = 4096, 2 * 2**20


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """One layer's experts, told by its first one; filled by `stored_experts`."""

    # Packed formats that hold them exactly; "": none does.
    gate_up: str
    down: str
    has_bias: bool
    # Neurons may be divided at multiples of this.
    group: int
    # Of one expert, as stored.
    nbytes: int


def stored_experts(directory: str | Path, geometry: MoeGeometry) -> dict[int, StoredExperts]:
    """By MoE layer, from headers; without files of weights, what `config.json` says that they will be.

    Raises CheckpointError naming what is missing or not supported.
    """
    if not has_weights(directory):
        return {layer: _declared(directory, geometry, layer) for layer in geometry.moe_layers}
    checkpoint = ExpertCheckpoint.open(str(directory), geometry)
    found = {layer: checkpoint.expert(layer, 0) for layer in geometry.moe_layers}
    return {
        layer: StoredExperts(*expert.formats, expert.has_bias, expert.neuron_multiple, expert.nbytes)
        for layer, expert in found.items()
    }


def _declared(directory: str | Path, geometry: MoeGeometry, layer: int) -> StoredExperts:
    family = FAMILY_RULES.get(geometry.model_type)
    if family is None:
        raise CheckpointError(f"model_type {geometry.model_type!r} is not known")
    layout = LAYOUTS[family.layouts[0]]
    finder = MatrixFinder({}, Path(directory), read_schemes(directory))
    gate, down = (
        finder.declared(f"{LAYER_PREFIXES[0]}{layer}.{template.name.format(expert=0)}")
        for template in (layout.gate, layout.down)
    )
    inner, hidden = geometry.moe_intermediate_size, geometry.hidden_size
    size = 2 * _declared_bytes(gate, inner, hidden, geometry) + _declared_bytes(down, hidden, inner, geometry)
    rows = [role.out_step for role in gate.roles if role.out_step not in (0, 128)]
    columns = [role.in_step for role in down.roles if role.in_step]
    return StoredExperts(
        _declared_format(gate, geometry),
        _declared_format(down, geometry),
        geometry.model_type in BIASED,
        math.lcm(*rows, *columns),
        size,
    )


def _declared_format(scheme: WeightScheme, geometry: MoeGeometry) -> str:
    """With scales in bfloat16: in float16, which only headers tell, they take as many bytes."""
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
    stored: StoredExperts, hidden_size: int, neurons: int, expert_dtype: str, widest: str = "float32"
) -> ExpertLayout:
    """How `neurons` intermediate channels of an expert are packed; the rest as `packed_formats`."""
    gate_up, down = packed_formats(stored, expert_dtype, widest)
    return ExpertLayout(
        PanelLayout(weight_format(gate_up), hidden_size, stored.has_bias),
        PanelLayout(weight_format(down), neurons, stored.has_bias),
    )


def packed_formats(stored: StoredExperts, expert_dtype: str, widest: str = "float32") -> tuple[str, str]:
    """Of gate and up, and of down.

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
        gate_up, down = (widest if name == "float32" else name for name in formats)
        return gate_up, down
    return formats


def arena_bytes(nbytes: int) -> int:
    """Memory that an expert server maps for a layer's packed experts."""
    page = _HUGE_PAGE if nbytes >= _HUGE_PAGE // 2 else _SMALL_PAGE
    return -(-nbytes // page) * page


def server_bytes(
    stored: Mapping[int, StoredExperts],
    hidden_size: int,
    part: ExpertSlice,
    expert_dtype: str,
    resident: Mapping[int, Collection[int]] | None = None,
) -> int:
    """Packed weights of an expert server that holds `part` of every layer in `stored`; bytes.

    Experts in `resident`, by layer, are on GPUs and not held.
    """
    total = 0
    for layer, found in stored.items():
        packed = packed_expert(found, hidden_size, part.intermediate_size, expert_dtype)
        held = part.held((resident or {}).get(layer, ()))
        total += arena_bytes(len(held) * packed.expert_bytes)
    return total
