"""A checkpoint opened by its family: tensors, layers, routed experts and how these are quantised."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import EXPERT_TENSOR_LAYOUTS, LAYER_PREFIXES, LocatedLayout
from moebius.checkpoint.gguf.files import is_gguf
from moebius.checkpoint.index import CheckpointIndex, TensorInfo, open_safetensors
from moebius.checkpoint.matrix_finder import MatrixFinder
from moebius.checkpoint.quantisation import read_schemes
from moebius.checkpoint.stored_matrix import StoredMatrix
from moebius.models.geometry import MoeGeometry
from moebius.models.registry import family_of, gguf_family


def open_index(directory: str | Path) -> CheckpointIndex:
    """All tensors of a directory or GGUF model, those of GGUF under canonical names, from headers alone.

    Raises CheckpointError naming the file or tensor that is missing, malformed, twice there or unknown.
    """
    if not is_gguf(directory):
        return open_safetensors(directory)
    # Here, because few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.model import open_gguf
    from moebius.checkpoint.gguf.tensors import gguf_index

    model = open_gguf(directory)
    return gguf_index(directory, model, gguf_family(model)[1].rules)


# What layers of multi-token prediction have besides those of a decoder layer.
_MTP = re.compile(r"model\.layers\.(\d+)\.(?:eh_proj|enorm|hnorm|shared_head|embed_tokens|transformer)\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def check_mtp_layers(index: CheckpointIndex, model_type: str, num_layers: int) -> None:
    """Layers after the last are left out only where they are multi-token prediction.

    Raises CheckpointError naming a tensor of another: config.json has fewer layers than the checkpoint.
    """
    # A GGUF file itself says how many of its blocks predict, and names what they have besides otherwise.
    names = family_of(model_type).names
    if not names.mtp_layers or index.layouts:
        return
    first_of: dict[int, str] = {}
    is_mtp: set[int] = set()
    for name in index.tensors:
        canonical = names.canonical_name(name, sys.maxsize) or ""
        layer = _LAYER.match(canonical)
        if layer is not None and int(layer[1]) >= num_layers:
            first_of.setdefault(int(layer[1]), name)
            if _MTP.match(canonical):
                is_mtp.add(int(layer[1]))
    for number, name in sorted(first_of.items()):
        if number not in is_mtp:
            raise CheckpointError(
                f"{index.directory}: tensor {name!r} is of layer {number}, but config.json has "
                f"num_hidden_layers {num_layers}, and nothing says that the layer is one of multi-token "
                "prediction: it would be left unused"
            )


def find_layout(index: CheckpointIndex, model_type: str) -> LocatedLayout:
    """The family's layout that the checkpoint uses. Raises CheckpointError naming what was looked for.

    Of layouts that have the same names, the one whose shapes fit; where none fits, the first.
    """
    layouts = index.layouts or family_of(model_type).names.layouts
    first: LocatedLayout | None = None
    for found, up in _named_layouts(index, layouts):
        if _is_shaped(found, up):
            return found
        first = first or found
    if first is not None:
        return first
    examples = ", ".join(EXPERT_TENSOR_LAYOUTS[name].example for name in layouts)
    raise CheckpointError(
        f"{index.directory} has no routed experts of {model_type}; expected names like {examples}"
    )


def _named_layouts(
    index: CheckpointIndex, layouts: tuple[str, ...]
) -> Iterator[tuple[LocatedLayout, TensorInfo]]:
    """Those of which there is an up matrix, with the tensor of one."""
    for layout in (EXPERT_TENSOR_LAYOUTS[name] for name in layouts):
        below = _up_pattern(layout.up.name)
        for prefix in LAYER_PREFIXES:
            pattern = re.compile(re.escape(prefix) + r"\d+\." + below)
            up = next((info for name, info in index.tensors.items() if pattern.fullmatch(name)), None)
            if up is not None:
                yield LocatedLayout(index, layout, prefix), up


def _is_shaped(found: LocatedLayout, up: TensorInfo) -> bool:
    """Whether fused gate and up with down have the sizes that the layout calls for.

    Shapes of one tensor alone may fit both ways round, those of the two never do: gate and up have twice as
    many outputs as down has inputs, and as many inputs as it has outputs.
    """
    layout = found.layout
    if layout.up.parts == 1:
        return True
    down = found.index.tensors.get(up.name.replace("gate_up_proj", "down_proj"))
    if down is None or len(up.shape) != 3 or len(down.shape) != 3:
        return False
    (outputs, hidden), (rows, inner) = (
        shape[::-1] if layout.up.transposed else shape for shape in (up.shape[1:], down.shape[1:])
    )
    return outputs == layout.up.parts * inner and hidden == rows


def _up_pattern(name: str) -> str:
    """The tensor that holds up, or its codes where it is quantised."""
    stem = re.escape(name.removesuffix(".weight")).replace(r"\{expert\}", r"\d+")
    if name.endswith(".weight"):
        return stem + r"\.(?:weight|weight_packed|qweight|\w+_codes)"
    return stem + r"(?:_blocks|_packed)?"


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


@dataclass(frozen=True)
class ExpertCheckpoint:
    """Filled by `open`."""

    model: MoeGeometry
    layout: LocatedLayout
    finder: MatrixFinder

    @staticmethod
    def open(model_path: str, model: MoeGeometry) -> ExpertCheckpoint:
        """Reads headers and configuration only. Raises CheckpointError."""
        index = open_index(model_path)
        layout = find_layout(index, model.model_type)
        finder = MatrixFinder(index.tensors, index.directory, read_schemes(model_path))
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
        size = (self.model.moe_intermediate_size, self.model.hidden_size)
        shape = size[::-1] if which == "down" else size
        return self.finder.find(self.layout.name(layer, expert, which), shape, template, expert)
