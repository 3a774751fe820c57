"""`ResidentKernels` by Triton: launches only, with shapes known on the host.

Which kernels a call takes follows from its rows alone (`launch.py`): a program per pair for few rows, tiles
that unpack as they multiply for more, and weights unpacked once for many. All are left to the CUDA kernels
of `grouped.py` where these take a layer's experts. Of large steps some rows, and of their experts some, are
computed at a time, so that memory stays bounded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from gpu_service.device.graphs import is_capturing
from gpu_service.experts.resident.experts import LayerSlots, ResidentKernels
from gpu_service.experts.resident.grouped import GroupedExperts, GroupedKernels
from gpu_service.experts.resident.triton_kernels import dense, gemm, launch, routing
from gpu_service.experts.resident.triton_kernels.pairs import align, combine_choices, pair_memory, row_parts
from gpu_service.experts.resident.triton_kernels.rows import down_rows, gate_up_rows
from gpu_service.experts.resident.triton_kernels.unpacked import places, unpack_experts
from gpu_service.ops.grouped_panels import TILE_ROWS, PanelKernels
from gpu_service.ops.panels import PanelFormat
from gpu_service.ops.triton import panel_sizes
from gpu_service.ops.triton.jit import launch_fitting, next_power_of_2, overlap
from gpu_service.ops.triton.panel_lines import EXPONENT
from gpu_service.ops.triton.panel_parts import BASES, PART
from moebius.models.geometry import MoeGeometry
from moebius.process.progress import counted

_IDS_BLOCK = 256


class TritonResidentKernels(ResidentKernels):
    """Few rows: two launches. More: through blocks of pairs that share an expert."""

    captures = True

    def __init__(self, geometry: MoeGeometry, few_rows: int | None = None) -> None:
        """`few_rows`: as `launch.few_rows`; None: what that says of a layer's format."""
        self._geometry = geometry
        self._most_few_rows = few_rows
        self._grouped = GroupedExperts(geometry)

    def _few_rows(self, slots: LayerSlots, is_grouped: bool) -> int:
        if self._most_few_rows is not None:
            return self._most_few_rows
        if is_grouped:
            return launch.few_grouped_rows(slots.kind)
        return launch.few_rows(slots.kind, self._geometry.num_experts, self._geometry.top_k)

    def cpu_ids(
        self, slots: LayerSlots, topk_ids: torch.Tensor, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        output, count = torch.empty_like(topk_ids), topk_ids.numel()
        if count:
            grid = (-(-count // _IDS_BLOCK),)
            routing.cpu_ids_kernel[grid](
                topk_ids.contiguous(),
                slots.slot_of_expert,
                slots.slot_of_expert if counts is None else counts,
                output,
                count,
                NUM_EXPERTS=slots.slot_of_expert.shape[0],
                COUNTS=counts is not None,
                BLOCK=_IDS_BLOCK,
                num_warps=1,
            )
        return output

    def forward(
        self,
        slots: LayerSlots,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        partial: torch.Tensor | None,
    ) -> torch.Tensor:
        num_rows, hidden = hidden_states.shape
        in_place = partial is not None and partial.dtype == torch.float32
        result = partial if in_place else hidden_states.new_empty((num_rows, hidden), dtype=torch.float32)
        assert result is not None
        if num_rows == 0:
            return result
        inputs = hidden_states.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
        pairs, experts = topk_ids.numel(), self._geometry.num_experts
        # Unpacking reads every slot that has memory, also those of no expert; a graph cannot know which have.
        grouped = self._grouped.of(slots, hidden_states.dtype)
        few = self._few_rows(slots, grouped is not None)
        is_few = num_rows <= few or not slots.backed
        is_captured = slots.memory is not None and is_capturing(hidden_states.device)
        takes_many = grouped is not None and grouped.many is not None
        unpacks = launch.unpacks(slots.kind, hidden_states.dtype, pairs, experts, grouped is not None)
        unpacks = unpacks and not takes_many
        if is_few or is_captured or not unpacks:
            for rows in row_parts(slots, hidden_states, topk_ids.shape[1]):
                before = None if partial is None else partial[rows]
                x, ids, weights = (tensor[rows] for tensor in inputs)
                if x.shape[0] <= few and grouped is not None and grouped.pairs is not None:
                    limits = self._geometry.alpha, slots.limit
                    where = slots.weights, ids, slots.slot_of_expert, weights
                    grouped.pairs.forward(x, *where, before, result[rows], *limits)
                elif x.shape[0] <= few:
                    self._by_rows(slots, x, ids, weights, before, result[rows])
                else:
                    self._packed(slots, grouped, x, ids, weights, before, result[rows])
            return result
        step = launch.experts_at_once(slots.kind)
        for first in range(0, slots.backed, step):
            before = partial if first == 0 else result
            self._unpacked(slots, first, min(step, slots.backed - first), *inputs, before, result)
        return result

    def _packed(
        self,
        slots: LayerSlots,
        grouped: GroupedKernels | None,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        partial: torch.Tensor | None,
        result: torch.Tensor,
    ) -> None:
        """Computes blocks of pairs that share an expert, with weights as they are stored."""
        pairs = topk_ids.numel()
        intermediate, outputs = pair_memory(slots, hidden_states, pairs)
        experts = self._geometry.num_experts
        if grouped is not None:
            kernels: PanelKernels = grouped.few
            bits = min(panels.bits for panels in slots.kind.panels)
            height = TILE_ROWS * launch.row_tiles(pairs, experts, bits)
            warpgroups = launch.chosen_warpgroups(slots.kind, grouped, pairs / experts)
            if warpgroups is not None:
                kernels, height = warpgroups, warpgroups.rows
            placed = align(slots, topk_ids, height, 0, slots.count)
            limits = self._geometry.alpha, slots.limit
            kernels.gate_up(hidden_states, slots.weights, *placed, intermediate, *limits)
            kernels.down(intermediate, slots.weights, *placed, outputs)
        else:
            by_parts = launch.by_parts(hidden_states.dtype, slots.kind.gate, slots.kind.gate_up)
            tile = launch.tile(pairs, experts, by_parts)
            launch_fitting(
                "resident experts",
                (tile, slots.kind, hidden_states.dtype),
                hidden_states.device,
                launch.with_smaller(tile),
                functools.partial(self._by_tiles, slots, hidden_states, topk_ids, intermediate, outputs),
            )
        combine_choices(slots, 0, slots.count, outputs, topk_ids, topk_weights, partial, result)

    def _unpacked(
        self,
        slots: LayerSlots,
        first: int,
        count: int,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        partial: torch.Tensor | None,
        result: torch.Tensor,
    ) -> None:
        """Computes `count` slots from `first`, whose weights are unpacked before all rows meet them."""
        matrices = unpack_experts(slots, first, count, hidden_states.dtype)
        for rows in row_parts(slots, hidden_states, topk_ids.shape[1]):
            x, ids = hidden_states[rows], topk_ids[rows]
            intermediate, outputs = pair_memory(slots, x, ids.numel())
            tiles = launch.dense_tiles(ids.numel(), self._geometry.num_experts)
            launch_fitting(
                "unpacked experts",
                (tiles[0], slots.kind, x.dtype),
                x.device,
                tiles,
                functools.partial(
                    self._by_dense_tiles, slots, first, count, matrices, x, ids, intermediate, outputs
                ),
            )
            before = None if partial is None else partial[rows]
            combine_choices(slots, first, count, outputs, ids, topk_weights[rows], before, result[rows])

    def warm_up(self, slots: LayerSlots, max_rows: int, dtype: torch.dtype) -> None:
        """A call for each kind of tile, and one for few rows. No id is chosen."""
        geometry, device = self._geometry, slots.weights.device
        few = self._few_rows(slots, self._grouped.of(slots, dtype) is not None)
        by_parts = launch.by_parts(dtype, slots.kind.gate, slots.kind.gate_up)
        sizes = launch.sizes_to_warm_up(geometry.num_experts, geometry.top_k, few, max_rows, by_parts)
        for rows_ in counted(sizes, "compiling expert kernels", len(sizes)):
            ids = torch.full((rows_, geometry.top_k), -1, dtype=torch.int32, device=device)
            hidden_states = torch.zeros((rows_, geometry.hidden_size), dtype=dtype, device=device)
            weights = torch.zeros(ids.shape, dtype=torch.float32, device=device)
            for partial in (None, hidden_states, hidden_states.float()):
                self.forward(slots, hidden_states, self.cpu_ids(slots, ids), weights, partial)
            self.cpu_ids(slots, ids, torch.zeros_like(slots.slot_of_expert))

    def _by_rows(
        self,
        slots: LayerSlots,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        partial: torch.Tensor | None,
        result: torch.Tensor,
    ) -> None:
        kind, gate_up = slots.kind, slots.gate_up
        pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
        lines, prefetched = panel_sizes.lines(kind.gate_up), launch.prefetched_lines(kind, pairs)
        gate_lines = panel_sizes.lines(kind.gate)
        intermediate = hidden_states.new_empty((pairs, kind.intermediate_columns))
        gate_up_rows[(pairs, kind.layout.intermediate_blocks)](
            hidden_states,
            gate_up.words,
            slots.gate.scales,
            gate_up.scales,
            gate_up.bytes,
            gate_up.grids,
            gate_up.floats,
            topk_ids,
            slots.slot_of_expert,
            intermediate,
            self._geometry.alpha,
            slots.limit,
            EXPONENT,
            TOP_K=top_k,
            EXPERT_BYTES=kind.expert_bytes,
            ORDER_AT=kind.layout.order_offset,
            DOWN_AT=kind.layout.down_offset,
            INTERMEDIATE_COLUMNS=kind.intermediate_columns,
            PANEL=kind.gate_up,
            MIXED=kind.layout.mixed,
            **places(kind),
            ACTIVATION=self._geometry.activation,
            GATE_LINES=gate_lines,
            GATE_AHEAD=panel_sizes.ahead(kind.gate, gate_lines),
            LINES=lines,
            AHEAD=panel_sizes.ahead(kind.gate_up, lines),
            PREFETCHED=prefetched,
            BLOCK=next_power_of_2(prefetched),
            num_warps=panel_sizes.warps(max(gate_lines, lines)),
            **overlap(hidden_states.device),
        )
        self._down_by_rows(slots, intermediate, topk_ids, topk_weights, partial, result)

    def _down_by_rows(
        self,
        slots: LayerSlots,
        intermediate: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        partial: torch.Tensor | None,
        result: torch.Tensor,
    ) -> None:
        kind, down, (num_rows, top_k) = slots.kind, slots.down, topk_ids.shape
        choices = next_power_of_2(top_k)
        lines = panel_sizes.lines(kind.down, choices)
        down_rows[(num_rows, kind.layout.down_panels)](
            intermediate,
            *down.pointers,
            topk_ids,
            slots.slot_of_expert,
            topk_weights,
            result if partial is None else partial,
            result,
            EXPONENT,
            TOP_K=top_k,
            EXPERT_BYTES=kind.expert_bytes,
            DOWN_AT=kind.layout.down_offset,
            HIDDEN=kind.hidden_size,
            INTERMEDIATE_COLUMNS=kind.intermediate_columns,
            PANEL=kind.down,
            HAS_PARTIAL=partial is not None,
            CHOICES=choices,
            LINES=lines,
            AHEAD=panel_sizes.ahead(kind.down, lines),
            num_warps=panel_sizes.warps(choices * lines),
            **overlap(intermediate.device),
        )

    def _by_tiles(
        self,
        slots: LayerSlots,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        intermediate: torch.Tensor,
        outputs: torch.Tensor,
        tile: launch.Tile,
    ) -> None:
        kind, count, gate_up = slots.kind, topk_ids.numel(), slots.gate_up
        pairs, block_slots = align(slots, topk_ids, tile.rows, 0, slots.count)
        gemm.gate_up_tiles[(block_slots.shape[0], -(-kind.intermediate_columns // tile.columns))](
            hidden_states,
            gate_up.words,
            slots.gate.scales,
            gate_up.scales,
            gate_up.bytes,
            gate_up.grids,
            gate_up.floats,
            pairs,
            block_slots,
            intermediate,
            count,
            self._geometry.alpha,
            slots.limit,
            BASES,
            TOP_K=topk_ids.shape[1],
            EXPERT_BYTES=kind.expert_bytes,
            ORDER_AT=kind.layout.order_offset,
            INTERMEDIATE_COLUMNS=kind.intermediate_columns,
            PANEL=kind.gate_up,
            **places(kind),
            ACTIVATION=self._geometry.activation,
            M=tile.rows,
            N=tile.columns,
            CHUNK=min(panel_sizes.chunk(kind.gate), panel_sizes.chunk(kind.gate_up)),
            **_product_type(hidden_states.dtype, kind.gate, kind.gate_up),
            **_parts(hidden_states.dtype, kind.gate, kind.gate_up),
            num_warps=tile.warps,
        )
        self._down_by_tiles(slots, intermediate, pairs, block_slots, count, outputs, tile)

    def _down_by_tiles(
        self,
        slots: LayerSlots,
        intermediate: torch.Tensor,
        pairs: torch.Tensor,
        block_slots: torch.Tensor,
        count: int,
        outputs: torch.Tensor,
        tile: launch.Tile,
    ) -> None:
        kind, down = slots.kind, slots.down
        gemm.down_tiles[(block_slots.shape[0], -(-kind.hidden_size // tile.columns))](
            intermediate,
            *down.pointers,
            pairs,
            block_slots,
            outputs,
            count,
            BASES,
            EXPERT_BYTES=kind.expert_bytes,
            DOWN_AT=kind.layout.down_offset,
            HIDDEN=kind.hidden_size,
            INTERMEDIATE_COLUMNS=kind.intermediate_columns,
            PANEL=kind.down,
            M=tile.rows,
            N=tile.columns,
            CHUNK=panel_sizes.chunk(kind.down),
            **_product_type(intermediate.dtype, kind.down),
            **_parts(intermediate.dtype, kind.down),
            num_warps=tile.warps,
        )

    def _by_dense_tiles(
        self,
        slots: LayerSlots,
        first: int,
        count: int,
        matrices: tuple[torch.Tensor, torch.Tensor],
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        intermediate: torch.Tensor,
        outputs: torch.Tensor,
        tile: launch.DenseTile,
    ) -> None:
        kind, gate_up, down = slots.kind, *matrices
        pairs, block_slots = align(slots, topk_ids, tile.rows, first, count)
        blocks, features = block_slots.shape[0], kind.gate_up_columns
        dense.gate_up_dense[(-(-features // tile.columns), blocks)](
            hidden_states,
            gate_up,
            slots.gate_up.floats,
            pairs,
            block_slots,
            intermediate,
            topk_ids.numel(),
            first,
            self._geometry.alpha,
            slots.limit,
            TOP_K=topk_ids.shape[1],
            EXPERT_BYTES=kind.expert_bytes,
            INTERMEDIATE_COLUMNS=kind.intermediate_columns,
            PANEL=kind.gate_up,
            **places(kind),
            ACTIVATION=self._geometry.activation,
            M=tile.rows,
            N=tile.columns,
            CHUNK=tile.chunk,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        dense.down_dense[(-(-kind.hidden_size // tile.columns), blocks)](
            intermediate,
            down,
            slots.down.floats,
            pairs,
            block_slots,
            outputs,
            topk_ids.numel(),
            first,
            EXPERT_BYTES=kind.expert_bytes,
            DOWN_AT=kind.layout.down_offset,
            HIDDEN=kind.hidden_size,
            INTERMEDIATE_COLUMNS=kind.intermediate_columns,
            PANEL=kind.down,
            PANELS=kind.layout.down_panels,
            M=tile.rows,
            N=tile.columns,
            CHUNK=tile.chunk,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _product_type(dtype: torch.dtype, *panels: PanelFormat) -> dict[str, Any]:
    """Returns what tiles are multiplied in, one for all; the wider of two has another precision."""
    types = [panel_sizes.multiplies_in(each, dtype) for each in panels]
    type_, precision = next((each for each in types if each[1] == "tf32"), types[-1])
    return {"TYPE": type_, "PRECISION": precision}


def _parts(dtype: torch.dtype, *panels: PanelFormat) -> dict[str, Any]:
    """Returns whether tiles multiply codes, part by part: PART is 0 where they do not."""
    return {
        "PART": PART if launch.by_parts(dtype, *panels) else 0,
        "BY_PAIRS": not triton.knobs.runtime.interpret,
    }
