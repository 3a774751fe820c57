"""All routed experts of a checkpoint: where each matrix lies and how it is quantised."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import MATRICES, LocatedLayout
from moebius.checkpoint.index import CheckpointIndex
from moebius.checkpoint.matrix_finder import MatrixFinder
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.checkpoint.quantisation import read_schemes
from moebius.checkpoint.rules import find_layout
from moebius.checkpoint.stored_matrix import StoredMatrix


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One expert: gate and up `[I, H]`, down `[H, I]`."""

    gate: StoredMatrix
    up: StoredMatrix
    down: StoredMatrix

    @property
    def has_bias(self) -> bool:
        """Whether any of the three has one."""
        return any(matrix.bias is not None for matrix in (self.gate, self.up, self.down))

    @property
    def formats(self) -> tuple[str, str]:
        """Packed formats that keep gate and up, and down."""
        return self.gate.packed_format, self.down.packed_format

    @property
    def is_rounded(self) -> bool:
        """Whether these formats only come near what is stored, as with most types of GGUF."""
        return any(matrix.is_rounded for matrix in (self.gate, self.up, self.down))

    def check_kept(self) -> None:
        """Raises CheckpointError naming a matrix that no packed format holds exactly."""
        for matrix in (self.gate, self.up, self.down):
            if not matrix.packed_format:
                raise CheckpointError(
                    f"{matrix.name!r} is {matrix.scheme.name} with scales of a group size or type that "
                    "experts can not keep; requantise them with --expert-dtype"
                )

    @property
    def neuron_multiple(self) -> int:
        """The intermediate dimension can be divided at multiples of this: groups and blocks stay whole."""
        return math.lcm(self.gate.row_multiple, self.up.row_multiple, self.down.col_multiple)

    @property
    def nbytes(self) -> int:
        """Stored bytes of codes and scales."""
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes


@dataclass(frozen=True)
class ExpertCheckpoint:
    """Filled by `open`."""

    model: MoeGeometry
    layout: LocatedLayout
    finder: MatrixFinder

    @staticmethod
    def open(model_path: str, model: MoeGeometry) -> ExpertCheckpoint:
        """Reads headers and configuration only. Raises CheckpointError."""
        index = CheckpointIndex.open(model_path)
        layout = find_layout(index, model.model_type)
        finder = MatrixFinder(index.tensors, index.directory, read_schemes(model_path))
        return ExpertCheckpoint(model, layout, finder)

    def expert(self, layer: int, expert: int) -> ExpertMatrices:
        """The three matrices. Raises CheckpointError as `matrix` does, or when gate and up differ."""
        found = ExpertMatrices(*(self.matrix(layer, expert, matrix) for matrix in MATRICES))
        if found.gate.packed_format != found.up.packed_format:
            raise CheckpointError(
                f"{found.gate.name!r} is {found.gate.packed_format}, {found.up.name!r} "
                f"{found.up.packed_format}; both have to be the same"
            )
        return found

    def matrix(self, layer: int, expert: int, which: str) -> StoredMatrix:
        """ "gate", "up" or "down".

        Raises CheckpointError naming a tensor that is missing, mis-shaped, or of a type that no scheme of the
        checkpoint allows.
        """
        template = self.layout.layout.template(which)
        size = (self.model.moe_intermediate_size, self.model.hidden_size)
        shape = size[::-1] if which == "down" else size
        return self.finder.find(self.layout.name(layer, expert, which), shape, template, expert)
