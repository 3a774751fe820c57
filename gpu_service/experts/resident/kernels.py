"""What a device computes of resident experts; the torch reference defines it and runs anywhere."""

from __future__ import annotations

from abc import ABC, abstractmethod

import structlog
import torch
from torch.nn import functional

from gpu_service.experts.local_client import EXPERT_ACTIVATIONS
from gpu_service.experts.resident.slots import LayerSlots
from gpu_service.experts.resident.unpack import UnpackedMatrix, unpack_expert
from moebius.checkpoint.moe_config import MoeGeometry

_log = structlog.get_logger(__name__)


class ResidentKernels(ABC):
    """Free of state; T = token rows, K = experts per row, H = hidden size."""

    # Whether calls only launch work, with shapes known on the host, so that they may be captured.
    captures = False

    @abstractmethod
    def cpu_ids(self, slots: LayerSlots, topk_ids: torch.Tensor) -> torch.Tensor:
        """int32 `[T, K]`: a new tensor with -1 in place of resident experts; -1 stays."""

    @abstractmethod
    def forward(
        self,
        slots: LayerSlots,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        partial: torch.Tensor | None,
    ) -> torch.Tensor:
        """float32 `[T, H]`: `partial` (any floating type; None: zeros) plus the weighted resident experts.

        hidden_states `[T, H]`, topk_ids int32 `[T, K]`, topk_weights float32 `[T, K]`. Ids that are not
        resident, -1 too, are skipped. A float32 `partial` is added to in place and returned.
        """

    def warm_up(self, slots: LayerSlots, max_rows: int, dtype: torch.dtype) -> None:
        """Compiles what `forward` may need for layers of this format, and up to so many rows of a dtype."""
        return


class TorchResidentKernels(ResidentKernels):
    """The reference: float32 throughout, expert after expert. Reads ids on the host."""

    def __init__(self, geometry: MoeGeometry) -> None:
        self._geometry = geometry

    def cpu_ids(self, slots: LayerSlots, topk_ids: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        slot = slots.slot_of_expert[topk_ids.clamp(min=0).long()]
        return torch.where(slot >= 0, -1, topk_ids)

    def forward(
        self,
        slots: LayerSlots,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        partial: torch.Tensor | None,
    ) -> torch.Tensor:
        """See the base class."""
        rows_in = hidden_states.float()
        output = torch.zeros_like(rows_in)
        chosen = set(topk_ids.flatten().tolist())
        for slot, expert in sorted(enumerate(slots.expert_of_slot), key=lambda pair: pair[1]):
            if expert < 0 or expert not in chosen:
                continue
            gate, up, down = unpack_expert(slots.kind, slots.weights[slot])
            rows, choices = (topk_ids == expert).nonzero(as_tuple=True)
            activation = EXPERT_ACTIVATIONS[self._geometry.activation]
            picked = rows_in[rows]
            neurons = activation(
                _linear(picked, gate), _linear(picked, up), self._geometry.alpha, slots.limit
            )
            output.index_add_(0, rows, _linear(neurons, down) * topk_weights[rows, choices, None])
        if partial is None:
            return output
        return partial.add_(output) if partial.dtype == torch.float32 else partial.float().add_(output)


def _linear(rows: torch.Tensor, matrix: UnpackedMatrix) -> torch.Tensor:
    return functional.linear(rows, matrix.weight, matrix.bias)


def make_kernels(geometry: MoeGeometry, device: torch.device) -> ResidentKernels:
    """Triton's on a GPU, torch's elsewhere and, with a warning, where Triton is not installed."""
    if device.type != "cuda":
        return TorchResidentKernels(geometry)
    try:
        from gpu_service.experts.resident.triton_kernels.backend import TritonResidentKernels
    except ImportError as error:
        _log.warning(
            "no Triton: resident experts are computed by torch, slowly and eagerly", error=str(error)
        )
        return TorchResidentKernels(geometry)
    return TritonResidentKernels(geometry)
