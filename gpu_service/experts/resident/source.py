"""Experts of a checkpoint in the packed form of the CPU experts: same codes, same scales, same rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_service.experts.resident.content import SlotContent
from gpu_service.experts.resident.panels import LayerFormat, layer_format
from moebius import _kernels
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.reader import SliceReader
from moebius.experts.slices import REQUANTISED, rank_intermediate_range
from moebius.kernels.weight_formats import gate_up_format, split_gate_up
from moebius.models.expert_checkpoint import ExpertCheckpoint, ExpertMatrices
from moebius.models.geometry import MoeGeometry


@dataclass(frozen=True, eq=False)
class PackedExpert:
    """What was packed into memory; filled by `PackedExpertSource.fill`."""

    content: SlotContent
    # Over the weights of matrices that had to be rounded; 0 when packed exactly.
    squared_error: float
    squared_reference: float


class PackedExpertSource:
    """Packs single experts, or this rank's channels of them; thread safe with a reader per thread."""

    def __init__(
        self,
        model_path: str,
        geometry: MoeGeometry,
        expert_dtype: str,
        *,
        expert_checkpoint: str = "",
        widest: str = "float32",
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        """`widest`: "bfloat16" rounds experts stored in float32 to what the engine computes in."""
        self.geometry = geometry
        self._checkpoint = ExpertCheckpoint.open(model_path, geometry, expert_checkpoint)
        self._target = REQUANTISED.get(expert_dtype)
        self._widest = widest
        self._ranks = (tp_rank, tp_size)
        self._formats: dict[int, LayerFormat] = {}

    def format_of(self, layer: int) -> LayerFormat:
        """Returns how the layer's experts are packed: as its first one is stored, unless `expert_dtype` says
        else.

        Raises CheckpointError, and UserError when the channels cannot be divided among the ranks.
        """
        if layer not in self._formats:
            found = self._checkpoint.expert(layer, 0)
            if self._target is None:
                found.check_kept()
            begin, end = self._span(found)
            self._formats[layer] = layer_format(
                *self._formats_of(found),
                self.geometry.hidden_size,
                end - begin,
                found.has_bias,
                self.geometry.is_gated,
            )
        return self._formats[layer]

    def read(self, layer: int, expert: int, reader: SliceReader) -> NDArray[np.uint8]:
        """Reads and packs: uint8 `[expert_bytes]`. Raises as `fill`."""
        packed = np.empty(self.format_of(layer).expert_bytes, np.uint8)
        self.fill(layer, [expert], reader, [packed])
        return packed

    def fill(
        self, layer: int, experts: Sequence[int], reader: SliceReader, into: Sequence[NDArray[np.uint8]]
    ) -> list[PackedExpert]:
        """Reads and packs some experts of a layer, each into uint8 `[expert_bytes]` of the caller's.

        Raises CheckpointError naming a tensor, or a format other than the layer's.
        """
        kind, found = self.format_of(layer), [self._checkpoint.expert(layer, expert) for expert in experts]
        for one in found:
            self._check_format(one, kind)
        spans = [self._span(one) for one in found]
        if self._ranks == (0, 1):
            reader.expect(array for one in found for matrix in one.all for array in matrix.stored)
        keeps = self._target is None
        sources = [one.read(reader, *span, keeps=keeps) for one, span in zip(found, spans, strict=True)]
        # By the seeds of `content_of`.
        packed = _kernels.pack_experts(
            *kind.formats, sources, has_bias=kind.gate_up.has_bias, into=into, seeds=experts
        )
        return [
            PackedExpert(SlotContent(expert, digest, expert), error, reference)
            for expert, (digest, error, reference) in zip(experts, packed, strict=True)
        ]

    def _check_format(self, found: ExpertMatrices, kind: LayerFormat) -> None:
        formats = self._formats_of(found)
        if formats != kind.formats:
            raise CheckpointError(
                f"{found.all[0].name!r} is {'/'.join(formats)}, expert 0 of its layer "
                f"{'/'.join(kind.formats)}; requantise them with --expert-dtype"
            )

    def _formats_of(self, found: ExpertMatrices) -> tuple[str, str]:
        """Returns the formats of gate and up, and of down, as they are packed here."""
        gate_up, down = found.formats
        gate, up = (self._format(name) for name in split_gate_up(gate_up))
        return gate_up_format(gate, up), self._format(down)

    def _format(self, stored: str) -> str:
        if self._target is not None:
            return self._target
        return self._widest if stored == "float32" else stored

    def _span(self, found: ExpertMatrices) -> tuple[int, int]:
        """Returns this rank's intermediate channels; quantisation groups stay whole."""
        size = self.geometry.moe_intermediate_size
        return rank_intermediate_range(size, found.intermediate_multiple, self._target, *self._ranks)
