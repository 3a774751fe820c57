"""The routed experts of a checkpoint: where each matrix lies and how it is quantised."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import MTP_PREFIX, LocatedLayout
from moebius.checkpoint.matrix_finder import MatrixFinder
from moebius.checkpoint.quantisation import read_schemes
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.stored_matrix import StoredMatrix
from moebius.kernels.source import SourceMatrix
from moebius.kernels.weight_formats import gate_up_format, ordered_format
from moebius.models.checkpoint import find_layout, open_index
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry

# What experts that lie apart from their model must have in common with it.
_OF_EXPERTS = ("hidden_size", "num_experts", "moe_intermediate_size", "activation", "has_bias")


_WAY_OUT = (
    "requantise them with --expert-dtype int4, int8 or bfloat16, or with float32 keep them exactly at 32 "
    "bits a weight"
)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One expert: gate and up `[I, H]`, down `[H, I]`."""

    gate: StoredMatrix | None  # None: experts have none.
    up: StoredMatrix
    down: StoredMatrix

    @property
    def all(self) -> tuple[StoredMatrix, ...]:
        """Those that there are, in this order."""
        return tuple(matrix for matrix in (self.gate, self.up, self.down) if matrix is not None)

    @property
    def has_bias(self) -> bool:
        """Returns whether any of them has one."""
        return any(matrix.bias is not None for matrix in self.all)

    @property
    def formats(self) -> tuple[str, str]:
        """Packed formats that keep gate and up, and down; "" where none does."""
        if self._sorts and not all(matrix.holds_integers for matrix in self.all):
            return "", ""
        gate_up = gate_up_format(*(matrix.packed_format for matrix in (self.gate or self.up, self.up)))
        return ordered_format(gate_up) if self.has_order else gate_up, self.down.packed_format

    @property
    def has_order(self) -> bool:
        """Returns whether gate and up are packed with their columns sorted by group."""
        return any(matrix.scheme.reorders for matrix in self.all[:-1])

    @property
    def is_rounded(self) -> bool:
        """Returns whether these formats only come near what is stored, as with most types of GGUF."""
        return any(matrix.is_rounded for matrix in self.all)

    def check_kept(self) -> None:
        """Raises CheckpointError naming a matrix that no packed format holds exactly."""
        sorts = self._sorts
        for matrix in self.all:
            if sorts and not matrix.holds_integers:
                raise CheckpointError(
                    f"{matrix.name!r} is {matrix.scheme.name} in an expert with columns in the order of "
                    "activations (desc_act), which can be kept where all of its matrices are whole ones of "
                    f"integers in groups; {_WAY_OUT}"
                )
            if not matrix.packed_format:
                raise CheckpointError(
                    f"{matrix.name!r} is {matrix.scheme.name} with scales of a group size or type that "
                    "experts can not keep; requantise them with --expert-dtype"
                )
        gate = self.gate or self.up
        if self.has_order and gate.packed_format != self.up.packed_format:
            raise CheckpointError(
                f"{gate.name!r} is {gate.packed_format}, {self.up.name!r} {self.up.packed_format}; with "
                f"columns in the order of activations (desc_act) both have to be the same: {_WAY_OUT}"
            )

    def channel_order(self, reader: SliceReader) -> NDArray[np.uint32] | None:
        """Returns the stored intermediate channels as they are packed, uint32 `[I]`; None: as they are
        stored.

        Down's columns are sorted by group; gate and up compute its channels in that order.
        """
        return self.down.column_order(reader) if self.down.scheme.reorders else None

    def read(
        self, reader: SliceReader, begin: int, end: int, keeps: bool
    ) -> tuple[SourceMatrix | None, SourceMatrix, SourceMatrix]:
        """Returns gate (None: there is none) and up `[I, H]`, down `[H, I]` of the channels from `begin` to
        `end`.

        `keeps`: for the packed `formats`, channels by `channel_order`; else as they are stored. Down's bias
        is the first channels': the parts of several servers are added. Raises CheckpointError naming a tensor
        that can not be read, or gate's and up's where they sort their columns differently.
        """
        if keeps and self._sorts:
            return self._read_sorted(reader, range(begin, end))
        channels = slice(begin, end)
        down = self.down.read(reader, cols=channels)
        gate = None if self.gate is None else self.gate.read(reader, rows=channels)
        return gate, self.up.read(reader, rows=channels), _first(down, begin)

    def _read_sorted(
        self, reader: SliceReader, channels: range
    ) -> tuple[SourceMatrix | None, SourceMatrix, SourceMatrix]:
        hidden = self.down.shape[0]
        of_channels = self.down.column_order(reader)
        order = self.up.column_order(reader)
        if self.gate is not None and not np.array_equal(order, self.gate.column_order(reader)):
            raise CheckpointError(
                f"{self.gate.name!r} and {self.up.name!r} have their columns in different groups (g_idx), "
                f"but experts keep one order for both; {_WAY_OUT}"
            )
        rows = of_channels[channels.start : channels.stop]
        kept = order if self.has_order else None
        gate, up = (
            None
            if matrix is None
            else replace(matrix.read_sorted(reader, rows, order, range(hidden)), order=kept)
            for matrix in (self.gate, self.up)
        )
        assert up is not None
        down = self.down.read_sorted(reader, np.arange(hidden, dtype=np.uint32), of_channels, channels)
        return gate, up, _first(down, channels.start)

    @property
    def _sorts(self) -> bool:
        return any(matrix.scheme.reorders for matrix in self.all)

    @property
    def intermediate_multiple(self) -> int:
        """The intermediate dimension can be divided at multiples of this: groups and blocks stay whole."""
        *rows, down = self.all
        return math.lcm(*(matrix.row_multiple for matrix in rows), down.col_multiple)

    @property
    def nbytes(self) -> int:
        """Stored bytes of codes and scales."""
        return sum(matrix.nbytes for matrix in self.all)


