"""The routed experts of a checkpoint: where each matrix lies and how it is quantised."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import LocatedLayout
from moebius.checkpoint.matrix_finder import MatrixFinder
from moebius.checkpoint.quantisation import read_schemes
from moebius.checkpoint.stored_matrix import StoredMatrix
from moebius.models.checkpoint import find_layout, open_index
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry

# What experts that lie apart from their model must have in common with it.
_OF_EXPERTS = ("hidden_size", "num_experts", "moe_intermediate_size", "activation", "has_bias")


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
        """Whether any of them has one."""
        return any(matrix.bias is not None for matrix in self.all)

    @property
    def formats(self) -> tuple[str, str]:
        """Packed formats that keep gate and up, and down."""
        return self.up.packed_format, self.down.packed_format

    @property
    def is_rounded(self) -> bool:
        """Whether these formats only come near what is stored, as with most types of GGUF."""
        return any(matrix.is_rounded for matrix in self.all)

    def check_kept(self) -> None:
        """Raises CheckpointError naming a matrix that no packed format holds exactly."""
        for matrix in self.all:
            if matrix.scheme.reorders:
                raise CheckpointError(
                    f"{matrix.name!r} is {matrix.scheme.name} with columns in the order of activations "
                    "(desc_act), which experts can not keep; requantise them with --expert-dtype int4, int8 "
                    "or bfloat16, or with float32 keep them exactly at 32 bits a weight"
                )
            if not matrix.packed_format:
                raise CheckpointError(
                    f"{matrix.name!r} is {matrix.scheme.name} with scales of a group size or type that "
                    "experts can not keep; requantise them with --expert-dtype"
                )

    @property
    def intermediate_multiple(self) -> int:
        """The intermediate dimension can be divided at multiples of this: groups and blocks stay whole."""
        *rows, down = self.all
        return math.lcm(*(matrix.row_multiple for matrix in rows), down.col_multiple)

    @property
    def nbytes(self) -> int:
        """Stored bytes of codes and scales."""
        return sum(matrix.nbytes for matrix in self.all)


def _other_model_type(path: str, model: MoeGeometry) -> str:
    """The `model_type` that names experts of `model` in another checkpoint than its own.

    Raises CheckpointError naming what experts there are of another size or kind.
    """
    other = read_geometry(path)
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
        finder = MatrixFinder(index.tensors, index.directory, read_schemes(path))
        return ExpertCheckpoint(model, layout, finder)

    def expert(self, layer: int, expert: int) -> ExpertMatrices:
        """All matrices. Raises CheckpointError as `matrix` does, or when gate and up differ."""
        gate = self.matrix(layer, expert, "gate") if self.model.is_gated else None
        found = ExpertMatrices(gate, self.matrix(layer, expert, "up"), self.matrix(layer, expert, "down"))
        if gate is not None and gate.packed_format != found.up.packed_format:
            raise CheckpointError(
                f"{gate.name!r} is {gate.packed_format}, {found.up.name!r} "
                f"{found.up.packed_format}; both have to be the same"
            )
        return found

    def matrix(self, layer: int, expert: int, which: str) -> StoredMatrix:
        """ "gate", "up" or "down".

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
