"""The ways checkpoints store routed experts, and how to read one matrix out of each.

Logical matrices are always `[out, in]`: gate and up `[I, H]`, down `[H, I]`. A layout says which tensor
holds each, which part of it, and whether it lies transposed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import CheckpointIndex, TensorInfo
from moebius.checkpoint.reader import Array, SliceReader

MATRICES = ("gate", "up", "down")

# Where decoder layers may hang: text models, and the text towers of multimodal ones (Kimi's last, as
# transformers 5 writes it).
LAYER_PREFIXES = (
    "model.layers.",
    "model.language_model.layers.",
    "language_model.model.layers.",
    "language_model.model.blocks.",
    "backbone.layers.",
    # DeepSeek-V4.
    "layers.",
)
# Where those of multi-token prediction hang that are not numbered after the model's own.
MTP_PREFIX = "mtp.layers."


@dataclass(frozen=True, slots=True)
class MatrixTemplate:
    """Where one of the three matrices lies in a layout."""

    name: str  # Name below `<prefix><layer>.`; "{expert}" is replaced where each expert has its own tensor.
    # Of the `interleave` matrices that share the stored rows, which one this is.
    part: int = 0
    parts: int = 1
    interleaved: bool = False  # Parts alternate row by row instead of following one another.
    transposed: bool = False  # Stored as [in, out].

    @property
    def stacked(self) -> bool:
        """All experts in one tensor, the expert being its first axis."""
        return "{expert}" not in self.name


@dataclass(frozen=True, slots=True)
class ExpertTensorLayout:
    """One way of storing routed experts; `EXPERT_TENSOR_LAYOUTS` has them all."""

    name: str
    gate: MatrixTemplate
    up: MatrixTemplate
    down: MatrixTemplate
    example: str  # A tensor name as published checkpoints have it.

    def template(self, matrix: str) -> MatrixTemplate:
        """Returns the template of "gate", "up" or "down"."""
        templates = {"gate": self.gate, "up": self.up, "down": self.down}
        return templates[matrix]


def _fused(
    name: str, gate_up: str, down: str, example: str, interleaved: bool = False, transposed: bool = False
) -> ExpertTensorLayout:
    return ExpertTensorLayout(
        name,
        MatrixTemplate(gate_up, 0, 2, interleaved, transposed),
        MatrixTemplate(gate_up, 1, 2, interleaved, transposed),
        MatrixTemplate(down, transposed=transposed),
        example,
    )


def _separate(name: str, stem: str, gate: str, up: str, down: str, example: str) -> ExpertTensorLayout:
    return ExpertTensorLayout(
        name,
        MatrixTemplate(f"{stem}.{gate}.weight"),
        MatrixTemplate(f"{stem}.{up}.weight"),
        MatrixTemplate(f"{stem}.{down}.weight"),
        example,
    )


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_PER_EXPERT = "model.layers.3.mlp.experts.7.gate_proj.weight"
_FUSED = "model.language_model.layers.3.mlp.experts.gate_up_proj"
EXPERT_TENSOR_LAYOUTS: Mapping[str, ExpertTensorLayout] = {
    layout.name: layout
    for layout in (
        _separate("per_expert", "mlp.experts.{expert}", *_PROJECTIONS, _PER_EXPERT),
        _separate(
            "per_expert_w123",
            "block_sparse_moe.experts.{expert}",
            "w1",
            "w3",
            "w2",
            "model.layers.3.block_sparse_moe.experts.7.w1.weight",
        ),
        _separate(
            "per_expert_ffn", "ffn.experts.{expert}", "w1", "w3", "w2", "layers.3.ffn.experts.7.w1.weight"
        ),
        # Mistral Large 4's.
        _separate(
            "per_expert_in_layer", "experts.{expert}", "w1", "w3", "w2", "layers.3.experts.7.w1.weight"
        ),
        _fused("fused", *_STACKED, _FUSED),  # [E, 2I, H] and [E, H, I]
        _fused("fused_transposed", *_STACKED, _FUSED, transposed=True),  # [E, H, 2I] and [E, I, H]
        # Gemma 4, next to the layer's MLP: [E, 2I, H] and [E, H, I].
        _fused(
            "fused_in_layer",
            "experts.gate_up_proj",
            "experts.down_proj",
            "model.language_model.layers.3.experts.gate_up_proj",
        ),
        # The same after quantisers took them apart.
        _separate(
            "per_expert_beside",
            "experts.{expert}",
            *_PROJECTIONS,
            "model.language_model.layers.3.experts.7.gate_proj.weight",
        ),
        # Llama 4: [E, H, 2I] and [E, I, H].
        _fused(
            "fused_feed_forward",
            "feed_forward.experts.gate_up_proj",
            "feed_forward.experts.down_proj",
            "language_model.model.layers.3.feed_forward.experts.gate_up_proj",
            transposed=True,
        ),
        _fused(
            "fused_interleaved",
            *_STACKED,
            "model.layers.3.mlp.experts.gate_up_proj",
            interleaved=True,
            transposed=True,
        ),
        # What GGUF files have, under canonical names; gate and up in one where their converter was asked to.
        _fused(
            "stacked_gate_up",
            "mlp.experts.gate_up_proj.weight",
            "mlp.experts.down_proj.weight",
            "model.layers.3.mlp.experts.gate_up_proj.weight",
        ),
        _separate(
            "stacked_projections",
            "mlp.experts",
            *_PROJECTIONS,
            "model.layers.3.mlp.experts.gate_proj.weight",
        ),
        # Nemotron-H's, which have no gate.
        _separate(
            "per_expert_mixer",
            "mixer.experts.{expert}",
            *_PROJECTIONS,
            "backbone.layers.3.mixer.experts.7.up_proj.weight",
        ),
        # LFM2's.
        _separate(
            "per_expert_w123_feed_forward",
            "feed_forward.experts.{expert}",
            "w1",
            "w3",
            "w2",
            "model.layers.3.feed_forward.experts.7.w1.weight",
        ),
        # Jamba's.
        _separate(
            "per_expert_feed_forward",
            "feed_forward.experts.{expert}",
            *_PROJECTIONS,
            "model.layers.3.feed_forward.experts.7.gate_proj.weight",
        ),
        # Granite's.
        _fused(
            "stacked_linears",
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.output_linear.weight",
            "model.layers.3.block_sparse_moe.input_linear.weight",
        ),
        _fused(
            "fused_block_sparse",
            "block_sparse_moe.experts.gate_up_proj",
            "block_sparse_moe.experts.down_proj",
            "model.layers.3.block_sparse_moe.experts.gate_up_proj",
        ),
        _separate("stacked", "moe", *_PROJECTIONS, "model.layers.3.moe.gate_proj.weight"),
        # Step-3.5 after quantisers took its experts apart: now, and what their earlier versions wrote.
        _separate(
            "per_expert_step",
            "moe.experts.{expert}",
            *_PROJECTIONS,
            "model.layers.3.moe.experts.7.gate_proj.weight",
        ),
        _separate(
            "per_expert_step_old", "moe.{expert}", *_PROJECTIONS, "model.layers.3.moe.7.gate_proj.weight"
        ),
    )
}

_PREFIX = "(?:" + "|".join(re.escape(prefix) for prefix in (*LAYER_PREFIXES, MTP_PREFIX)) + r")\d+\."
# Anything below an expert container, so that scales and biases of quantised experts count as well; not the
# router's bias, which Laguna keeps there.
_ROUTED_EXPERT = re.compile(
    _PREFIX
    + r"(?:(?:mlp|mixer|feed_forward|ffn)\.experts\.(?!e_score_correction_bias$)|experts\."
    + r"|block_sparse_moe\.(?:experts|input_linear|output_linear)\."
    + r"|moe\.(?:(?:gate|up|down)_proj|experts|\d+)\.)"
)


def is_routed_expert(name: str) -> bool:
    """Returns whether a checkpoint name belongs to a routed expert (weights or their scales), in
    any layout.
    """
    return _ROUTED_EXPERT.match(name) is not None


@dataclass(frozen=True, slots=True)
class MatrixSource:
    """One expert's logical `[out, in]` matrix inside a stored tensor; filled by `LocatedLayout.source`."""

    tensor: TensorInfo
    expert_index: int | None  # Index of the expert on the first axis of a stacked tensor.
    # The stored positions of the logical rows (on the second axis when transposed).
    out: range
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Logical `(out, in)`."""
        stored = self.tensor.shape[-2:]
        return len(self.out), stored[0] if self.transposed else stored[1]

    def read(self, reader: SliceReader, rows: slice | None = None, cols: slice | None = None) -> Array:
        """Returns logical `[rows, cols]` as a new contiguous array; bfloat16 as uint16."""
        picked = self.out[rows] if rows is not None else self.out
        out = slice(picked.start, min(picked.stop, self.out.stop), picked.step)
        if not self.transposed:
            return reader.read_slice(self.tensor, out, cols, self.expert_index)
        return np.ascontiguousarray(reader.read_slice(self.tensor, cols, out, self.expert_index).T)


@dataclass(frozen=True, slots=True)
class ExpertSources:
    """The three matrices of one expert: gate and up `[I, H]`, down `[H, I]`."""

    gate: MatrixSource
    up: MatrixSource
    down: MatrixSource


@dataclass(frozen=True)
class LocatedLayout:
    """A layout together with the checkpoint it was found in; filled by `models.checkpoint.find_layout`."""

    index: CheckpointIndex
    layout: ExpertTensorLayout
    prefix: str
    # The layer that `MTP_PREFIX` counts from; None: layers of multi-token prediction have numbers as others.
    first_mtp_layer: int | None = None

    def name(self, layer: int, expert: int, matrix: str) -> str:
        """Returns the tensor that holds "gate", "up" or "down"."""
        prefix, number = self.prefix, layer
        if self.first_mtp_layer is not None and layer >= self.first_mtp_layer:
            prefix, number = MTP_PREFIX, layer - self.first_mtp_layer
        return f"{prefix}{number}.{self.layout.template(matrix).name.format(expert=expert)}"

    def source(self, layer: int, expert: int, matrix: str) -> MatrixSource:
        """Raises CheckpointError naming the tensor when it is missing or has no place for the matrix."""
        template = self.layout.template(matrix)
        info = self.index[self.name(layer, expert, matrix)]
        rank = 3 if template.stacked else 2
        if len(info.shape) != rank:
            raise CheckpointError(f"tensor {info.name!r} has shape {list(info.shape)}; {rank} axes expected")
        if template.stacked and expert >= info.shape[0]:
            raise CheckpointError(
                f"tensor {info.name!r} has {info.shape[0]} experts; expert {expert} is missing"
            )
        stored = info.shape[-1] if template.transposed else info.shape[-2]
        if stored % template.parts:
            raise CheckpointError(f"tensor {info.name!r} of shape {list(info.shape)} cannot hold gate and up")
        size = stored // template.parts
        if template.interleaved:
            out = range(template.part, stored, template.parts)
        else:
            out = range(template.part * size, (template.part + 1) * size)
        return MatrixSource(info, expert if template.stacked else None, out, template.transposed)

    def tensors(self, layer: int, expert: int) -> ExpertSources:
        """Returns the three matrices of one expert.

        Raises CheckpointError naming a missing or impossible tensor.
        """
        return ExpertSources(*(self.source(layer, expert, matrix) for matrix in MATRICES))