def _first(down: SourceMatrix, begin: int) -> SourceMatrix:
    """Servers' outputs are summed: the bias is the first one's."""
    return replace(down, bias=None) if begin > 0 else down


def _other_model_type(path: str, model: MoeGeometry) -> str:
    """Returns the `model_type` that names experts of `model` in another checkpoint than its own.

    Raises CheckpointError naming what experts there are of another size or kind.
    """
    other = read_geometry(path, mtp_heads=model.mtp_heads)
    for name in _OF_EXPERTS:
        found, wanted = getattr(other, name), getattr(model, name)
        if found != wanted:
            raise CheckpointError(
                f"expert_checkpoint {path}: {name} is {found}; allowed: {wanted}, as the model has it"
            )
    missing = sorted(set(model.moe_layers) - set(other.moe_layers))
    if missing:
        raise CheckpointError(f"expert_checkpoint {path}: no experts in layers {missing} of the model")
    return other.model_type


@dataclass(frozen=True)
class ExpertCheckpoint:
    """Filled by `open`."""

    model: MoeGeometry
    layout: LocatedLayout
    finder: MatrixFinder

    @staticmethod
    def open(model_path: str, model: MoeGeometry, expert_checkpoint: str = "") -> ExpertCheckpoint:
        """Reads headers and configuration only. Raises CheckpointError.

        `expert_checkpoint`: a directory or GGUF model that has the experts of `model`, with or without all
        else of it, in whatever format; empty: `model_path` does.
        """
        path = expert_checkpoint or model_path
        index = open_index(path)
        named_as = _other_model_type(path, model) if expert_checkpoint else model.model_type
        layout = find_layout(index, named_as)
        if model.mtp_heads and any(name.startswith(MTP_PREFIX) for name in index.tensors):
            layout = replace(layout, first_mtp_layer=model.num_layers - model.mtp_heads)
        finder = MatrixFinder(index.tensors, index.directory, read_schemes(path))
        return ExpertCheckpoint(model, layout, finder)

    def expert(self, layer: int, expert: int) -> ExpertMatrices:
        """Returns all matrices. Raises CheckpointError as `matrix` does."""
        gate = self.matrix(layer, expert, "gate") if self.model.is_gated else None
        return ExpertMatrices(gate, self.matrix(layer, expert, "up"), self.matrix(layer, expert, "down"))

    def matrix(self, layer: int, expert: int, which: str) -> StoredMatrix:
        """Returns the matrix "gate", "up" or "down".

        Raises CheckpointError naming a tensor that is missing, mis-shaped, or of a type that no scheme of the
        checkpoint allows.
        """
        template = self.layout.layout.template(which)
        number, first, width = self.model.stored_place(expert)
        size = (width, self.model.hidden_size)
        shape = size[::-1] if which == "down" else size
        found = self.finder.find(self.layout.name(layer, number, which), shape, template, number)
        if width == self.model.moe_intermediate_size:
            return found
        return found.channels(range(first, first + self.model.moe_intermediate_size), which == "down")
