"""`ResidentKernels` by Triton: launches only, with shapes known on the host."""

from __future__ import annotations

import functools

import torch

from gpu_service.experts.resident.experts import LayerSlots, ResidentKernels
from gpu_service.experts.resident.triton_kernels import gemm, launch, routing
from gpu_service.ops.triton.jit import launch_fitting, next_power_of_2
from moebius.models.geometry import MoeGeometry

_IDS_BLOCK = 256
_COMBINE_BLOCK = 512
_CHUNK = 1024


class TritonResidentKernels(ResidentKernels):
    """Few rows: three launches. More: six, through blocks of pairs that share an expert."""

    captures = True

    def __init__(self, geometry: MoeGeometry, few_rows: int = launch.FEW_ROWS) -> None:
        self._geometry = geometry
        self._few_rows = few_rows

    def cpu_ids(self, slots: LayerSlots, topk_ids: torch.Tensor) -> torch.Tensor:
        output, count = torch.empty_like(topk_ids), topk_ids.numel()
        if count:
            grid = (-(-count // _IDS_BLOCK),)
            routing.cpu_ids_kernel[grid](
                topk_ids.contiguous(), slots.slot_of_expert, output, count, BLOCK=_IDS_BLOCK, num_warps=1
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
        hidden_states, topk_ids = hidden_states.contiguous(), topk_ids.contiguous()
        pairs = topk_ids.numel()
        intermediate = hidden_states.new_empty((pairs, slots.kind.intermediate_columns))
        outputs = hidden_states.new_empty((pairs, hidden), dtype=torch.float32)
        if num_rows <= self._few_rows:
            self._by_rows(slots, hidden_states, topk_ids, intermediate, outputs)
        else:
            tile = launch.tile(pairs, self._geometry.num_experts)
            launch_fitting(
                "resident experts",
                (tile, slots.kind, hidden_states.dtype),
                hidden_states.device,
                launch.with_smaller(tile),
                functools.partial(self._by_tiles, slots, hidden_states, topk_ids, intermediate, outputs),
            )
        block = min(_COMBINE_BLOCK, next_power_of_2(hidden))
        routing.combine[(num_rows, -(-hidden // block))](
            outputs,
            result if partial is None else partial,
            result,
            topk_ids,
            slots.slot_of_expert,
            topk_weights.contiguous(),
            TOP_K=topk_ids.shape[1],
            HIDDEN=hidden,
            HAS_PARTIAL=partial is not None,
            BLOCK=block,
        )
        return result

    def warm_up(self, slots: LayerSlots, max_rows: int, dtype: torch.dtype) -> None:
        """A call for each kind of tile, and one for few rows. No id is chosen."""
        geometry, device = self._geometry, slots.weights.device
        for rows_ in launch.sizes_to_warm_up(geometry.num_experts, geometry.top_k, self._few_rows, max_rows):
            ids = torch.full((rows_, geometry.top_k), -1, dtype=torch.int32, device=device)
            hidden_states = torch.zeros((rows_, geometry.hidden_size), dtype=dtype, device=device)
            weights = torch.zeros(ids.shape, dtype=torch.float32, device=device)
            for partial in (None, hidden_states, hidden_states.float()):
                self.forward(slots, hidden_states, self.cpu_ids(slots, ids), weights, partial)

    def _by_rows(
        self,
        slots: LayerSlots,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        intermediate: torch.Tensor,
        outputs: torch.Tensor,
    ) -> None:
        kind, pairs = slots.kind, topk_ids.numel()
        gate_up, down = slots.gate_up, slots.down
        gemm.gate_up_rows[(pairs, kind.layout.intermediate_blocks)](
            hidden_states,
            gate_up.words,
            gate_up.scales,
            gate_up.bytes,
            gate_up.floats,
            topk_ids,
            slots.slot_of_expert,
            intermediate,
            self._geometry.alpha,
            slots.limit,
            TOP_K=topk_ids.shape[1],
            EXPERT_BYTES=kind.expert_bytes,
            INTERMEDIATE_COLUMNS=kind.intermediate_columns,
            PANEL=kind.gate_up,
            ACTIVATION=self._geometry.activation,
            LINES=launch.lines(kind.gate_up),
            num_warps=launch.warps(launch.lines(kind.gate_up)),
        )
        gemm.down_rows[(pairs, kind.layout.down_panels)](
            intermediate,
            down.words,
            down.scales,
            down.bytes,
            down.floats,
            topk_ids,
            slots.slot_of_expert,
            outputs,
            EXPERT_BYTES=kind.expert_bytes,
            DOWN_AT=kind.layout.down_offset,
            HIDDEN=kind.hidden_size,
            INTERMEDIATE_COLUMNS=kind.intermediate_columns,
            PANEL=kind.down,
            LINES=launch.lines(kind.down),
            UNROLLED=launch.UNROLLED,
            num_warps=launch.warps(launch.lines(kind.down)),
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
        kind, count = slots.kind, topk_ids.numel()
        gate_up, down = slots.gate_up, slots.down
        pairs, block_slots = align(slots, topk_ids, tile.rows)
        type_, precision = launch.multiplies_in(kind.gate_up, hidden_states.dtype)
        gemm.gate_up_tiles[(block_slots.shape[0], -(-kind.intermediate_columns // tile.columns))](
            hidden_states,
            gate_up.words,
            gate_up.scales,
            gate_up.bytes,
            gate_up.floats,
            pairs,
            block_slots,
            intermediate,
            count,
            self._geometry.alpha,
            slots.limit,
            TOP_K=topk_ids.shape[1],
            EXPERT_BYTES=kind.expert_bytes,
            INTERMEDIATE_COLUMNS=kind.intermediate_columns,
            PANEL=kind.gate_up,
            ACTIVATION=self._geometry.activation,
            M=tile.rows,
            N=tile.columns,
            TYPE=type_,
            PRECISION=precision,
            num_warps=tile.warps,
        )
        type_, precision = launch.multiplies_in(kind.down, hidden_states.dtype)
        gemm.down_tiles[(block_slots.shape[0], -(-kind.hidden_size // tile.columns))](
            intermediate,
            down.words,
            down.scales,
            down.bytes,
            down.floats,
            pairs,
            block_slots,
            outputs,
            count,
            EXPERT_BYTES=kind.expert_bytes,
            DOWN_AT=kind.layout.down_offset,
            HIDDEN=kind.hidden_size,
            INTERMEDIATE_COLUMNS=kind.intermediate_columns,
            PANEL=kind.down,
            M=tile.rows,
            N=tile.columns,
            TYPE=type_,
            PRECISION=precision,
            num_warps=tile.warps,
        )


def align(
    slots: LayerSlots, topk_ids: torch.Tensor, rows_per_block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs by slot, each slot's padded to whole blocks; int32 `[blocks * rows_per_block]` and `[blocks]`.

    A pair is row * K + choice; padding is their number, a block without a slot -1.
    """
    count = topk_ids.numel()
    blocks = launch.max_blocks(count, slots.count, rows_per_block)
    pairs = topk_ids.new_full((blocks * rows_per_block,), count)
    block_slots = topk_ids.new_full((blocks,), -1)
    counts = topk_ids.new_empty((slots.count,))
    grid = (slots.count,)
    routing.count_pairs[grid](topk_ids, slots.slot_of_expert, counts, count, CHUNK=_CHUNK)
    routing.place_pairs[grid](
        topk_ids,
        slots.slot_of_expert,
        counts,
        pairs,
        block_slots,
        count,
        slots.count,
        MAX_SLOTS=next_power_of_2(slots.slot_of_expert.shape[0]),
        BLOCK=rows_per_block,
        CHUNK=_CHUNK,
    )
    return pairs, block_slots
