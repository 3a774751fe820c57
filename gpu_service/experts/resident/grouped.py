"""Which layers' rows are multiplied by the CUDA kernels of `ops/*_panels`, and these kernels."""

from __future__ import annotations

from typing import NamedTuple

import structlog
import torch

from gpu_service.experts.resident.experts import LayerSlots
from gpu_service.experts.resident.panels import LayerFormat
from gpu_service.ops import pair_panels, warpgroup_panels
from gpu_service.ops.grouped_panels import GroupedPanels, GroupedShape, is_available, multiplies
from gpu_service.ops.pair_panels import PairPanels
from gpu_service.ops.warpgroup_panels import WarpgroupPanels
from moebius.errors import UserError
from moebius.models.geometry import MoeGeometry

_log = structlog.get_logger(__name__)


class GroupedKernels(NamedTuple):
    """One kind of layer's; made by `GroupedExperts`."""

    # Of few that share an expert.
    few: GroupedPanels
    # Of single rows; None: Triton's are as fast.
    pairs: PairPanels | None = None
    # Of rows of large batches, and of prompts; None: a GPU or a shape that they do not take.
    some: WarpgroupPanels | None = None
    many: WarpgroupPanels | None = None


class GroupedExperts:
    """The kernels of each kind of layer, compiled when a kind is first met: when a service warms up."""

    def __init__(self, geometry: MoeGeometry) -> None:
        self._geometry = geometry
        self._found: dict[tuple[LayerFormat, torch.device], GroupedKernels | None] = {}

    def of(self, slots: LayerSlots, rows: torch.dtype) -> GroupedKernels | None:
        """Returns the kernels for rows of this type and a layer's experts; None: Triton's compute them."""
        if rows != torch.bfloat16:
            return None
        key = slots.kind, slots.weights.device
        if key not in self._found:
            self._found[key] = self._compiled(*key)
        return self._found[key]

    def _compiled(self, kind: LayerFormat, device: torch.device) -> GroupedKernels | None:
        if not can_group(kind) or not is_available(device):
            return None
        shape = grouped_shape(kind, self._geometry)
        try:
            few = GroupedPanels(shape, device)
            # Codes of 16 bits cost nothing to decode: there Triton's took 26 us for a row, these 28.
            takes_pairs = min(panels.bits for panels in kind.panels) < 16 and pair_panels.multiplies(shape)
            pairs = PairPanels(shape, device) if takes_pairs else None
            if not (warpgroup_panels.is_available(device) and warpgroup_panels.multiplies(shape)):
                return GroupedKernels(few, pairs)
            sizes = warpgroup_panels.SOME_ROWS, warpgroup_panels.MANY_ROWS
            more = (WarpgroupPanels(shape, rows) for rows in sizes)
            return GroupedKernels(few, pairs, *more)
        except (UserError, RuntimeError) as error:  # no place for compiled code; a compiler's or a driver's
            _log.warning("Triton computes rows of experts, more slowly", because=str(error))
            return None


def can_group(kind: LayerFormat) -> bool:
    """Returns whether the kernels take experts packed in this way."""
    both = multiplies(kind.gate_up, kind.hidden_size) and multiplies(kind.down, kind.intermediate_columns)
    return both and not kind.layout.mixed and kind.hidden_size % 4 == 0


def grouped_shape(kind: LayerFormat, geometry: MoeGeometry) -> GroupedShape:
    """Returns a layer's experts as constants of the kernels."""
    layout = kind.layout
    return GroupedShape(
        gate_up=kind.gate_up,
        down=kind.down,
        expert_bytes=kind.expert_bytes,
        gate_step=layout.gate_step,
        up_at=layout.up_offset,
        up_step=layout.up_step,
        down_at=layout.down_offset,
        hidden=kind.hidden_size,
        intermediate_columns=kind.intermediate_columns,
        top_k=geometry.top_k,
        gated=layout.gated,
        activation=geometry.activation,
    )
